"""Folders of images."""

import os
import shutil
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from affinear.tasks.classify import TASK, ClassifySettings
from affinear.tasks.classify.data import Images, open_data
from affinear.tasks.images.reading import CorruptImage, open_image


def fill(folder: Path, names: list[str]) -> None:
    for number, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4), (number % 256, 0, 0)).save(path)


def halves(folder: Path, test: str = "val", classes: tuple[str, ...] = ("cat", "dog")) -> None:
    fill(folder, [f"{half}/{name}/{n}.png" for half in ("train", test) for name in classes for n in range(3)])


def names_of(images: Images) -> list[str]:
    return [images.train.path(index) for index in range(len(images.train))]


@pytest.mark.parametrize("test", ["val", "validation", "valid", "test"])
def test_two_halves(tmp_path: Path, test: str):
    halves(tmp_path, test)
    images = open_data(str(tmp_path))
    assert images.name == f"images in {tmp_path} (train, {test})"
    assert (images.class_names, images.size, images.channels) == (("cat", "dog"), (4, 4), 3)
    assert [images.train[index][1] for index in range(6)] == [0, 0, 0, 1, 1, 1]
    image, label = images.test[5]
    assert (image.mode, image.getpixel((0, 0)), label) == ("RGB", (11, 0, 0), 1)
    assert images.test.path(5) == str(tmp_path / test / "dog" / "2.png")


def test_classes_and_files_are_sorted_as_people_count(tmp_path: Path):
    halves(tmp_path, classes=("n10", "n9", "猫", "²"))
    fill(tmp_path, ["train/n9/10.png", "train/n9/deep/er/1.JPG"])
    images = open_data(str(tmp_path))
    assert images.class_names == ("n9", "n10", "²", "猫")
    assert [Path(name).name for name in names_of(images)[:5]] == ["0.png", "1.png", "2.png", "10.png", "1.JPG"]


def test_hidden_files_and_other_files_do_not_count(tmp_path: Path):
    halves(tmp_path)
    fill(tmp_path, ["train/cat/.hidden.png", "train/.cache/a.png", "train/cat/.thumbs/a.png"])
    (tmp_path / "train/cat/readme.txt").touch()
    (tmp_path / "train/list.csv").touch()
    assert len(open_data(str(tmp_path)).train) == 6


def test_halves_must_have_the_same_classes(tmp_path: Path):
    halves(tmp_path)
    fill(tmp_path, ["train/cow/a.png", "val/emu/a.png"])
    with pytest.raises(ValueError, match="same class folders in train and val; val lacks cow; train lacks emu"):
        open_data(str(tmp_path))


def test_a_class_without_images_is_named(tmp_path: Path):
    halves(tmp_path)
    for half in ("train", "val"):
        (tmp_path / half / "eel").mkdir()
    with pytest.raises(ValueError, match="expected images of every class, found none in eel"):
        open_data(str(tmp_path))


def test_a_half_without_images_is_named(tmp_path: Path):
    halves(tmp_path)
    for path in (tmp_path / "val").rglob("*.png"):
        path.unlink()
    with pytest.raises(ValueError, match="val: expected images in its class folders, found none"):
        open_data(str(tmp_path))


def test_without_halves_one_in_ten_of_each_class_is_held_out_by_name(tmp_path: Path):
    first, second = tmp_path / "first", tmp_path / "second"
    fill(first, [f"{name}/{n}.png" for name, count in (("a", 30), ("b", 4)) for n in range(count)])
    images = open_data(str(first))
    assert images.name == f"images in {first} (one in 10 of each class held out for testing)"
    assert Counter(images.test[index][1] for index in range(len(images.test))) == {0: 3, 1: 1}
    held = {Path(images.test.path(index)).relative_to(first) for index in range(4)}
    assert not held & {Path(name).relative_to(first) for name in names_of(images)}
    assert len(images.train) == 30
    shutil.move(first, second)
    again = open_data(str(second))
    assert {Path(again.test.path(index)).relative_to(second) for index in range(4)} == held


def test_a_class_too_small_to_hold_out_from_is_named(tmp_path: Path):
    fill(tmp_path, ["a/1.png", "a/2.png", "b/1.png"])
    with pytest.raises(ValueError, match=r"at least two images of each class.* too few in b;"):
        open_data(str(tmp_path))


def test_a_training_half_alone_is_told_what_to_do(tmp_path: Path):
    fill(tmp_path, ["train/a/1.png", "train/a/2.png"])
    with pytest.raises(
        ValueError, match=rf"Found: train/; to hold out one image in 10 for testing, give {tmp_path}/train"
    ):
        open_data(str(tmp_path))


def test_a_pipe_is_no_image_and_hangs_nothing(tmp_path: Path):
    halves(tmp_path)
    os.mkfifo(tmp_path / "train/cat/pipe.png")
    assert len(open_data(str(tmp_path)).train) == 6
    with pytest.raises(CorruptImage, match="not a regular file"):
        open_image(tmp_path / "train/cat/pipe.png")


def test_links_that_lead_back_are_named(tmp_path: Path):
    halves(tmp_path)
    for name in ("a", "b"):
        (tmp_path / "train/cat" / name).symlink_to(".")
    with pytest.raises(ValueError, match=r"train/cat/a: a link that leads back to .*train/cat, which it is in; remove"):
        open_data(str(tmp_path))


def test_each_real_file_counts_once(tmp_path: Path):
    halves(tmp_path)
    (tmp_path / "more").mkdir()
    fill(tmp_path, ["more/x.png"])
    (tmp_path / "train/cat/more").symlink_to(tmp_path / "more")
    (tmp_path / "train/cat/again").symlink_to(tmp_path / "more")
    (tmp_path / "train/cat/same.png").symlink_to(tmp_path / "train/cat/0.png")
    (tmp_path / "train/cat/gone.png").symlink_to(tmp_path / "nothing.png")
    assert len(open_data(str(tmp_path)).train) == 7


def test_a_file_of_two_classes_is_named(tmp_path: Path):
    halves(tmp_path)
    (tmp_path / "train/dog/cats").symlink_to(tmp_path / "train/cat")
    with pytest.raises(ValueError, match=r"dog/cats/0.png: the same file as .*cat/0.png, of another class"):
        open_data(str(tmp_path))


def judged(spec: Path) -> tuple[Images, str]:
    return TASK.open_to_judge(str(spec), ClassifySettings())


def test_class_folders_without_halves_are_judged_whole(tmp_path: Path):
    fill(tmp_path, [f"{name}/{n}.png" for name in ("cat", "dog") for n in range(20)] + ["eel/1.png"])
    images, which = judged(tmp_path)
    assert (len(images.test), which) == (41, f"all images in {tmp_path}")
    assert images.class_names == ("cat", "dog", "eel")


def test_a_test_half_is_what_is_judged(tmp_path: Path):
    halves(tmp_path / "both")
    images, which = judged(tmp_path / "both")
    assert (len(images.test), which) == (6, f"the test half of images in {tmp_path / 'both'} (train, val)")
    fill(tmp_path / "lone", ["val/cat/1.png", "val/dog/1.png"])
    images, which = judged(tmp_path / "lone")
    assert (len(images.test), which) == (2, f"all images in {tmp_path / 'lone' / 'val'}")
    assert judged(Path("digits"))[1] == "the test half of digits"
