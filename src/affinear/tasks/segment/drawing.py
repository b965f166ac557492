"""Classes as colours, over a photo or alone."""

from __future__ import annotations

from functools import cache
from io import BytesIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ..images.colours import hue
from .pairs import UNLABELLED, Labels, Numbers


@cache
def palette(classes: int) -> tuple[tuple[int, int, int], ...]:
    """A colour for each class: hues far apart, in three brightnesses.

    Examples:
        >>> len(set(palette(150)))
        150
    """
    return tuple(_colour(i) for i in range(classes))


def _colour(number: int) -> tuple[int, int, int]:
    light, full = ((0.95, 0.75), (0.7, 0.9), (0.85, 0.45))[number % 3]
    return hue(number, full, light)


def coloured(labels: Labels, classes: int) -> NDArray[np.uint8]:
    """Labels (H, W) as colours (H, W, 3); black where there is no class."""
    table = np.array([*palette(classes), (0, 0, 0)], np.uint8)
    return table[np.where(labels == UNLABELLED, classes, labels)]


def overlay(photo: Image.Image, labels: Labels, classes: int, opacity: float) -> Image.Image:
    """A photo under the colours of its labels, (H, W); as it is where there is no class."""
    pixels = np.asarray(photo.convert("RGB"), np.float32)
    mixed = (1 - opacity) * pixels + opacity * coloured(labels, classes)
    return Image.fromarray(np.where((labels == UNLABELLED)[..., None], pixels, mixed).round().astype(np.uint8))


def map_file(labels: Labels, numbers: Numbers) -> bytes:
    """A PNG file with the number of each pixel's class, as the data set writes them, and the classes' colours."""
    image = Image.fromarray(numbers.numbers(labels))
    colours = bytearray(768)
    for i, colour in enumerate(palette(numbers.classes)):
        colours[3 * (i + numbers.first) : 3 * (i + numbers.first) + 3] = bytes(colour)
    image.putpalette(bytes(colours))
    return _file(image, "PNG")


def photo_file(image: Image.Image) -> bytes:
    """A JPEG file."""
    return _file(image, "JPEG")


def _file(image: Image.Image, kind: str) -> bytes:
    buffer = BytesIO()
    image.save(buffer, kind, quality=90)
    return buffer.getvalue()
