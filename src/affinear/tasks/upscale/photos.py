"""A photo as it is, grey, transparent or of 16 bits, and the larger one that is made of it and written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..images.reading import WITH_ALPHA, open_as_it_is, white_of
from .settings import Enlarging

MOST_MADE = 2**29  # pixels of a larger photo
DEEP = 65535.0
LUMA = (0.299, 0.587, 0.114)
KINDS = {"png": "PNG", "jpg": "JPEG", "webp": "WEBP", "tif": "TIFF"}
LONGEST = {"jpg": 65_500, "webp": 16_383}  # sides that a format can hold
PNG_LEVEL = 3  # a tenth larger than the best, at a third of the time


@dataclass(frozen=True, eq=False)
class Photo:
    """A photo, in numbers.

    Attributes:
        pixels: (3, H, W), float32, white being 1; grey ones have three times the same.
        grey: Whether it is grey.
        deep: Whether it has 16 bits.
        alpha: How opaque it is, or None where its file does not say.
        profile: What its colours mean, or None.
    """

    pixels: Tensor
    grey: bool
    deep: bool
    alpha: Image.Image | None
    profile: bytes | None

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return self.pixels.shape[1], self.pixels.shape[2]

    @property
    def clear(self) -> bool:
        """Whether something can be seen through it."""
        return self.alpha is not None and self.alpha.getextrema() != (255, 255)


def open_photo(path: str) -> Photo:
    """A photo out of a file, upright, with all that is to be kept of it.

    Raises:
        CorruptImage: If it cannot be read as an image.
    """
    image = open_as_it_is(path)
    own = image.mode in ("RGB", "L", "RGBA", "LA")
    profile = image.info.get("icc_profile") if own else None  # those of others are not for what is written
    if image.mode.startswith("I") or image.mode == "F":
        white = white_of(image) or 1.0
        values = np.nan_to_num(np.asarray(image).astype(np.float32)).clip(0, white) / white
        return Photo(torch.from_numpy(values).expand(3, -1, -1), True, white == DEEP, None, None)
    alpha = None
    if image.mode in WITH_ALPHA or "transparency" in image.info:
        image = image.convert("LA" if image.mode in ("L", "LA", "La", "1") else "RGBA")
        alpha = image.getchannel("A")
    grey = image.mode in ("1", "L", "LA")
    bytes_ = np.array(image.convert("L" if grey else "RGB"))
    pixels = torch.from_numpy(bytes_).float() / 255
    return Photo(
        pixels.expand(3, -1, -1) if grey else pixels.permute(2, 0, 1).contiguous(), grey, False, alpha, profile
    )


def check_result(photo: Photo, scale: int, options: Enlarging) -> None:
    """Raise ValueError if the larger photo could not be held or written."""
    height, width = (scale * side for side in photo.size)
    if height * width > MOST_MADE:
        raise ValueError(
            f"it would become {width} x {height} pixels, expected at most {MOST_MADE:,}; crop it or make it smaller"
        )
    most = LONGEST.get(options.format)
    if most is not None and max(height, width) > most:
        raise ValueError(
            f"format: {options.format} holds sides of at most {most:,} pixels, and it would have {width} x {height}; "
            "choose png"
        )
    if photo.clear and options.format == "jpg":
        raise ValueError("format: jpg holds no transparency, which this photo has; choose png, webp or tif")


def joined(strips: Iterable[Tensor], photo: Photo, scale: int, deep: bool) -> Image.Image:
    """The larger photo, of strips (1, 3, h, W) from the top; grey stays grey, transparency grows along.

    Args:
        strips: White being 1.
        photo: What they were made of.
        scale: How many times larger they are.
        deep: Whether 16 bits are kept where the photo has them.
    """
    height, width = (scale * side for side in photo.size)
    top = DEEP if photo.deep and deep else 255.0
    kind = np.uint16 if top == DEEP else np.uint8
    out = np.empty((height, width) if photo.grey else (height, width, 3), kind)
    row = 0
    for strip in strips:
        values = strip[0].float().permute(1, 2, 0)
        values = values @ values.new_tensor(LUMA) if photo.grey else values
        levels = (top * values + 0.5).floor().clamp(0, top).cpu().numpy().astype(kind)
        out[row : row + len(levels)] = levels
        row += len(levels)
    image = Image.fromarray(out)
    if photo.alpha is not None:
        image.putalpha(photo.alpha.resize((width, height), Image.Resampling.BICUBIC))
    return image


def written(image: Image.Image, photo: Photo, options: Enlarging) -> bytes:
    """The file of a larger photo."""
    given: dict[str, Any] = {} if photo.profile is None else {"icc_profile": photo.profile}
    if options.format == "png":
        given["compress_level"] = PNG_LEVEL
    elif options.format in ("jpg", "webp"):
        given["quality"] = options.quality
    elif options.format == "tif":
        given["compression"] = "tiff_lzw"
    if options.format == "jpg" and photo.alpha is not None:
        image = image.convert("L" if photo.grey else "RGB")
    held = BytesIO()
    image.save(held, KINDS[options.format], **given)
    return held.getvalue()
