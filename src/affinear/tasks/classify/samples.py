"""From draws to a batch: read and vary. What cannot be read is passed over and noted.

Images stay bytes, a quarter of what numbers would take between processes, and are normalised where the network is; but
erased rectangles are filled with numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from ...train.corrupt import Tally
from ...train.draws import NOTHING, Draw
from ...train.seeding import kept_randomness, seed_all
from ..images.augment import vary
from ..images.batching import Batching, Fit, Normalize, in_channels, timm_eraser, timm_transform
from ..images.labelled.images import ArraySource, Source
from ..images.reading import CorruptImage

NO_IMAGE = -100  # the class of a row that holds no image; what torch's cross entropy leaves out


class Batch(NamedTuple):
    """Images and their classes.

    Attributes:
        images: (B, channels, height, width): bytes, or float32 once they are normalised.
        targets: int64 (B,), or shares of classes (B, classes) once they are mixed.
    """

    images: Tensor
    targets: Tensor


class Samples(Dataset[Batch]):
    """Images of a source by draw, a whole batch at a time.

    Args:
        source: Where they come from.
        batching: What becomes of them.
        tally: Where corrupt ones are noted.
    """

    def __init__(self, source: Source, batching: Batching, tally: Tally) -> None:
        self.source, self.batching, self.tally = source, batching, tally

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, draw: Draw) -> Batch:
        images, targets = self.__getitems__([draw])
        return Batch(images[0], targets[0])

    def __getitems__(self, draws: Sequence[Draw]) -> Batch:
        """A batch of draws; torch's loader asks for all of them at once."""
        raise NotImplementedError

    def stored(self, crop_pct: float) -> ArraySource | None:
        """The source, if its bytes can be used as they lie there: nothing to resize, to crop or to convert."""
        source, wanted = self.source, (self.batching.channels, *self.batching.image_size)
        if isinstance(source, ArraySource) and source.pixels.shape[1:] == wanted and crop_pct == 1:
            return source
        return None


class TrainSamples(Samples):
    """Images to learn from. In place of a corrupt one, the next good one comes."""

    def __init__(self, source: Source, batching: Batching, tally: Tally) -> None:
        super().__init__(source, batching, tally)
        self.fit = Fit(batching, crop_pct=1.0)
        self.normalize = Normalize(batching)
        timm = batching.augment.kind == "timm"
        self.transform = timm_transform(batching) if timm else None
        self.erase = timm_eraser(batching) if timm else None

    def __getitems__(self, draws: Sequence[Draw]) -> Batch:
        stored = self.stored(crop_pct=1.0)
        if self.transform is not None:
            return self._transformed(draws, self.transform)
        seeds = np.array([draw.seed for draw in draws], np.uint64)
        if stored is not None:
            indices = np.array([draw.index for draw in draws], np.int64)
            return Batch(self._varied(stored.pixels, indices, seeds), torch.from_numpy(stored.labels[indices]))
        images, labels = zip(*(self._read(draw.index) for draw in draws), strict=True)
        pixels = np.stack([self.fit(image) for image in images])
        return Batch(self._varied(pixels, np.arange(len(draws)), seeds), torch.tensor(labels))

    def _transformed(self, draws: Sequence[Draw], transform: Callable[[Image.Image], Tensor]) -> Batch:
        tensors, labels = list[Tensor](), list[int]()
        with kept_randomness():
            for draw in draws:
                image, label = self._read(draw.index)
                seed_all(draw.seed)
                pixels = transform(in_channels(image, self.batching.channels))
                tensors.append(pixels if self.erase is None else self.erase(self.normalize(pixels)))
                labels.append(label)
        return Batch(torch.stack(tensors), torch.tensor(labels))

    def _varied(self, pixels: NDArray[np.uint8], indices: NDArray[np.int64], seeds: NDArray[np.uint64]) -> Tensor:
        simple = self.batching.augment.kind == "simple"
        return torch.from_numpy(vary(pixels, indices, seeds, self.batching.augment) if simple else pixels[indices])

    def _read(self, index: int) -> tuple[Image.Image, int]:
        # Ends at the latest when too many are noted.
        while True:
            try:
                return self.source[index]
            except CorruptImage:
                self.tally.note(index)
                index = (index + 1) % len(self.source)


class TestSamples(Samples):
    """Images to be judged by. A corrupt one becomes black, of the class `NO_IMAGE`."""

    __test__ = False  # or pytest would collect it

    def __init__(self, source: Source, batching: Batching, tally: Tally) -> None:
        super().__init__(source, batching, tally)
        self.fit = Fit(batching, batching.crop_pct)

    def __getitems__(self, draws: Sequence[Draw]) -> Batch:
        stored = self.stored(self.batching.crop_pct)
        if stored is not None and all(draw.index != NOTHING for draw in draws):
            indices = np.array([draw.index for draw in draws], np.int64)
            return Batch(torch.from_numpy(stored.pixels[indices]), torch.from_numpy(stored.labels[indices]))
        pixels, labels = zip(*(self._read(draw.index) for draw in draws), strict=True)
        return Batch(torch.from_numpy(np.stack(pixels)), torch.tensor(labels))

    def _read(self, index: int) -> tuple[NDArray[np.uint8], int]:
        if index != NOTHING:
            try:
                image, label = self.source[index]
                return self.fit(image), label
            except CorruptImage:
                self.tally.note(index)
        return np.zeros((self.batching.channels, *self.batching.image_size), np.uint8), NO_IMAGE


def as_it_is(batch: Batch) -> Batch:
    """A batch is whole when it comes; nothing is left to collate."""
    return batch


def without_fillers(batch: Batch) -> Batch:
    """The rows of a batch that hold an image."""
    images, targets = batch
    held = targets != NO_IMAGE
    return batch if bool(held.all()) else Batch(images[held], targets[held])
