"""What happens to training images, decided by the seed of each and by nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from ...train.draws import Words, uniform

Kind = Literal["none", "simple", "timm"]
ERASED_WITH = ("const", "rand", "pixel")


@dataclass(frozen=True)
class Augment:
    """How training images are varied.

    Attributes:
        kind: "none": not at all. "simple": shifted by up to `pad` pixels into a black border, and mirrored. "timm": by
            timm's training transform, from all other fields.
        auto_augment: RandAugment and its kin in timm's spelling, such as "rand-m9-mstd0.5-inc1"; None for none.
        color_jitter: How strongly brightness, contrast and saturation vary; timm leaves it out beside `auto_augment`.
        reprob: Probability that rectangles are erased.
        remode: What erased rectangles are filled with: "const", "rand" or "pixel".
        recount: Most rectangles that are erased.
        scale: Least and greatest share of the image that a crop shows.
        ratio: Least and greatest ratio of width to height of a crop.
        hflip: Probability of mirroring left and right.
        vflip: Probability of mirroring top and bottom.
        pad: Greatest shift of "simple", in pixels.
        repeats: How often an image comes within an epoch, each time varied anew; 3 in the papers that do it.
    """

    kind: Kind = "none"
    auto_augment: str | None = None
    color_jitter: float | None = 0.4
    reprob: float = 0.0
    remode: str = "pixel"
    recount: int = 1
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    hflip: float = 0.5
    vflip: float = 0.0
    pad: int = 4
    repeats: int = 1

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"augment.kind: expected one of {', '.join(get_args(Kind))}, got {self.kind!r}")
        if self.remode not in ERASED_WITH:
            raise ValueError(f"augment.remode: expected one of {', '.join(ERASED_WITH)}, got {self.remode!r}")
        for name in ("hflip", "vflip", "reprob"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"augment.{name}: expected a probability from 0 to 1, got {getattr(self, name)}")
        for name, least in (("pad", 0), ("repeats", 1), ("recount", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"augment.{name}: expected {least} or more, got {getattr(self, name)}")
        for name in ("scale", "ratio"):
            low, high = getattr(self, name)
            if not 0 < low <= high:
                raise ValueError(f"augment.{name}: expected two positive numbers that rise, got ({low}, {high})")


def vary(pixels: NDArray[np.uint8], indices: NDArray[np.int64], seeds: Words, augment: Augment) -> NDArray[np.uint8]:
    """Some of many images, shifted into a black border and mirrored, each as its seed says.

    Args:
        pixels: (images, channels, height, width).
        indices: Which images to take.
        seeds: One for each that is taken.
        augment: How far, and how often.

    Returns:
        A new array of those images.
    """
    span = 2 * augment.pad + 1
    down, right = ((uniform(seeds, number) * span).astype(np.int64) for number in (0, 1))
    rows, columns = (_shifts(side, augment.pad) for side in pixels.shape[-2:])
    varied = np.zeros((len(indices), *pixels.shape[1:]), np.uint8)
    for place, (index, dy, dx) in enumerate(zip(indices.tolist(), down.tolist(), right.tolist(), strict=True)):
        (new_rows, old_rows), (new_columns, old_columns) = rows[dy], columns[dx]
        varied[place, :, new_rows, new_columns] = pixels[index, :, old_rows, old_columns]
    for number, share, axis in ((2, augment.hflip, -1), (3, augment.vflip, -2)):
        if share:
            flipped = uniform(seeds, number) < share
            # By torch, which turns bytes round many at a time.
            varied[flipped] = torch.from_numpy(varied[flipped]).flip(axis).numpy()
    return varied


def _shifts(side: int, pad: int) -> list[tuple[slice, slice]]:
    """For every shift, from -pad to pad, which part of the new image is filled, and from which part of the old one."""
    return [
        (slice(max(-shift, 0), side - max(shift, 0)), slice(max(shift, 0), side - max(-shift, 0)))
        for shift in range(-pad, pad + 1)
    ]
