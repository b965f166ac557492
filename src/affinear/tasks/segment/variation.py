"""What happens to a training photo and its map, decided by the seed of the draw and by nothing else.

As in the published segmenters: enlarged or shrunk, a crop in which no class has nearly all, mirrored, and its light and
colours changed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from .pairs import UNLABELLED, Labels

TRIES = 10  # crops that are tried for one in which no class has too much


@dataclass(frozen=True)
class Variation:
    """How training photos are varied.

    Attributes:
        crop: Height and width of what the network sees.
        short_side: What the shorter side is brought to before `zoom`; None for as it is.
        long_side: The most the longer side may have then.
        zoom: Least and greatest factor after that.
        one_class: Largest share of one class among the labelled pixels of a crop.
        flip: Probability of mirroring left and right.
        photometric: Whether brightness, contrast, saturation and hue vary.
    """

    crop: tuple[int, int]
    short_side: int | None = None
    long_side: int | None = None
    zoom: tuple[float, float] = (0.5, 2.0)
    one_class: float = 0.75
    flip: float = 0.5
    photometric: bool = True

    def pads(self, size: tuple[int, int]) -> bool:
        """Whether a photo of this height and width can come out smaller than the crop."""
        factor = fit(size, self.short_side, self.long_side) * self.zoom[0]
        return any(round(side * factor) < most for side, most in zip(size, self.crop, strict=True))


def fit(size: tuple[int, int], short_side: int | None, long_side: int | None) -> float:
    """The factor that brings a photo's sides to what is wanted, keeping their ratio.

    Examples:
        >>> fit((360, 480), None, None), fit((256, 2048), 512, 2048)
        (1.0, 1.0)
    """
    if short_side is None:
        return 1.0
    factor = short_side / min(size)
    return factor if long_side is None else min(factor, long_side / max(size))


def vary(
    photo: Image.Image, labels: Labels, variation: Variation, seed: int
) -> tuple[NDArray[np.uint8], Labels, tuple[int, int]]:
    """A crop of a photo and of its labels, as the seed says.

    Args:
        photo: In RGB.
        labels: (H, W).
        variation: How.
        seed: Of everything random.

    Returns:
        Bytes (3, h, w) and labels (h, w) of the crop's size, and how many rows and columns of it are photo: what is
        missing is below and to the right, black and unlabelled.
    """
    random = np.random.default_rng(seed)
    before = labels.shape
    factor = fit((before[0], before[1]), variation.short_side, variation.long_side) * random.uniform(*variation.zoom)
    size = max(1, round(before[0] * factor)), max(1, round(before[1] * factor))
    inside = min(size[0], variation.crop[0]), min(size[1], variation.crop[1])
    (top, left), chosen = _crop(labels, size, inside, variation.one_class, random)
    # The box in the photo's own pixels: only what is seen is resized.
    down, right = before[0] / size[0], before[1] / size[1]
    box = (left * right, top * down, (left + inside[1]) * right, (top + inside[0]) * down)
    pixels = np.asarray(photo.resize((inside[1], inside[0]), Image.Resampling.BILINEAR, box=box))
    if random.random() < variation.flip:
        pixels, chosen = pixels[:, ::-1], chosen[:, ::-1]
    if variation.photometric:
        pixels = distort(pixels, random)
    return *_filled(pixels, chosen, variation.crop), inside


def _crop(
    labels: Labels, size: tuple[int, int], inside: tuple[int, int], one_class: float, random: np.random.Generator
) -> tuple[tuple[int, int], Labels]:
    """Corner and labels of the first crop in which no class has too much, or else of the last that was tried."""
    for attempt in range(TRIES):
        top, left = (int(random.integers(side - part + 1)) for side, part in zip(size, inside, strict=True))
        chosen = _nearest(labels, size, (top, left), inside)
        if attempt == TRIES - 1 or _largest_share(chosen) <= one_class:
            return (top, left), chosen
    raise AssertionError("the last try is always taken")


def distort(pixels: NDArray[np.uint8], random: np.random.Generator) -> NDArray[np.uint8]:
    """Bytes (H, W, 3) in another light: brightness, contrast, saturation and hue, each with a probability of a half.

    Contrast comes before or after the colours, as SSD's authors have it.
    """

    def happens() -> bool:
        return bool(random.random() < 0.5)

    shift = random.uniform(-32, 32) if happens() else 0.0
    contrast_first = happens()
    contrast = random.uniform(0.5, 1.5) if happens() else 1.0
    saturation = random.uniform(0.5, 1.5) if happens() else 1.0
    hue = int(random.integers(-25, 26)) if happens() else 0
    early, late = (contrast, 1.0) if contrast_first else (1.0, contrast)
    pixels = _line(pixels, early, early * shift)
    if saturation != 1 or hue:
        tones = np.asarray(Image.fromarray(np.ascontiguousarray(pixels)).convert("HSV")).copy()
        tones[..., 0] += np.uint8(hue % 256)  # the circle of hues has 256 steps, and bytes go round with it
        tones[..., 1] = _line(tones[..., 1], saturation, 0.0)
        pixels = np.asarray(Image.fromarray(tones, "HSV").convert("RGB"))
    return _line(pixels, late, 0.0)


def _line(values: NDArray[np.uint8], slope: float, shift: float) -> NDArray[np.uint8]:
    """Each byte times a slope plus a shift, by a table of all 256."""
    if slope == 1 and shift == 0:
        return values
    table = np.clip(np.arange(256) * slope + shift, 0, 255).round().astype(np.uint8)
    return table[values]


def _nearest(labels: Labels, size: tuple[int, int], corner: tuple[int, int], inside: tuple[int, int]) -> Labels:
    """A part of the labels as they would be resized by nearest neighbours; nothing else is made."""
    rows, columns = (
        np.minimum(((np.arange(part) + start + 0.5) * (old / new)).astype(np.int64), old - 1)
        for part, start, old, new in zip(inside, corner, labels.shape, size, strict=True)
    )
    return labels[rows[:, None], columns]


def _largest_share(labels: Labels) -> float:
    """Share of the class that has most of the labelled pixels; 1 where there is none at all."""
    known = labels[labels != UNLABELLED]
    return float(np.bincount(known).max() / known.size) if known.size else 1.0


def _filled(pixels: NDArray[np.uint8], labels: Labels, size: tuple[int, int]) -> tuple[NDArray[np.uint8], Labels]:
    """Bytes (3, h, w) and labels of the whole crop."""
    whole, marked = np.zeros((3, *size), np.uint8), np.full(size, UNLABELLED, np.int16)
    height, width = labels.shape
    whole[:, :height, :width] = pixels.transpose(2, 0, 1)
    marked[:height, :width] = labels
    return whole, marked
