"""One image file, whatever its kind, as upright RGB."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import IO

import numpy as np
from PIL import Image, ImageOps

from ...lens.budget import check_size

# Formats that are no pictures, need another program, or hand the file to one.
NOT_READ = frozenset({"BUFR", "EPS", "GRIB", "HDF5", "MPEG", "WMF"})
# Tried before all others: some of those read on before they find that a file is not theirs.
USUAL = ("JPEG", "PNG", "WEBP")
WITH_ALPHA = frozenset({"RGBA", "RGBa", "LA", "La", "PA"})
TURNED = (5, 6, 7, 8)  # orientations of EXIF that lie on their side
DEEP_TOPS = (1.0, 255.0, 65535.0)  # what white is in images of more than eight bits, the smallest that fits


class CorruptImage(ValueError):
    """An image that cannot be read; the message says which, and why."""


@cache
def formats() -> tuple[str, ...]:
    """The formats that are read, by Pillow's names, the usual ones first."""
    Image.init()
    known = set(Image.OPEN) - NOT_READ
    return (*(name for name in USUAL if name in known), *sorted(known.difference(USUAL)))


@cache
def suffixes() -> frozenset[str]:
    """How the names of image files end, in small letters.

    Examples:
        >>> {".jpg", ".png", ".webp"} <= suffixes(), ".txt" in suffixes()
        (True, False)
    """
    known = set(formats())
    return frozenset(end for end, kind in Image.registered_extensions().items() if kind in known)


def open_image(path: str | Path) -> Image.Image:
    """Read an image file.

    Grey, palette, CMYK and 16-bit images become RGB, transparent ones are laid on white, and images that the
    camera noted as turned are turned back.

    Args:
        path: The file; its name may be in any script.

    Returns:
        The image in mode "RGB".

    Raises:
        CorruptImage: If it cannot be read as an image.
    """
    return decode(path, str(path))


def open_as_it_is(path: str | Path) -> Image.Image:
    """Read an image file in its own mode: grey stays grey, transparency and 16 bits stay. It is upright all the same.

    Raises:
        CorruptImage: If it cannot be read as an image.
    """
    return _read(path, str(path), lambda image: image)


def decode(file: str | Path | IO[bytes], name: str) -> Image.Image:
    """An image in mode "RGB" out of a file that may be open already.

    Args:
        file: Where the image is.
        name: What to call it if it cannot be read.

    Raises:
        CorruptImage: If it cannot be read as an image.
    """
    return _read(file, name, as_rgb)


def _read(file: str | Path | IO[bytes], name: str, made: Callable[[Image.Image], Image.Image]) -> Image.Image:
    """What is made of the image in a file, upright and loaded."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's remarks about metadata that nobody needs here
            if isinstance(file, (str, Path)) and not Path(file).is_file():
                raise OSError("not a regular file" if Path(file).exists() else "no such file")
            with Image.open(file, formats=formats()) as image:
                check_size(*image.size)
                image.load()
                ImageOps.exif_transpose(image, in_place=True)
                return made(image)
    except MemoryError:
        raise
    except Exception as error:  # damaged files make the decoders raise nearly anything
        raise CorruptImage(f"{name}: cannot be read as an image ({_reason(error)})") from error


def size_of(path: str | Path) -> tuple[int, int]:
    """Height and width of an image as it is shown, from the head of its file; nothing is decoded.

    Raises:
        CorruptImage: If the file cannot be read.
    """
    try:
        if not Path(path).is_file():
            raise OSError("not a regular file" if Path(path).exists() else "no such file")
        with Image.open(path, formats=formats()) as image:
            check_size(*image.size)
            # Of a PNG, Pillow would decode everything to find out.
            turned = image.format != "PNG" and image.getexif().get(0x0112, 1) in TURNED
            return (image.width, image.height) if turned else (image.height, image.width)
    except MemoryError:
        raise
    except Exception as error:
        raise CorruptImage(f"{path}: cannot be read as an image ({_reason(error)})") from error


def as_rgb(image: Image.Image) -> Image.Image:
    """The same picture in mode "RGB", on white where it is transparent."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I") or image.mode == "F":
        return _eight_bits(image).convert("RGB")
    if image.mode not in WITH_ALPHA and "transparency" not in image.info:
        return image.convert("RGB")
    clear = image.convert("RGBA")
    white = Image.new("RGBA", clear.size, "white")
    return Image.alpha_composite(white, clear).convert("RGB")


def white_of(image: Image.Image) -> float:
    """What white is in an image of more than eight bits: of those that are usual, the smallest that fits."""
    if image.mode.startswith("I;16"):
        return DEEP_TOPS[-1]
    top = float(np.asarray(image).max(initial=0))
    return next((one for one in (DEEP_TOPS if image.mode == "F" else DEEP_TOPS[1:]) if top <= one), top)


def _eight_bits(image: Image.Image) -> Image.Image:
    values, white = np.asarray(image).astype(np.float64), white_of(image)
    return Image.fromarray(np.rint(values.clip(0, white) * (255 / white)).astype(np.uint8))


def _reason(error: Exception) -> str:
    said = str(error).partition("\n")[0][:200]  # our own sentences whole
    if isinstance(error, Image.UnidentifiedImageError):
        return "not an image of a known kind, or empty"
    return said or type(error).__name__
