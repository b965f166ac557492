"""Masks as runs and polygons as masks, against COCO's own tools."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from affinear.tasks.detect.polygons import rasterize
from affinear.tasks.detect.runs import Runs, overlaps, pack, union, unpack

coco: Any = pytest.importorskip("pycocotools.mask")


def blobs(rng: np.random.Generator, height: int, width: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """A mask of rectangles and noise, often empty or full in whole columns."""
    mask = rng.random((height, width)) < rng.choice([0.0, 0.02, 0.3, 1.0])
    top, left = rng.integers(height), rng.integers(width)
    mask[top : top + rng.integers(height + 1), left : left + rng.integers(width + 1)] = rng.random() < 0.7
    return mask


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_masks_become_the_same_text_as_with_pycocotools_and_come_back(rng: np.random.Generator) -> None:
    for _ in range(60):
        mask = blobs(rng, *rng.integers(1, 40, 2))
        runs, theirs = Runs.of(mask), coco.encode(np.asfortranarray(mask, dtype=np.uint8))
        assert runs.json()["counts"] == theirs["counts"].decode()
        assert Runs.read(theirs) == runs
        assert (runs.mask() == mask).all()
        assert runs.area == coco.area(theirs)
        if runs.area:
            assert runs.box == tuple(coco.toBbox(theirs))


def test_a_mask_in_a_corner_of_a_larger_image_is_as_if_it_were_drawn_there(rng: np.random.Generator) -> None:
    for _ in range(30):
        mask, whole = blobs(rng, 7, 9), np.zeros((12, 20), np.bool_)
        top, left = int(rng.integers(6)), int(rng.integers(12))
        whole[top : top + 7, left : left + 9] = mask
        assert Runs.of(mask, (top, left), (12, 20)) == Runs.of(whole)


def test_long_runs_are_packed_and_unpacked(rng: np.random.Generator) -> None:
    counts = rng.integers(0, 2 ** rng.integers(1, 40, 300)).astype(np.int64)
    assert (unpack(pack(counts)) == counts).all()


def test_uncompressed_counts_are_read() -> None:
    assert Runs.read({"size": [2, 3], "counts": [2, 3, 1]}).mask().tolist() == [
        [False, True, True],
        [False, True, False],
    ]


def test_overlap_and_union_are_those_of_the_pixels(rng: np.random.Generator) -> None:
    masks = [blobs(rng, 23, 31) for _ in range(9)]
    others = [blobs(rng, 23, 31) for _ in range(7)]
    found = overlaps([Runs.of(mask) for mask in masks], [Runs.of(mask) for mask in others])
    assert found.tolist() == [[float((one & other).sum()) for other in others] for one in masks]
    assert union([Runs.of(mask) for mask in masks]) == Runs.of(np.any(masks, axis=0))


def test_polygons_fill_the_same_pixels_as_with_pycocotools(rng: np.random.Generator) -> None:
    for number in range(150):
        height, width = (int(side) for side in rng.integers(1, 60, 2))
        corners = rng.uniform(-0.2, 1.2, (rng.integers(3, 12), 2)) * (width, height)
        if number % 3 == 0:
            corners = corners.round()  # outlines by hand lie on pixels, and go straight up and along
        if number % 5 == 0:
            corners[1] = corners[0]
        outlines = [corners.ravel().tolist(), (corners[::-1] * rng.uniform(0.3, 1)).ravel().tolist()]
        theirs = coco.decode(coco.merge(coco.frPyObjects(outlines, height, width)))
        assert (rasterize(outlines, height, width).mask() == theirs.astype(bool)).all()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"size": [2, 2], "counts": [1, 2]}, "expected runs of 2 x 2 = 4 pixels, got 3"),
        ({"size": [2, 2]}, 'expected runs as {"size"'),
        ({"size": [2, 2], "counts": "\x7f"}, "packed as COCO's text"),
    ],
)
def test_runs_that_make_no_mask_are_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text.replace("[", r"\[").replace("{", r"\{")):
        Runs.read(given)


def test_an_outline_of_two_corners_is_refused() -> None:
    with pytest.raises(ValueError, match="three corners"):
        rasterize([[0, 0, 1, 1]], 4, 4)
