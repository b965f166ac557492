"""Some images of many, evenly among all."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from PIL import Image

from ..reading import CorruptImage
from .images import ArraySource, Digest, Images, Source, mark_of


@dataclass(frozen=True, eq=False)
class Chosen:
    """Some images of a source."""

    source: Source
    numbers: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return self.source[self.numbers[index]]

    def path(self, index: int) -> str:
        """What the image is called."""
        return self.source.path(self.numbers[index])

    def mark(self, digest: Digest) -> None:
        """All of the source, and which of it."""
        mark_of(self.source, digest)
        digest.update(str(self.numbers).encode())


def first_of(images: Images, limit: int) -> Images:
    """So many images of each half, taken evenly."""
    return replace(images, train=_some(images.train, limit), test=_some(images.test, limit))


def _some(source: Source, limit: int) -> Source:
    numbers = evenly(len(source), limit)
    if isinstance(source, ArraySource):
        return ArraySource(source.name, source.pixels[numbers], source.labels[numbers])
    return Chosen(source, tuple(numbers))


def chosen(source: Source, count: int) -> list[tuple[int, Image.Image]]:
    """Numbers and images of so many that can be read, evenly among all."""
    found: list[tuple[int, Image.Image]] = []
    for number in evenly(len(source), count):
        try:
            found.append((number, source[number][0]))
        except CorruptImage:
            continue
    return found


def evenly(total: int, count: int) -> list[int]:
    """So many numbers below a total, evenly spread; all if there are fewer.

    Example:
        >>> evenly(10, 4)
        [1, 3, 6, 8]
    """
    count = min(total, count)
    return ((np.arange(count) + 0.5) * total / max(count, 1)).astype(int).tolist()
