"""Folders of photos and maps are opened and paired, and what is wrong with them is said in a sentence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from affinear.tasks.segment.opening import open_scenes
from affinear.tasks.segment.pairs import UNLABELLED, Numbers, Scenes, WrongMap

from . import scenes


def opened(root: Path, *, zero_is_class: bool = False, test_split: str | None = None, memory: bool = False) -> Scenes:
    return open_scenes(str(root), zero_is_class=zero_is_class, test_split=test_split, memory=memory)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return scenes.write(tmp_path / "streets")


def test_the_layout_of_ade20k(root: Path):
    data = opened(root)
    assert data.sizes == (8, 4)
    assert data.classes == scenes.CLASSES
    photo, labels = data.train[1]
    assert labels.shape == (photo.height, photo.width) == data.train.sizes[1] == (72, 80)
    written = np.asarray(Image.open(root / "annotations/training/scene1.png")).astype(int)
    assert np.array_equal(labels, written - 1)
    assert (labels[:2] == UNLABELLED).all()


def test_numbers_in_names_count_as_numbers(tmp_path: Path):
    data = opened(scenes.write(tmp_path / "many", (12, 1)))
    assert [Path(path).stem for path in data.train.photos] == [f"scene{i}" for i in range(12)]


def test_a_folder_pair_without_halves_holds_one_in_ten_out(root: Path):
    for kind in ("images", "annotations"):
        (root / kind / "training").rename(root / f"{kind}_")
        for path in (root / kind / "validation").iterdir():
            path.unlink()
        (root / kind / "validation").rmdir()
        (root / kind).rmdir()
    (root / "images_").rename(root / "images")
    (root / "annotations_").rename(root / "masks")
    data = opened(root)
    assert data.sizes == (7, 1)
    assert not set(data.train.photos) & set(data.test.photos)
    assert opened(root).test.photos == data.test.photos


def test_a_named_folder_is_judged_by(root: Path):
    for kind in ("images", "annotations"):
        (root / kind / "validation").rename(root / kind / "test")
    assert opened(root).sizes == (8, 4)
    assert opened(root, test_split="test").sizes == (8, 4)
    with pytest.raises(ValueError, match=r"expected a folder .*val"):
        opened(root, test_split="val")


def test_classes_without_names_are_counted(root: Path):
    (root / "classes.txt").unlink()
    assert opened(root).classes == ("class 1", "class 2", "class 3")
    assert opened(root, zero_is_class=True).classes == ("class 0", "class 1", "class 2", "class 3")


def test_names_of_ade20k_itself(root: Path):
    (root / "classes.txt").unlink()
    head = "Idx\tRatio\tTrain\tVal\tName\n"
    (root / "objectInfo150.txt").write_text(head + "".join(f"{i}\t0.1\t1\t1\t{n}\n" for i, n in enumerate("abc", 1)))
    assert opened(root).classes == ("a", "b", "c")


def test_everything_can_be_kept_in_memory(root: Path):
    kept, read = opened(root, memory=True), opened(root)
    for i in range(len(read.train)):
        assert np.array_equal(np.asarray(kept.train[i][0]), np.asarray(read.train[i][0]))
        assert np.array_equal(kept.train[i][1], read.train[i][1])
    assert kept.fingerprint == read.fingerprint


def test_other_files_or_classes_have_another_fingerprint(root: Path):
    before = opened(root).fingerprint
    assert opened(root).fingerprint == before
    (root / "classes.txt").write_text("sky\nstreet\ncar\n")
    renamed = opened(root).fingerprint
    (root / "images/training/scene0.jpg").rename(root / "images/training/scene9.jpg")
    (root / "annotations/training/scene0.png").rename(root / "annotations/training/scene9.png")
    moved = opened(root).fingerprint
    path = root / "annotations/training/scene1.png"
    numbers = np.asarray(Image.open(path)).copy()
    numbers[30, 30] = numbers[30, 30] % 3 + 1
    Image.fromarray(numbers).save(path)
    assert len({before, renamed, moved, opened(root).fingerprint}) == 4


def test_a_palette_hides_no_numbers(root: Path):
    path = root / "annotations/training/scene0.png"
    image = Image.open(path)
    image.putpalette([1, 2, 3] * 256)
    image.save(path)
    assert set(np.unique(opened(root).train[0][1])) == {-1, 0, 1, 2}


def test_a_map_of_another_size_is_named_before_training(root: Path):
    Image.fromarray(np.ones((10, 12), np.uint8)).save(root / "annotations/training/scene3.png")
    with pytest.raises(ValueError, match=r"scene3.png: expected the size of its photo, 72 x 80 .*, got 10 x 12"):
        opened(root)


def test_a_class_beyond_the_list_is_named_before_training(root: Path):
    path = root / "annotations/validation/scene2.png"
    numbers = np.asarray(Image.open(path)).copy()
    numbers[5, 7] = 9
    Image.fromarray(numbers).save(path)
    with pytest.raises(ValueError, match=r"scene2.png: expected class numbers from 1 to 3, .* got 9 at row 5, col"):
        opened(root)


@pytest.mark.parametrize(("half", "purpose"), [("training", "learned from"), ("validation", "judged by")])
def test_a_half_without_classes_is_refused(root: Path, half: str, purpose: str):
    random = np.random.default_rng()
    for path in (root / "annotations" / half).iterdir():
        nothing = random.choice(np.array([0, 255], np.uint8), np.asarray(Image.open(path)).shape)
        Image.fromarray(nothing).save(path)
    said = rf"{half}: expected class numbers from 1 on in the maps that are {purpose}, found nothing but 0, .*=true"
    with pytest.raises(ValueError, match=said):
        opened(root)


def test_more_classes_than_a_file_of_weights_may_have_are_refused(root: Path):
    names = [f"class {i}" for i in range(255)]
    (root / "classes.txt").write_text("\n".join(names[1:]))
    assert len(opened(root).classes) == 254
    (root / "classes.txt").write_text("\n".join(names))
    with pytest.raises(ValueError, match=r"classes.txt: expected at most 254 classes, got 255"):
        opened(root)
    (root / "classes.txt").unlink()
    deep = Image.fromarray(np.random.default_rng().integers(256, 999, (64, 96)).astype(np.uint16))
    deep.save(root / "annotations/training/scene0.png")
    with pytest.raises(ValueError, match=r"scene0.png: expected class numbers up to 254, got \d+; is it a map of"):
        opened(root)


def test_pixels_that_do_not_count_may_be_255(root: Path):
    labels = Numbers(3).labels(np.array([[0, 1, 255, 3]]), "")
    assert labels.tolist() == [[-1, 0, -1, 2]]
    assert Numbers(3, zero_is_class=True).labels(np.array([[0, 2, 255]]), "").tolist() == [[0, 2, -1]]
    assert Numbers(3).numbers(labels).tolist() == [[0, 1, 0, 3]]
    with pytest.raises(WrongMap, match="from 0 to 2, 255 for pixels that do not count, got 3"):
        Numbers(3, zero_is_class=True).labels(np.array([[3]]), "map")


def test_colours_are_no_numbers(root: Path):
    Image.new("RGB", (96, 64)).save(root / "annotations/training/scene0.png")
    with pytest.raises(ValueError, match=r"scene0.png: expected one number per pixel, .* got an image of mode RGB"):
        opened(root)


def test_photos_and_maps_must_pair_up(root: Path):
    (root / "annotations/training/scene0.png").unlink()
    with pytest.raises(ValueError, match=r"expected a map in .* for every file .* but .*scene0.jpg has none"):
        opened(root)
    (root / "images/training/scene0.jpg").unlink()
    (root / "images/training/scene1.jpg").unlink()
    with pytest.raises(ValueError, match=r"expected a photo in .* but .*scene1.png has none"):
        opened(root)


def test_a_folder_of_another_kind_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"expected a folder with images/training .* 'nowhere', which is no folder"):
        open_scenes("nowhere", zero_is_class=False, test_split=None, memory=False)
    (tmp_path / "cats").mkdir()
    with pytest.raises(ValueError, match=r"found no folder called images or photos .* there are cats"):
        opened(tmp_path)


def test_an_empty_list_of_classes_is_refused(root: Path):
    (root / "classes.txt").write_text("\n")
    with pytest.raises(ValueError, match="expected the name of a class on every line, got an empty file"):
        opened(root)
