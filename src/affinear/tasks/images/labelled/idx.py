"""The idx files of MNIST and its kin, packed or not."""

from __future__ import annotations

import gzip
import math
import re
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .images import Images, in_memory

MOST_BYTES = 2**30  # that a packed file may unpack to
BYTE = 0x08  # idx's number for unsigned bytes
NAME = re.compile(r"(?P<set>.*-)?(?P<half>train|t10k|test)-(?P<what>images|labels)[-.]idx[13]-ubyte(\.gz)?")
WANTED = tuple((half, what) for half in ("train", "test") for what in ("images", "labels"))

Found = dict[tuple[str, str], Path]


def recognise(folder: Path) -> Found | None:
    """The idx files of a folder by half and content, if it has any of them."""
    found: Found = {}
    for path in sorted(folder.iterdir()):
        matched = NAME.fullmatch(path.name)
        if matched is None or not path.is_file():
            continue
        key = ("train" if matched["half"] == "train" else "test", matched["what"])
        if key in found and path.with_suffix("") != found[key]:  # a packed file beside itself is no second set
            raise ValueError(
                f"{folder}: {found[key].name} and {path.name} are both {' '.join(key)}; keep one set there"
            )
        found.setdefault(key, path)
    return found or None


def read(folder: Path, found: Found) -> Images:
    """Open the files.

    Raises:
        ValueError: If one is missing or damaged, or images and labels do not go together.
    """
    missing = [f"{half} {what}" for half, what in WANTED if (half, what) not in found]
    if missing:
        raise ValueError(
            f"{folder}: idx files come as four, train and t10k, images and labels, such as train-images-idx3-ubyte or "
            f"train-images-idx3-ubyte.gz; missing: {', '.join(missing)}"
        )
    halves = [_half(found[half, "images"], found[half, "labels"]) for half in ("train", "test")]
    if halves[0][0].shape[1:] != halves[1][0].shape[1:]:
        raise ValueError(f"{folder}: expected images of one size, got {halves[0][0].shape} and {halves[1][0].shape}")
    classes = 1 + max(int(labels.max(initial=0)) for _, labels in halves)
    return in_memory(f"idx files in {folder}", halves[0], halves[1], tuple(map(str, range(classes))))


def _half(images: Path, labels: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    pixels, numbers = _array(images, 3), _array(labels, 1)
    if len(pixels) != len(numbers):
        raise ValueError(f"{labels}: expected {len(pixels)} labels, as {images.name} has images, got {len(numbers)}")
    return pixels[:, None], numbers.astype(np.int64)


def _array(path: Path, dimensions: int) -> NDArray[np.uint8]:
    head = 4 + 4 * dimensions
    content = _content(path, head)
    if len(content) < head or content[:4] != bytes([0, 0, BYTE, dimensions]):
        raise ValueError(
            f"{path}: expected an idx file of bytes with {dimensions} dimensions, which begins with "
            f"0000{BYTE:02x}{dimensions:02x}, got {content[:4].hex() or 'nothing'}"
        )
    shape = tuple(int(one) for one in np.frombuffer(content, ">u4", dimensions, 4))
    if not math.prod(shape):
        raise ValueError(f"{path}: expected images or labels, got none: {shape}")
    if len(content) - head != math.prod(shape):
        raise ValueError(
            f"{path}: expected {math.prod(shape)} bytes for {shape}, got {_size(path, content, head)}; is it whole?"
        )
    return np.frombuffer(content, np.uint8, offset=head).reshape(shape)


def _size(path: Path, content: bytes, head: int) -> str:
    return f"{len(content) - head}" + (" or more" if path.suffix == ".gz" else "")


def _content(path: Path, head: int) -> bytes:
    """All of a file; of a packed one no more than its own header announces, and one byte that tells of the rest."""
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        with gzip.open(path) as file:
            begin = file.read(head)
            announced = math.prod(int.from_bytes(begin[at : at + 4], "big") for at in range(4, head, 4))
            if announced > MOST_BYTES:
                raise ValueError(
                    f"{path}: expected at most {MOST_BYTES:,} bytes, got a header that announces {announced:,}"
                )
            return begin + file.read(announced + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: cannot be unpacked ({error})") from error
