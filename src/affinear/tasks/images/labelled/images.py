"""What a data set is once it is open: two halves of images that can be asked for by number."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from PIL import Image


class Source(Protocol):
    """Images by number, each with its class."""

    def __len__(self) -> int:
        """How many there are, readable or not."""
        ...

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        """An image in mode "RGB" or "L", and the number of its class.

        Raises:
            CorruptImage: If it cannot be read.
        """
        ...

    def path(self, index: int) -> str:
        """What the image is called, for people: mostly its file."""
        ...


@runtime_checkable
class Marked(Protocol):
    """A source that can tell what is in it without decoding an image."""

    def mark(self, digest: Digest) -> None:
        """Let names, sizes and classes of all images flow into a checksum."""
        ...


class Digest(Protocol):
    """What takes bytes, such as one of hashlib's."""

    def update(self, data: Any, /) -> None:
        """Take some more."""
        ...


def mark_of(source: Source, digest: Digest) -> None:
    """Let a source flow into a checksum; of one that cannot tell, names and number of its images."""
    digest.update(f"{len(source)}\n".encode())
    if isinstance(source, Marked):
        source.mark(digest)
    else:
        for index in range(len(source)):
            digest.update(f"{source.path(index)}\n".encode("utf-8", "surrogateescape"))


@dataclass(frozen=True)
class Images:
    """Both halves of a data set.

    Attributes:
        name: For people, such as "digits" or "CIFAR-10 in /data/cifar".
        train: What is learnt from.
        test: What is only looked at.
        class_names: By the number of the class.
        size: Height and width, if all images have the same; otherwise None.
        channels: 1 or 3, as the images naturally have.
    """

    name: str
    train: Source
    test: Source
    class_names: tuple[str, ...]
    size: tuple[int, int] | None
    channels: int

    @property
    def sizes(self) -> tuple[int, int]:
        """Images to learn from, and to be judged by."""
        return len(self.train), len(self.test)

    @property
    def fingerprint(self) -> str:
        """A few letters that are others for other images or classes: names and sizes of files, or their very bytes."""
        digest = hashlib.sha256("\n".join(self.class_names).encode("utf-8", "surrogateescape"))
        for half in (self.train, self.test):
            mark_of(half, digest)
        return digest.hexdigest()[:32]


@dataclass(frozen=True, eq=False)
class ArraySource:
    """Images of one size, all in memory as bytes.

    Attributes:
        name: Of this half, such as "train".
        pixels: (images, channels, height, width), uint8.
        labels: The class of each, int64.
    """

    name: str
    pixels: NDArray[np.uint8]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        pixels = self.pixels[index]
        drawn = pixels[0] if len(pixels) == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0))
        return Image.fromarray(drawn), int(self.labels[index])

    def path(self, index: int) -> str:
        """Its number, since it has no file of its own."""
        return f"{self.name} image {index}"

    def mark(self, digest: Digest) -> None:
        """All bytes, since they are at hand."""
        digest.update(str(self.pixels.shape).encode())
        digest.update(np.ascontiguousarray(self.pixels))
        digest.update(np.ascontiguousarray(self.labels))


def in_memory(
    name: str,
    train: tuple[NDArray[np.uint8], NDArray[np.int64]],
    test: tuple[NDArray[np.uint8], NDArray[np.int64]],
    class_names: tuple[str, ...],
) -> Images:
    """A data set out of arrays: pixels (images, channels, height, width) and labels, for each half."""
    channels, height, width = train[0].shape[1:]
    return Images(
        name, ArraySource("train", *train), ArraySource("test", *test), class_names, (height, width), channels
    )
