"""Detectors small enough for tests, and what they learn from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from affinear.models.detectors import Detector, DetectorSettings

SMALL: dict[str, Any] = {"embed_dims": (8, 16, 24, 32), "depths": (1, 1, 1, 1), "num_heads": (1, 2, 3, 4)}


def small_settings(kind: Any, **other: Any) -> DetectorSettings:
    small: dict[str, Any] = {
        "channels": 32,
        "anchor_sizes": (8.0, 16.0, 32.0, 64.0, 128.0),
        "proposals": (60, 40),
        "rois": 24,
        "detections": 12,
        "min_size": 0,
        "max_size": 512,
        "score": 0.0,
    }
    return DetectorSettings(kind, **{**small, **other})


def small_detector(kind: Any, classes: int = 3, **other: Any) -> Detector:
    return Detector("mavit_tiny", classes, small_settings(kind, **other), SMALL)


def rectangles(height: int, width: int, count: int = 3) -> dict[str, Tensor]:
    """Rectangles of random classes."""
    low = torch.rand(count, 2) * torch.tensor((width * 0.6, height * 0.6))
    boxes = torch.cat((low, low + 8 + torch.rand(count, 2) * 16), dim=1).round()
    masks = torch.zeros(count, height, width, dtype=torch.uint8)
    for mask, (left, top, right, bottom) in zip(masks, boxes.int().tolist(), strict=True):
        mask[top:bottom, left:right] = 1
    return {"boxes": boxes, "labels": torch.randint(3, (count,)), "masks": masks}


@pytest.fixture
def settings() -> Callable[..., DetectorSettings]:
    return small_settings


@pytest.fixture
def detector() -> Callable[..., Detector]:
    return small_detector


@pytest.fixture
def target() -> Callable[..., dict[str, Tensor]]:
    return rectangles
