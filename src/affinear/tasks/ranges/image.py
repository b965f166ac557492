"""CIFAR-10 in grey, pixel by pixel: 1,024 tokens of 256 kinds."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..images.labelled import cifar
from ..images.labelled.images import ArraySource, Images
from .sequences import Ranges, Rows, Split

LUMA = np.array([0.2989, 0.5870, 0.1140], np.float32)  # of red, green and blue
VALIDATION = 10  # one training image in so many is for choosing


def grey(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Brightness (..., H, W) of colours (..., 3, H, W).

    Examples:
        >>> grey(np.full((3, 1, 1), 255, np.uint8)).tolist()
        [[255]]
    """
    return np.rint(np.tensordot(LUMA, pixels.astype(np.float32), axes=(0, -3))).clip(0, 255).astype(np.uint8)


def read(folder: Path, layout: cifar.Layout) -> Ranges:
    """A folder with the files of CIFAR-10: 45,000 images to learn from, 5,000 to choose by, 10,000 to be judged by."""
    images = cifar.read(folder, layout)
    train, test = _split(images, images.train, "train"), _split(images, images.test, "test")
    held = np.arange(len(train)) % VALIDATION == VALIDATION - 1
    learnt, chosen = (train.some(np.flatnonzero(part).tolist()) for part in (~held, held))
    chosen = dataclasses.replace(chosen, title="validation")
    return Ranges(f"grey {images.name}", "image", learnt, chosen, test, images.class_names, 256, cifar.SIDE**2)


def _split(images: Images, half: object, title: str) -> Split:
    assert isinstance(half, ArraySource)
    pixels = np.concatenate([grey(part) for part in np.array_split(half.pixels, max(1, len(half) // 5000))])
    tokens = images.size[0] * images.size[1] if images.size else 0
    return Split((Rows(pixels.reshape(-1), np.arange(len(half) + 1, dtype=np.int64) * tokens),), half.labels, title)
