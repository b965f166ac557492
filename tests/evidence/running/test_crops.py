"""Crops that are cut on the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from affinear.tasks.segment.pairs import UNLABELLED
from affinear.tasks.segment.settings import Segmentation
from affinear.tasks.segment.variation import distort

PLAIN = Segmentation(crop=(32, 48), zoom=(1.0, 1.0), flip=0.0, photometric=False)


@pytest.fixture
def crops(script: Any) -> Any:
    return script("running.crops")


@pytest.fixture
def some(crops: Any) -> Any:
    classes = torch.randint(-1, 5, (4, 10, 12)).repeat_interleave(4, 1).repeat_interleave(4, 2).short()
    colours = torch.randint(256, (6, 3), dtype=torch.uint8)
    return crops.Kept(colours[classes.long() + 1].permute(0, 3, 1, 2).contiguous(), classes)


def draws(count: int) -> Tensor:
    return torch.rand(count, 12)


def test_a_crop_without_zoom_is_a_part_of_its_photo(crops: Any, some: Any) -> None:
    picked, chances = torch.tensor([2, 0, 2]), draws(3)
    chances[:, 1:3] = 0.5
    images, labels = crops.cut(some, picked, chances, PLAIN)
    assert torch.allclose(255 * images, some.images[picked, :, 4:36].float(), atol=1e-2)
    assert (labels == some.labels[picked, 4:36]).all()


def test_what_is_mirrored_is_mirrored_with_its_labels(crops: Any, some: Any) -> None:
    picked, chances = torch.tensor([1]), draws(1)
    plain, mirrored = (crops.cut(some, picked, chances, replace(PLAIN, flip=flip)) for flip in (0.0, 1.0))
    assert torch.allclose(mirrored[0], plain[0].flip(3), atol=1e-5)
    assert (mirrored[1] == plain[1].flip(2)).all()


def test_labels_stay_with_their_colours_at_every_zoom(crops: Any, some: Any) -> None:
    picked = torch.arange(4)
    images, labels = crops.cut(some, picked, draws(4), replace(PLAIN, zoom=(1.0, 2.0), flip=0.5))
    colours, grown = some.images.permute(0, 2, 3, 1), labels[:, None].float()
    inside = F.max_pool2d(grown, 3, 1)[:, 0] == -F.max_pool2d(-grown, 3, 1)[:, 0]  # no other class is near
    table = torch.stack([colours[some.labels == number][0] for number in range(-1, 5)])
    found = images.permute(0, 2, 3, 1)[:, 1:-1, 1:-1][inside]
    assert torch.allclose(255 * found, table[labels[:, 1:-1, 1:-1][inside] + 1].float(), atol=0.1)


def test_what_lies_beyond_a_photo_is_black_and_unlabelled(crops: Any, some: Any) -> None:
    images, labels = crops.cut(some, torch.tensor([3]), draws(1), replace(PLAIN, zoom=(0.5, 0.5)))
    assert (labels[:, 21:] == UNLABELLED).all()
    assert (labels[:, :, 25:] == UNLABELLED).all()
    assert images[:, :, 21:].max() == 0


def test_light_and_contrast_are_those_of_training_on_the_host(crops: Any) -> None:
    pixels = torch.rand(1, 3, 8, 8) * 0.4 + 0.3
    chances = torch.ones(1, 8)
    chances[0, 0], chances[0, 4] = 0.0, 0.75  # brighter by 16 of 255, and nothing else
    assert torch.allclose(crops.lit(pixels, chances), pixels + 16 / 255, atol=1e-5)
    chances[0, 0], chances[0, 1], chances[0, 5] = 1.0, 0.0, 0.9
    assert torch.allclose(crops.lit(pixels, chances), (pixels * 1.4).clamp(0, 1), atol=1e-5)


def test_colours_turn_about_greys_and_vary_as_much_as_on_the_host(crops: Any) -> None:
    grey = torch.rand(16, 1, 4, 4).expand(-1, 3, -1, -1)
    chances = torch.rand(16, 8)
    chances[:, :2] = 1.0  # colours alone
    assert torch.allclose(crops.lit(grey, chances), grey, atol=2e-3)
    photo = Image.fromarray(np.random.default_rng().integers(60, 200, (8, 8, 3), np.uint8)).resize((32, 32))
    pixels = torch.from_numpy(np.asarray(photo).copy()).permute(2, 0, 1).float() / 255
    here = crops.lit(pixels.expand(256, -1, -1, -1), torch.rand(256, 8))
    there = [distort(np.asarray(photo), np.random.default_rng()) / 255 for _ in range(256)]
    assert abs(here.std(dim=0).mean() - np.stack(there).std(axis=0).mean()) < 0.05
