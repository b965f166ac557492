"""Images with objects, as COCO's JSON tells them: what a data set for detection is once it is open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ..images.reading import CorruptImage, open_image
from .polygons import rasterize
from .precision import Truth
from .runs import Runs

# What an annotation says of its object's shape: runs, outlines, or nothing.
Shape: TypeAlias = Mapping[str, Any] | Sequence[Sequence[float]] | None


@dataclass(frozen=True, eq=False)
class Objects:
    """The objects that an image shows.

    Attributes:
        boxes: (N, 4), float64: left, top, right and bottom, inside of the image.
        labels: (N,), int64: classes from 0.
        areas: (N,), float64: pixels of each.
        crowd: (N,), bool: regions of many objects that nobody told apart.
        shapes: What JSON says of each one's outline; of a crowd it may say nothing.
    """

    boxes: NDArray[np.float64]
    labels: NDArray[np.int64]
    areas: NDArray[np.float64]
    crowd: NDArray[np.bool_]
    shapes: tuple[Shape, ...]

    def some(self, which: NDArray[np.intp]) -> Objects:
        """A part of the objects."""
        shapes = tuple(self.shapes[i] for i in which.tolist())
        return Objects(self.boxes[which], self.labels[which], self.areas[which], self.crowd[which], shapes)

    def truth(self, size: tuple[int, int], masks: bool) -> Truth:
        """The objects as they are judged by, for an image of this height and width."""
        boxes = np.concatenate((self.boxes[:, :2], self.boxes[:, 2:] - self.boxes[:, :2]), axis=1)
        drawn = tuple(map(partial(_drawn, size=size), self.shapes, self.boxes)) if masks else None
        return Truth(boxes, self.labels, self.areas, self.crowd, drawn)


@dataclass(frozen=True, eq=False)
class Half:
    """Images of one half, with their objects.

    Attributes:
        paths: Their files.
        numbers: What JSON calls them.
        sizes: Height and width of each.
        objects: What each shows.
        stored: Their pixels (H, W, 3), where all are kept in memory.
    """

    paths: Sequence[str]
    numbers: Sequence[int]
    sizes: Sequence[tuple[int, int]]
    objects: Sequence[Objects]
    stored: Sequence[NDArray[np.uint8]] | None = None

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Image.Image, Objects]:
        """An image in RGB and its objects.

        Raises:
            CorruptImage: If the file cannot be read, or has another size than JSON says.
        """
        if self.stored is not None:
            return Image.fromarray(self.stored[index]), self.objects[index]
        image = open_image(self.paths[index])
        if (image.height, image.width) != self.sizes[index]:
            raise CorruptImage(other_size(self.paths[index], (image.height, image.width), self.sizes[index]))
        return image, self.objects[index]

    def path(self, index: int) -> str:
        """Its file."""
        return self.paths[index]

    def some(self, which: Sequence[int]) -> Half:
        """A part of the half."""
        return replace(
            self,
            paths=[self.paths[i] for i in which],
            numbers=[self.numbers[i] for i in which],
            sizes=[self.sizes[i] for i in which],
            objects=[self.objects[i] for i in which],
            stored=None if self.stored is None else [self.stored[i] for i in which],
        )

    @property
    def most(self) -> int:
        """Objects of the image that has the most of them."""
        return max((int((~one.crowd).sum()) for one in self.objects), default=0)


@dataclass(frozen=True, eq=False)
class Coco:
    """A data set for detection that is open.

    Attributes:
        name: For people.
        train: To learn from.
        test: To be judged by.
        class_names: Of all classes.
        categories: What JSON calls them.
        masks: Whether every object has a shape, and not only a box.
        fingerprint: A few letters that are others for other images or objects.
    """

    name: str
    train: Half
    test: Half
    class_names: tuple[str, ...]
    categories: tuple[int, ...]
    masks: bool
    fingerprint: str

    @property
    def sizes(self) -> tuple[int, int]:
        """How many images there are to learn from, and to be judged by."""
        return len(self.train), len(self.test)


def mask_of(shape: Shape, size: tuple[int, int]) -> Runs:
    """The mask that an annotation tells of, in an image of this height and width.

    Raises:
        ValueError: If there is none, or it is of another size.
    """
    if shape is None:
        raise ValueError("expected a segmentation, got none")
    if not isinstance(shape, Mapping):
        return rasterize(shape, *size)
    runs = Runs.read(shape)
    if (runs.height, runs.width) != size:
        raise ValueError(f"expected a mask of {size[0]} x {size[1]}, got one of {runs.height} x {runs.width}")
    return runs


def _drawn(shape: Shape, box: NDArray[np.float64], size: tuple[int, int]) -> Runs:
    """The mask of an object; all of its box where nobody told its shape."""
    if shape is None:
        left, top, right, bottom = box.tolist()
        shape = [[left, top, right, top, right, bottom, left, bottom]]
    return mask_of(shape, size)


def other_size(path: str, found: tuple[int, int], told: tuple[int, int]) -> str:
    """The sentence about a file of another size than JSON says."""
    return f"{path}: is {found[0]} x {found[1]}, but its JSON says {told[0]} x {told[1]}; its boxes would not fit"
