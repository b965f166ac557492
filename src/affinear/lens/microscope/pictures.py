"""Images: read with care from bytes of any origin, brought to one size, and kept, a few at a time."""

from __future__ import annotations

import hashlib
import io
import threading
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from affinear.lens.microscope.refusal import Refusal

SIDE = 448  # of every picture, once read
MOST_PIXELS = 2**25  # of an image, before it is decoded: 8192 x 4096, at most 128 MB
AT_ONCE = 1  # images that are decoded; others wait
MOST_KEPT = 8  # uploads
ORIENTATION = 0x0112  # Exif's number for how the camera was held
WITH_ALPHA = ("RGBA", "LA", "PA", "La", "RGBa")
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")


_DECODING = threading.Semaphore(AT_ONCE)


@dataclass(frozen=True)
class Picture:
    """An image as everything here sees it.

    Attributes:
        number: The first half of the SHA-256 of the bytes that it was read from.
        pixels: (448, 448, 3), uint8, RGB.
        shown: The same as JPEG, for the page.
        width: In pixels, as it came.
        height: In pixels, as it came.
    """

    number: str
    pixels: Tensor
    shown: bytes
    width: int
    height: int

    def at(self, rows: int, columns: int) -> Tensor:
        """The picture at another size, (3, rows, columns), float64 from 0 to 1."""
        image = Image.fromarray(self.pixels.numpy())
        if (columns, rows) != image.size:
            image = image.resize((columns, rows), Image.Resampling.BICUBIC, reducing_gap=3.0)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).double() / 255


@dataclass(frozen=True)
class Sample:
    """An image that comes with the microscope."""

    name: str
    title: str
    credit: str


SAMPLES = (
    Sample("pagoda", "Pagoda", "danielbuechele, CC BY 2.0"),
    Sample("flower", "Flower", "vultilion, CC BY 2.0"),
    Sample("dunes", "Dunes", "drawn for affinear"),
    Sample("tiles", "Tiles", "drawn for affinear"),
)


def samples() -> Mapping[str, Picture]:
    """Every sample image by its name."""
    folder = Path(__file__).parent / "samples"
    return MappingProxyType({sample.name: read((folder / f"{sample.name}.jpg").read_bytes()) for sample in SAMPLES})


def read(content: bytes) -> Picture:
    """An image file as a picture: turned upright, laid on white where transparent, stretched to a square.

    Args:
        content: The bytes of a JPEG, PNG, WebP, GIF, BMP, TIFF or PPM file; of an animation the first image counts.

    Raises:
        Refusal: If it is no such file, is broken, or has too many pixels.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's about sizes and odd metadata: the size is checked here
            with Image.open(io.BytesIO(content), formats=FORMATS) as image:
                width, height = image.size
                _check_size(width, height)
                with _DECODING:
                    square = _square(image)
    except Refusal:
        raise
    except Image.DecompressionBombError:
        raise Refusal(f"The image has more than {MOST_PIXELS:,} pixels; make it smaller and try again.", 413) from None
    except Exception as error:  # a broken file makes Pillow's readers raise nearly anything
        raise Refusal(
            "The file could not be read as an image (expected JPEG, PNG, WebP, GIF, BMP or TIFF); "
            f"open it in an image program and save it again. [{type(error).__name__}]"
        ) from None
    shown = io.BytesIO()
    square.save(shown, "JPEG", quality=90)
    number = hashlib.sha256(content).hexdigest()[:32]
    return Picture(number, torch.from_numpy(np.array(square)), shown.getvalue(), width, height)


def _check_size(width: int, height: int) -> None:
    if width * height > MOST_PIXELS:
        raise Refusal(
            f"The image has {width} x {height} pixels, expected at most {MOST_PIXELS:,} in all; make it smaller.", 413
        )


def _square(image: Image.Image) -> Image.Image:
    """The image as RGB of 448 x 448; made small first, so that whatever else happens to it takes no memory."""
    if image.format == "JPEG":
        image.draft(None, (2 * SIDE, 2 * SIDE))  # a large photograph is decoded at a part of its size
    image.load()
    turned = image.getexif().get(ORIENTATION)
    if image.mode.startswith(("I", "F")):  # 16 or 32 bits of grey: spread what is there over the 256 tones
        small = _eight_bits(image.convert("F").resize((SIDE, SIDE), Image.Resampling.BICUBIC))
    elif image.mode in WITH_ALPHA or "transparency" in image.info:
        small = image.convert("RGBA").resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        small = Image.alpha_composite(Image.new("RGBA", small.size, "white"), small)
    else:
        small = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    small.getexif()[ORIENTATION] = turned or 1
    return ImageOps.exif_transpose(small).convert("RGB")


def _eight_bits(image: Image.Image) -> Image.Image:
    tones = np.nan_to_num(np.asarray(image, dtype=np.float64), posinf=0, neginf=0)
    low, high = tones.min(), tones.max()
    return Image.fromarray((255 * (tones - low) / max(high - low, 1e-300)).round().astype(np.uint8))


@dataclass(frozen=True)
class Album:
    """Samples, and the last eight uploads by the hash of their bytes; safe to use from several threads."""

    samples: Mapping[str, Picture]
    _uploads: OrderedDict[str, Picture] = field(default_factory=OrderedDict[str, Picture])
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, picture: Picture) -> None:
        """Keep a picture; the one that was asked for least recently makes room."""
        with self._lock:
            self._uploads[picture.number] = picture
            self._uploads.move_to_end(picture.number)
            while len(self._uploads) > MOST_KEPT:
                self._uploads.popitem(last=False)

    def find(self, name: str) -> Picture:
        """The picture of this name or hash.

        Raises:
            Refusal: If there is none.
        """
        if name in self.samples:
            return self.samples[name]
        with self._lock:
            if name in self._uploads:
                self._uploads.move_to_end(name)
                return self._uploads[name]
        raise Refusal(
            f"image: expected one of {', '.join(self.samples)} or one of the last {MOST_KEPT} uploads, "
            f"got {name[:40]!r}; choose the image again.",
            404,
        )
