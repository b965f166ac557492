"""Corrupt images are passed over, counted once each by name, and stop a run when they are too many."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from affinear.tasks.classify import data, recipe_for
from affinear.tasks.images.labelled import folder
from affinear.tasks.images.reading import open_image, size_of
from affinear.train import Run, train
from affinear.train.stepping import Stepper

SIMPLE = data.Augment("simple", pad=1)


def photos(folder: Path, corrupt: Iterable[int], count: int = 100) -> data.Images:
    """So many images of each half in one class, those of the training half with these numbers corrupt."""
    for half in ("train", "val"):
        (folder / half / "pets").mkdir(parents=True)
        for number in range(count):
            path = folder / half / "pets" / f"{number:03}.png"
            Image.fromarray(np.full((6, 6, 3), number, np.uint8)).save(path)
    for number in corrupt:
        spoil(folder / "train" / "pets" / f"{number:03}.png", number)
    return data.open_data(str(folder))


def spoil(path: Path, how: int) -> None:
    path.write_bytes([b"", b"text", path.read_bytes()[:45]][how % 3])


def batching(workers: int = 0, **given: Any) -> data.Batching:
    return data.Batching(10, (6, 6), workers=workers, mean=(0.0,) * 3, std=(1.0,) * 3, **given)


def shades(batch: Any) -> list[int]:
    return batch[0][:, 0, 3, 3].tolist()


@pytest.mark.parametrize("workers", [0, 2])
def test_the_next_good_one_comes_instead_and_each_is_counted_once(tmp_path: Path, workers: int):
    images = photos(tmp_path, [99, 100], count=200)
    skipped = data.Skipped()
    loader = data.train_loader(images, batching(workers), skipped)
    for _ in range(2):
        seen = sorted(shade for batch in loader for shade in shades(batch))
        assert seen == sorted([*range(99), *[101] * 3, *range(102, 200)])
    assert len(skipped) == 2
    assert [Path(name).name for name in skipped.names] == ["099.png", "100.png"]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_test_image_is_left_out_or_marked(tmp_path: Path, workers: int):
    images = photos(tmp_path, [])
    spoil(tmp_path / "val" / "pets" / "042.png", 2)
    skipped = data.Skipped()
    seen = [shades(batch) for batch in data.test_loader(images, batching(workers), skipped)]
    assert [shade for batch in seen for shade in batch] == [shade for shade in range(100) if shade != 42]
    assert [len(batch) for batch in seen] == [10, 10, 10, 10, 9, 10, 10, 10, 10, 10]
    assert skipped.names == (str(tmp_path / "val" / "pets" / "042.png"),)
    marked = torch.cat([targets for _, targets in data.test_loader(images, batching(workers), skipped, full=True)])
    assert (marked == data.NO_IMAGE).nonzero().flatten().tolist() == [42]


@pytest.mark.parametrize("augment", [data.Augment(), SIMPLE, data.Augment("timm")], ids=lambda augment: augment.kind)
def test_a_share_is_still_right_and_more_are_too_many(tmp_path: Path, augment: data.Augment):
    images = photos(tmp_path, [17])
    skipped = data.Skipped(0.01)
    assert len(list(data.train_loader(images, batching(augment=augment), skipped))) == 10
    spoil(tmp_path / "train" / "pets" / "018.png", 0)
    with pytest.raises(
        data.TooManyCorrupt, match=r"2 of the 100 train images cannot be read, more than 1 %.*/017\.png"
    ):
        list(data.train_loader(images, batching(augment=augment), skipped))


def test_one_of_few_is_passed_over_and_two_are_not(tmp_path: Path):
    images = photos(tmp_path, [5], count=20)
    skipped = data.Skipped()
    list(data.train_loader(images, batching(), skipped))
    assert [Path(name).name for name in skipped.names] == ["005.png"]
    spoil(tmp_path / "train" / "pets" / "007.png", 0)
    with pytest.raises(data.TooManyCorrupt, match=r"2 of the 20 train images .*5 %.*unreadable=0.2.*: .*/007\.png$"):
        list(data.train_loader(images, batching(), data.Skipped()))
    list(data.train_loader(images, batching(), data.Skipped(0.1)))


def test_a_share_of_nothing_lets_none_pass(tmp_path: Path):
    images = photos(tmp_path, [5], count=99)
    with pytest.raises(data.TooManyCorrupt, match=r"1 of the 99 train images .*: .*/005\.png$"):
        list(data.train_loader(images, batching(), data.Skipped(0.0)))


def test_a_quick_look_names_all_that_cannot_be_read_in_both_halves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    images = photos(tmp_path, [3, 40, 77], count=100)
    for number in (1, 2, 50, 51, 52, 53):
        spoil(tmp_path / "val" / "pets" / f"{number:03d}.png", number % 2)
    source: Any = images.train
    assert folder.unreadable(source) == [3, 40, 77]
    setup = recipe_for("affinear_trunk_cifar", "tiny", image_size=(8, 8), workers=0, batch_size=10)
    run = Run("affinear_trunk_cifar", str(tmp_path), tmp_path / "run", setup, {"depth": 1})
    monkeypatch.setattr(Stepper, "step", lambda *given: pytest.fail("trained before the look"))
    with pytest.raises(data.TooManyCorrupt, match=r"6 of the 100 test images .*/001\.png.*/053\.png"):
        train(run, data=images)


def test_both_halves_are_told_at_once(tmp_path: Path):
    images, skipped = photos(tmp_path, []), data.Skipped()
    for half, one in (("train", images.train), ("test", images.test)):
        skipped.tally(half, one)
    both = [("train", number) for number in range(6)] + [("test", number) for number in range(6)]
    with pytest.raises(data.TooManyCorrupt, match=r"6 of the 100 train .*\. 6 of the 100 test"):
        skipped.absorb(both)


def test_of_many_files_some_are_decoded_and_more_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source: Any = photos(tmp_path, [0, 2, 5, 6], count=20).train  # 2 and 5 have a good beginning, 6 and 0 none
    assert folder.unreadable(source) == [0, 2, 5, 6]
    monkeypatch.setattr(folder, "MOST_DECODED", 5)
    monkeypatch.setattr(folder, "MOST_OPENED", 10)
    assert folder.unreadable(source) == [0, 6]


def test_images_of_one_size_tell_it_and_large_or_different_ones_do_not(tmp_path: Path):
    assert photos(tmp_path / "a", [3], count=12).size == (6, 6)
    other = photos(tmp_path / "b", [], count=12)
    Image.new("RGB", (7, 6)).save(other.train.path(0))
    assert data.open_data(str(tmp_path / "b")).size is None
    large = photos(tmp_path / "c", [], count=2)
    for half in (large.train, large.test):
        for number in range(2):
            Image.new("RGB", (300, 300)).save(half.path(number))
    assert data.open_data(str(tmp_path / "c")).size is None


def test_a_turned_photo_tells_the_size_it_is_shown_at(tmp_path: Path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (20, 10)).save(tmp_path / "a.jpg", exif=exif)
    assert size_of(tmp_path / "a.jpg") == (20, 10)
    assert open_image(tmp_path / "a.jpg").size == (10, 20)


def complaint(loader: Iterable[object]) -> str:
    # Not pytest.raises, which would keep the loader alive: its processes then end late.
    try:
        list(loader)
    except data.TooManyCorrupt as error:
        return str(error)
    return ""


def test_the_sentence_of_a_loading_process_is_the_same(tmp_path: Path):
    images = photos(tmp_path, range(100))
    said = complaint(data.train_loader(images, batching(workers=2), data.Skipped()))
    assert said.startswith(f"{said.count('.png')} of the 100 train images cannot be read")
    assert "\n" not in said


def test_many_names_are_cut_short(tmp_path: Path):
    images = photos(tmp_path, range(30), count=100)
    skipped = data.Skipped()
    data.train_loader(images, batching(), skipped)
    with pytest.raises(data.TooManyCorrupt, match=r"^30 of the 100.*/019\.png and 10 more$"):
        skipped.absorb([("train", number) for number in range(30)])
    assert len(skipped) == 30


def test_counts_of_other_processes_and_of_an_earlier_run_are_taken_over(tmp_path: Path):
    images = photos(tmp_path, [17], count=200)
    ours, theirs = data.Skipped(0.01), data.Skipped(0.01)
    list(data.train_loader(images, batching(), ours))
    data.train_loader(images, batching(), theirs)
    data.test_loader(images, batching(), theirs)
    state = json.loads(json.dumps(ours.state()))
    assert state == [["train", 17]]
    theirs.absorb(state + state)
    assert theirs.names == ours.names
    with pytest.raises(data.TooManyCorrupt, match="3 of the 200 train images"):
        theirs.absorb([("train", 1), ("test", 1), ("train", 2)])


def test_a_count_is_for_one_data_set(tmp_path: Path):
    skipped = data.Skipped()
    images = photos(tmp_path, [])
    data.train_loader(images, batching(), skipped)
    data.train_loader(images, batching(), skipped)
    with pytest.raises(ValueError, match="counts other train samples already; make a new Skipped"):
        data.train_loader(data.open_data(str(tmp_path)), batching(), skipped)
