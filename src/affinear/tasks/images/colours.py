"""Colours for numbers, as far apart as they can be."""

from __future__ import annotations

import colorsys

GOLDEN = 0.6180339887498949  # turns by it spread any number of hues over the circle


def hue(number: int, saturation: float, brightness: float) -> tuple[int, int, int]:
    """Red, green and blue, from 0 to 255, of the hue that a number has.

    Example:
        >>> hue(0, 1.0, 1.0)
        (255, 0, 0)
    """
    red, green, blue = colorsys.hsv_to_rgb(number * GOLDEN % 1, saturation, brightness)
    return round(255 * red), round(255 * green), round(255 * blue)
