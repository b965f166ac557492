"""Objects drawn over an image: masks as colours, boxes as frames, names and scores in words."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from io import BytesIO

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ..images.colours import hue
from .precision import Found, Truth

CROWDED = 60  # objects from which on names would hide what they name


@cache
def colour(number: int) -> tuple[int, int, int]:
    """A colour for each number, hues far apart."""
    return hue(number, 0.8, 0.95)


def drawn(image: Image.Image, objects: Found | Truth, names: Sequence[str], opacity: float) -> Image.Image:
    """An image with objects over it: of one class each in its own colour, of several each class in one.

    Args:
        image: In RGB.
        objects: What was found, or what is there.
        names: Of all classes.
        opacity: How much of the image the colours of masks hide.
    """
    colours = [colour(i if len(names) == 1 else label) for i, label in enumerate(objects.labels.tolist())]
    pixels = np.asarray(image.convert("RGB"), np.float32).copy()
    for mask, tint in zip(objects.masks or (), colours, strict=False):
        inside = mask.mask()
        pixels[inside] = (1 - opacity) * pixels[inside] + opacity * np.array(tint, np.float32)
    out = Image.fromarray(pixels.round().astype(np.uint8))
    pen, font = ImageDraw.Draw(out), ImageFont.load_default(max(10, round(min(out.size) / 40)))
    thick = max(1, round(min(out.size) / 300))
    for i, (left, top, width, height) in enumerate(objects.boxes.tolist()):
        pen.rectangle((left, top, left + width, top + height), outline=colours[i], width=thick)
        said = _said(objects, i, names)
        if said and len(objects.labels) <= CROWDED:
            _word(pen, (left, top), said, colours[i], font)
    return out


def jpeg(image: Image.Image) -> bytes:
    """A JPEG file."""
    buffer = BytesIO()
    image.save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def _said(objects: Found | Truth, number: int, names: Sequence[str]) -> str:
    """The name of an object where there are several, and what else is to be said of it."""
    name = names[int(objects.labels[number])] if len(names) > 1 else ""
    if isinstance(objects, Truth):
        return f"{name} (crowd)".lstrip() if objects.crowd[number] else name
    return f"{name} {objects.scores[number]:.0%}".lstrip()


def _word(
    pen: ImageDraw.ImageDraw,
    place: tuple[float, float],
    text: str,
    tint: tuple[int, int, int],
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
) -> None:
    """A word on its colour, above a place, or below where there is no room."""
    left, top, right, bottom = pen.textbbox(place, text, font=font)
    up = bottom - place[1] if bottom - place[1] <= place[1] else 0
    pen.rectangle((left, top - up, right, bottom - up), fill=tint)
    dark = sum(tint) > 380
    pen.text((place[0], place[1] - up), text, fill=(0, 0, 0) if dark else (255, 255, 255), font=font)
