"""Images, boxes and masks go through the same moves, and the seed decides all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from affinear.tasks.detect.coco import Objects
from affinear.tasks.detect.runs import Runs
from affinear.tasks.detect.variation import Variation, vary

SIZE = (90, 120)
VARIATIONS = {
    "plain": Variation(short_sides=(), flip=0),
    "fit": Variation(short_sides=(64, 100, 128), long_side=150, vflip=0.5),
    "detr": Variation(short_sides=(96, 128), long_side=200, crop_share=1),
    "crop": Variation(short_sides=(), crop=(64, 64), vflip=0.5),
    "jitter": Variation(jitter=(0.5, 2.0), crop=(80, 80)),
}


@pytest.fixture
def shown(seed: int) -> tuple[torch.Tensor, Objects]:
    """Rectangles that are as bright as their number, so that the image itself tells where they are."""
    random = np.random.default_rng(seed)
    image = np.zeros((3, *SIZE), np.uint8)
    boxes: list[list[int]] = []
    for k in range(4):
        top, left = (k // 2) * 45 + int(random.integers(0, 10)), (k % 2) * 60 + int(random.integers(0, 10))
        bottom, right = top + int(random.integers(16, 34)), left + int(random.integers(16, 48))
        image[:, top:bottom, left:right] = 50 * (k + 1)
        boxes.append([left, top, right, bottom])
    shapes: tuple[Any, ...] = tuple(
        Runs.of(np.ones((b - t, r - left), np.bool_), (t, left), SIZE).json() for left, t, r, b in boxes
    )
    corners = np.array(boxes, np.float64)
    areas = (corners[:, 2:] - corners[:, :2]).prod(1)
    return torch.from_numpy(image), Objects(corners, np.arange(4), areas, np.zeros(4, np.bool_), shapes)


@pytest.mark.parametrize("name", VARIATIONS)
def test_boxes_and_masks_stay_on_their_objects(name: str, shown: tuple[torch.Tensor, Objects], seed: int) -> None:
    for draw in range(8):
        image, target = vary(*shown, VARIATIONS[name], seed + draw, masks=True)
        height, width = image.shape[1:]
        assert target["masks"].shape == (len(target["labels"]), height, width)
        for label, box, mask in zip(target["labels"].tolist(), target["boxes"], target["masks"], strict=True):
            here = image[0] == 50 * (label + 1)
            assert (mask.bool() & here).sum() / here.sum().clamp(min=1) > 0.7 or here.sum() < 60
            rows, columns = mask.any(1).nonzero(), mask.any(0).nonzero()
            edges = torch.stack((columns.min(), rows.min(), columns.max() + 1, rows.max() + 1))
            assert (edges - box).abs().max() <= 1.01
            assert box.min() >= 0
            assert (box <= torch.tensor((width, height, width, height))).all()


@pytest.mark.parametrize("name", VARIATIONS)
def test_the_seed_decides_everything(name: str, shown: tuple[torch.Tensor, Objects], seed: int) -> None:
    torch.manual_seed(1)
    first = vary(*shown, VARIATIONS[name], seed, masks=True)
    torch.manual_seed(2)
    np.random.seed(3)
    second = vary(*shown, VARIATIONS[name], seed, masks=True)
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(first[1][key], second[1][key]) for key in first[1])


def test_sides_are_those_that_were_asked_for(shown: tuple[torch.Tensor, Objects], seed: int) -> None:
    sides = {min(vary(*shown, VARIATIONS["fit"], seed + i, masks=False)[0].shape[1:]) for i in range(40)}
    assert sides == {64, 100, 113}  # 128 would make the longer side more than 150
    assert {tuple(vary(*shown, VARIATIONS["crop"], i, masks=False)[0].shape) for i in range(4)} == {(3, 64, 64)}


def test_both_directions_come_and_colours_change(shown: tuple[torch.Tensor, Objects]) -> None:
    flips = [vary(*shown, Variation(short_sides=()), i, masks=False)[0] for i in range(30)]
    assert any(torch.equal(one, shown[0]) for one in flips)
    assert any(torch.equal(one, shown[0].flip(2)) for one in flips)
    colours = [vary(*shown, Variation(short_sides=(), flip=0, photometric=True), i, masks=False)[0] for i in range(9)]
    assert not all(torch.equal(one, shown[0]) for one in colours)


def test_crowds_are_not_learned_from_and_images_without_objects_stay(shown: tuple[torch.Tensor, Objects]) -> None:
    image, objects = shown
    crowd = Objects(objects.boxes, objects.labels, objects.areas, np.array([True, False, True, True]), objects.shapes)
    assert vary(image, crowd, VARIATIONS["plain"], 0, masks=True)[1]["labels"].tolist() == [1]
    _, target = vary(image, objects.some(np.arange(0)), VARIATIONS["crop"], 0, masks=True)
    assert (target["boxes"].shape, target["masks"].shape) == ((0, 4), (0, 64, 64))
