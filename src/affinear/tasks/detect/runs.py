"""Runs: a mask as the lengths of its runs, which is how COCO keeps masks, and what can be done with it as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...lens.budget import LONGEST

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Runs:
    """A mask, column by column from the top left, as lengths of runs that alternate, beginning with what is outside.

    Attributes:
        height: Of the image.
        width: Of the image.
        counts: Lengths of the runs; they sum to height times width.

    Example:
        >>> import numpy as np
        >>> mask = Runs.of(np.array([[0, 1, 1], [0, 1, 0]], dtype=bool))
        >>> mask.counts.tolist(), mask.area, mask.box
        ([2, 3, 1], 3, (1.0, 0.0, 2.0, 2.0))
        >>> Runs.read(mask.json()) == mask
        True
    """

    height: int
    width: int
    counts: Counts

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Runs):
            return NotImplemented
        return (self.height, self.width) == (other.height, other.width) and np.array_equal(self.counts, other.counts)

    @staticmethod
    def of(mask: NDArray[np.bool_], corner: tuple[int, int] = (0, 0), size: tuple[int, int] | None = None) -> Runs:
        """The runs of a mask (height, width), or of one that lies in a larger image and is empty around it.

        Args:
            mask: True inside.
            corner: Row and column of its top left pixel.
            size: Height and width of the image; those of the mask if None.
        """
        top, left = corner
        height, width = mask.shape if size is None else size
        steps = np.diff(np.pad(mask.T.astype(np.int8), ((0, 0), (1, 1))), axis=1)
        starts, ends = (_places(steps == sign, height, top, left) for sign in (1, -1))
        return Runs.between(starts, ends, height, width)

    @staticmethod
    def between(starts: Counts, ends: Counts, height: int, width: int) -> Runs:
        """The runs that are inside from each start to before each end, both rising; those that touch become one."""
        apart = starts[1:] != ends[:-1]
        starts, ends = starts[np.append(True, apart)[: len(starts)]], ends[np.append(apart, True)[-len(ends) or 1 :]]
        edges = np.empty(2 * len(starts) + 2, np.int64)
        edges[0], edges[-1] = 0, height * width
        edges[1:-1:2], edges[2:-1:2] = starts, ends
        counts = np.diff(edges)
        return Runs(height, width, counts if counts[-1] or len(counts) == 1 else counts[:-1])

    @staticmethod
    def read(segmentation: Mapping[str, Any]) -> Runs:
        """The runs of a mask in COCO's JSON, {"size": [height, width], "counts": ...}, packed as text or as numbers.

        Raises:
            ValueError: If the lengths do not fill the image, or cannot be read.
        """
        try:
            height, width = (int(side) for side in segmentation["size"])
            counts = segmentation["counts"]
        except (KeyError, TypeError, ValueError, OverflowError):
            raise ValueError('expected runs as {"size": [height, width], "counts": ...}') from None
        if not 0 < height <= LONGEST or not 0 < width <= LONGEST:
            raise ValueError(f"expected runs of an image with sides of at most {LONGEST}, got another size")
        try:
            packed = counts.encode() if isinstance(counts, str) else counts
            lengths = unpack(packed) if isinstance(packed, bytes) else np.asarray(packed, np.int64)
        except (TypeError, ValueError, OverflowError):
            raise ValueError("expected the lengths of runs, packed as COCO's text or as numbers") from None
        pixels = height * width
        if lengths.ndim != 1 or ((lengths < 0) | (lengths > pixels)).any():
            raise ValueError(f"expected runs of {height} x {width} = {pixels} pixels, got one that is no part of it")
        if lengths.sum() != pixels:  # of 64 bits, as none of them is longer than the image
            raise ValueError(f"expected runs of {height} x {width} = {pixels} pixels, got {lengths.sum()}")
        return Runs(height, width, lengths)

    def json(self) -> dict[str, Any]:
        """The mask as COCO's JSON has it, packed as text."""
        return {"size": [self.height, self.width], "counts": pack(self.counts).decode()}

    def mask(self) -> NDArray[np.bool_]:
        """The mask, (height, width)."""
        inside = np.arange(len(self.counts)) % 2 == 1
        return np.repeat(inside, self.counts).reshape(self.width, self.height).T

    @property
    def area(self) -> int:
        """Pixels inside."""
        return int(self.counts[1::2].sum())

    @property
    def box(self) -> tuple[float, float, float, float]:
        """Left, top, width and height of the smallest box around it; zeros if nothing is inside."""
        starts, ends = self.edges()
        filled = ends > starts
        starts, ends = starts[filled], ends[filled]
        if not len(starts):
            return 0.0, 0.0, 0.0, 0.0
        left, right = starts[0] // self.height, (ends[-1] - 1) // self.height
        # A run that goes on in the next column reaches the bottom of the one and the top of the other.
        over = starts // self.height != (ends - 1) // self.height
        top = 0 if over.any() else (starts % self.height).min()
        bottom = self.height - 1 if over.any() else ((ends - 1) % self.height).max()
        return float(left), float(top), float(right - left + 1), float(bottom - top + 1)

    def edges(self) -> tuple[Counts, Counts]:
        """Where runs inside start, and before which place they end."""
        places = np.cumsum(self.counts)
        starts, ends = places[0::2], places[1::2]
        return starts[: len(ends)], ends


