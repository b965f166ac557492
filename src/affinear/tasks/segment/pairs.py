"""Photos and their maps of classes, paired by name: what a data set for segmentation is once it is open."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ..images.reading import open_as_it_is, open_image

UNLABELLED = -1  # what a pixel has that belongs to no class; no loss and no score sees it
TAIL = 64  # bytes at the end of a file that its fingerprint sees
VOID = 255  # and how maps of other data sets write it

Labels = NDArray[np.int16]


class WrongMap(ValueError):
    """A map of classes that does not fit its photo or the list of classes; the message says which, and how."""


@dataclass(frozen=True)
class Numbers:
    """How the numbers in a map become classes.

    Attributes:
        classes: How many classes there are.
        zero_is_class: Whether 0 is the first class. Otherwise it is no class, and 1 is the first, as in ADE20K.
    """

    classes: int
    zero_is_class: bool = False

    @property
    def first(self) -> int:
        """The number of the first class."""
        return 0 if self.zero_is_class else 1

    def labels(self, numbers: NDArray[np.integer], path: str) -> Labels:
        """Classes from 0 on, and `UNLABELLED`, of the numbers in a map.

        Raises:
            WrongMap: If a number is beyond the list of classes.
        """
        found = numbers.astype(np.int32) - self.first
        found[numbers == VOID] = UNLABELLED
        wrong = (found >= self.classes) | (found < UNLABELLED)
        if wrong.any():
            number = int(numbers[wrong].flat[0])
            row, column = (int(place[0]) for place in np.nonzero(wrong))
            raise WrongMap(
                f"{path}: expected class numbers from {self.first} to {self.classes - 1 + self.first}, "
                f"{'' if self.zero_is_class else '0 for unlabelled, '}{VOID} for pixels that do not count, got "
                f"{number} at row {row}, column {column}; mend the map or the list of classes"
            )
        return found.astype(np.int16)

    def numbers(self, labels: Labels) -> NDArray[np.uint8]:
        """The numbers that a map of these labels is written with."""
        out = labels.astype(np.int32) + self.first
        return np.where(labels == UNLABELLED, VOID if self.zero_is_class else 0, out).astype(np.uint8)


@dataclass(frozen=True, eq=False)
class Pairs:
    """Photos and maps of one half.

    Attributes:
        photos: Their files.
        maps: The map of each.
        numbers: How a map is read.
        sizes: Height and width of each photo.
        stored: Photo and labels of each, where all are kept in memory; None for what cannot be read.
    """

    photos: Sequence[str]
    maps: Sequence[str]
    numbers: Numbers
    sizes: Sequence[tuple[int, int]]
    stored: Sequence[tuple[NDArray[np.uint8], Labels] | None] | None = None

    def __len__(self) -> int:
        return len(self.photos)

    def __getitem__(self, index: int) -> tuple[Image.Image, Labels]:
        """A photo in RGB and its labels (H, W).

        Raises:
            CorruptImage: If one of the files cannot be read.
            WrongMap: If the map does not fit the photo or the classes.
        """
        kept = None if self.stored is None else self.stored[index]
        if kept is not None:
            return Image.fromarray(kept[0]), kept[1]
        photo = open_image(self.photos[index])
        labels = self.numbers.labels(read_map(self.maps[index]), self.maps[index])
        if labels.shape != (photo.height, photo.width):
            raise WrongMap(other_size(self.maps[index], labels.shape, (photo.height, photo.width)))
        return photo, labels

    def path(self, index: int) -> str:
        """The photo's file."""
        return self.photos[index]

    def some(self, indices: Sequence[int]) -> Pairs:
        """A part of the half."""
        return replace(
            self,
            photos=[self.photos[i] for i in indices],
            maps=[self.maps[i] for i in indices],
            sizes=[self.sizes[i] for i in indices],
            stored=None if self.stored is None else [self.stored[i] for i in indices],
        )


@dataclass(frozen=True, eq=False)
class Scenes:
    """A data set that is open.

    Attributes:
        name: For people.
        train: To learn from.
        test: To be judged by.
        classes: Their names, in the order of their numbers.
        fingerprint: Of names and sizes of all files.
    """

    name: str
    train: Pairs
    test: Pairs
    classes: tuple[str, ...]
    fingerprint: str

    @property
    def sizes(self) -> tuple[int, int]:
        """How many photos there are to learn from, and to be judged by."""
        return len(self.train), len(self.test)


def read_map(path: str) -> NDArray[np.integer]:
    """The numbers (H, W) in a map of classes; of one with a palette, those behind its colours.

    Raises:
        CorruptImage: If the file cannot be read.
        WrongMap: If it has colours and no numbers.
    """
    image = open_as_it_is(path)
    mode, numbers = image.mode, np.asarray(image)
    if numbers.ndim != 2 or mode not in ("1", "L", "P", "I", "I;16"):
        raise WrongMap(
            f"{path}: expected one number per pixel, grey or with a palette, got an image of mode {mode}; write the "
            "number of its class for every pixel"
        )
    return numbers.astype(np.int32)


def other_size(path: str, size: Sequence[int], expected: Sequence[int]) -> str:
    """The sentence for a map of another size than its photo."""
    return (
        f"{path}: expected the size of its photo, {expected[0]} x {expected[1]} pixels (height x width), got "
        f"{size[0]} x {size[1]}"
    )


def fingerprint(root: Path, halves: Sequence[Pairs], classes: Sequence[str]) -> str:
    """A few letters that are others for other files or classes.

    Of each file its name, its size and its end: a PNG's last bytes depend on all of its pixels.
    """
    digest = hashlib.blake2b("\n".join(classes).encode(), digest_size=8)
    for half in halves:
        for path in (*half.photos, *half.maps):
            name = os.path.relpath(path, root)
            with open(path, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - TAIL))
                digest.update(f"\n{name} {size} ".encode("utf-8", "surrogateescape") + file.read())
        digest.update(b"\n\n")
    return digest.hexdigest()
