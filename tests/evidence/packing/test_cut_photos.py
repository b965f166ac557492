"""Crops of photographs: halved, the same photo once, no drawings, and a list that tells which they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def cutting(script: Any) -> Any:
    return script("packing.cut_photos")


def noise(path: Path, width: int, height: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng().integers(256, size=(height, width, 3), dtype=np.uint8)).save(path)


def test_crops_are_pieces_of_the_halved_photo(cutting: Any, tmp_path: Path) -> None:
    noise(tmp_path / "in" / "photo.png", 400, 200)
    cuts = list(cutting.cut([tmp_path / "in"], tmp_path / "out", 100, 4))
    half = Image.open(tmp_path / "in" / "photo.png").resize((200, 100), Image.Resampling.LANCZOS)
    assert [(one.left, one.top) for one in cuts] == [(0, 0), (100, 0)]
    for one in cuts:
        crop = half.crop((one.left, one.top, one.left + 100, one.top + 100))
        assert (np.asarray(Image.open(tmp_path / "out" / one.file)) == np.asarray(crop)).all()


def test_a_photo_that_is_there_twice_is_cut_once(cutting: Any, tmp_path: Path) -> None:
    noise(tmp_path / "in" / "photo.png", 200, 200)
    (tmp_path / "in" / "again.png").write_bytes((tmp_path / "in" / "photo.png").read_bytes())
    assert len(list(cutting.cut([tmp_path / "in"], tmp_path / "out", 100, 4))) == 1


def test_drawings_small_pictures_and_other_files_are_left_out(cutting: Any, tmp_path: Path) -> None:
    noise(tmp_path / "in" / "small.png", 199, 400)
    Image.new("RGB", (300, 300), "red").save(tmp_path / "in" / "drawing.png")
    (tmp_path / "in" / "notes.txt").write_text("no picture")
    assert list(cutting.cut([tmp_path / "in"], tmp_path / "out", 100, 4)) == []


def test_the_same_photos_give_the_same_crops_wherever_they_lie(cutting: Any, tmp_path: Path) -> None:
    noise(tmp_path / "one" / "b.png", 300, 260)
    noise(tmp_path / "one" / "deep" / "a.png", 240, 240)
    first = list(cutting.cut([tmp_path / "one"], tmp_path / "out", 100, 2))
    (tmp_path / "two").mkdir()
    for file in (tmp_path / "one").rglob("*.png"):
        file.rename(tmp_path / "two" / file.name)
    assert list(cutting.cut([tmp_path / "two"], tmp_path / "elsewhere", 100, 2)) == first


@pytest.mark.parametrize(("size", "most", "count"), [((960, 480), 4, 2), ((1920, 1080), 4, 4), ((1920, 1080), 1, 1)])
def test_crops_lie_within_the_picture_and_do_not_overlap(
    cutting: Any, size: tuple[int, int], most: int, count: int
) -> None:
    places = cutting.places(size, 480, most)
    assert len(places) == count
    for left, top in places:
        assert 0 <= left <= size[0] - 480
        assert 0 <= top <= size[1] - 480
    apart = [(a, b) for a in places for b in places if a != b]
    assert all(max(abs(a[0] - b[0]), abs(a[1] - b[1])) >= 480 for a, b in apart)