def union(masks: Sequence[Runs]) -> Runs:
    """What is inside any of several masks of one image."""
    first = masks[0]
    if len(masks) == 1:
        return first
    starts, ends = (np.concatenate(part) for part in zip(*(mask.edges() for mask in masks), strict=True))
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order]) if len(ends) else ends
    new = np.append(True, starts[1:] > ends[:-1])[: len(starts)]
    last = np.append(new[1:], True)[: len(ends)]
    filled = ends[last] > starts[new]
    return Runs.between(starts[new][filled], ends[last][filled], first.height, first.width)


def overlaps(masks: Sequence[Runs], others: Sequence[Runs]) -> NDArray[np.float64]:
    """Pixels that each of some masks shares with each of others, (masks, others).

    How much of a mask lies before a place is a line of slopes 0 and 1, so a run holds as much of it as the line rises
    between the run's ends; whole numbers in float64 stay exact.
    """
    shared = np.zeros((len(masks), len(others)))
    if not len(masks):
        return shared
    starts, ends = zip(*(mask.edges() for mask in masks), strict=True)
    owner = np.repeat(np.arange(len(masks)), [len(one) for one in starts])
    all_starts, all_ends = np.concatenate(starts), np.concatenate(ends)
    for number, other in enumerate(others):
        places = np.append(0, np.cumsum(other.counts))
        inside = np.append(0, np.cumsum(other.counts * (np.arange(len(other.counts)) % 2)))
        first, last = places[1], places[-1]
        near = (all_ends > first) & (all_starts < last)
        rise = np.interp(all_ends[near], places, inside) - np.interp(all_starts[near], places, inside)
        shared[:, number] = np.bincount(owner[near], rise, len(masks))
    return shared


def pack(counts: Counts) -> bytes:
    """Lengths of runs as COCO's text: differences to the last but one, five bits to a letter."""
    values = counts.copy()
    values[3:] -= counts[1:-2]
    letters: list[int] = []
    for value in values.tolist():
        more = True
        while more:
            bits, value = value & 31, value >> 5
            more = value != (-1 if bits & 16 else 0)
            letters.append(bits + 48 + 32 * more)
    return bytes(letters)


def unpack(text: bytes) -> Counts:
    """Lengths of runs from COCO's text.

    Raises:
        ValueError: If it is no such text.
    """
    letters = np.frombuffer(text, np.uint8).astype(np.int64) - 48
    if not len(letters):
        return np.zeros(0, np.int64)
    last = (letters & 32) == 0
    if letters.min() < 0 or letters.max() > 63 or not last[-1]:
        raise ValueError("expected the lengths of runs packed as COCO's text, got other letters")
    first = np.append(True, last[:-1])
    begin = np.flatnonzero(first)
    place = np.arange(len(letters)) - begin[np.cumsum(first) - 1]
    values = np.add.reduceat((letters & 31) << (5 * place), begin)
    negative = (letters[last] & 16) != 0
    values -= negative.astype(np.int64) << (5 * (place[last] + 1))
    values[1::2], values[2::2] = np.cumsum(values[1::2]), np.cumsum(values[2::2])
    return values


def _places(where: NDArray[np.bool_], height: int, top: int, left: int) -> Counts:
    columns, rows = np.nonzero(where)
    return (columns + left) * height + rows + top
