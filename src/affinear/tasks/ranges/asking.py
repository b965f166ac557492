"""What `affinear predict` is asked about, as tokens: an expression, a file of text, two of them, or an image."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from ..images.reading import open_image
from .image import grey
from .listops import tokens_of as expression
from .sequences import Tokens
from .text import tokens_of as bytes_of

BETWEEN = "::"  # of the two files of a pair


def rows_of(source: str, kind: str, length: int) -> list[Tokens]:
    """The sequences that a source stands for.

    Args:
        source: Of listops an expression, or a file with one; of text and retrieval a file, or two with :: between
            them; else an image.
        kind: Of the data that the network was trained on.
        length: Pixels of an image.

    Raises:
        ValueError: If it is not what this kind of network can be asked about.
        OSError: If a file cannot be read.
    """
    if not source.strip():
        wanted = "an expression, or the name of a file" if kind == "listops" else "the name of a file"
        raise ValueError(f"source: expected {wanted}, got nothing")
    if kind == "listops":
        written = source if source.lstrip()[:1] in ("[", "(") else _read(source).decode("utf-8", "replace")
        if written.count("[") != written.count("]"):
            told = f"{written.count('[')} and {written.count(']')}"
            raise ValueError(f"{source}: expected as many ] as [, got {told}; close every list")
        return [expression(written, source)]
    if kind == "retrieval":
        one, between, other = source.partition(BETWEEN)
        if not between:
            raise ValueError(f"{source}: expected two files with {BETWEEN} between them")
        return [bytes_of(_read(one)), bytes_of(_read(other))]
    if kind == "text":
        return [bytes_of(_read(source))]
    return [_pixels(source, length)]


def _read(path: str) -> bytes:
    content = Path(path).read_bytes()
    if not content:
        raise ValueError(f"{path}: the file is empty")
    return content


def _pixels(source: str, length: int) -> Tokens:
    side = math.isqrt(length)
    photo = open_image(source)
    if photo.size != (side, side):
        photo = photo.resize((side, side))
    return grey(np.asarray(photo.convert("RGB")).transpose(2, 0, 1)).reshape(-1)
