"""From draws to batches: images to learn from, and noise to be made into images that are judged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from ...train.corrupt import Tally
from ...train.draws import NOTHING, Draw, uniform
from ..images.batching import Batching, Fit
from ..images.labelled.images import ArraySource, Source
from ..images.reading import CorruptImage
from .opening import LatentSource

NO_CLASS = -1  # of a request that only fills a batch up


class Batch(NamedTuple):
    """Images to learn from.

    Attributes:
        images: (B, C, H, W): bytes of pictures, or latents; float32 once they are ready.
        labels: int64 (B,).
    """

    images: Tensor
    labels: Tensor


class Noisy(NamedTuple):
    """Images to learn from, and what chance adds to them.

    Attributes:
        images: (B, C, H, W), float32.
        labels: int64 (B,), some of them for any class.
        noise: (B, C, H, W), float32.
        times: (B,), as the network is told them.
    """

    images: Tensor
    labels: Tensor
    noise: Tensor
    times: Tensor


class Request(NamedTuple):
    """Images that are to be made.

    Attributes:
        noise: (B, C, H, W), float32.
        labels: int64 (B,), `NO_CLASS` where the row only fills the batch up.
    """

    noise: Tensor
    labels: Tensor


class TrainSamples(Dataset[Batch]):
    """Images to learn from, a batch at a time. In place of a corrupt one, the next good one comes.

    Args:
        source: Pictures or latents.
        batching: Size and channels of pictures.
        flip: Share that is mirrored.
        tally: Where corrupt ones are noted.
    """

    def __init__(self, source: Source | LatentSource, batching: Batching, flip: float, tally: Tally) -> None:
        self.source, self.flip, self.tally = source, flip, tally
        self.stored = stored(source, batching)
        self.fit = None if self.stored is not None else Fit(batching, 1.0)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, draw: Draw) -> Batch:
        return self.__getitems__([draw])

    def __getitems__(self, draws: Sequence[Draw]) -> Batch:
        """A batch of draws; torch's loader asks for all of them at once."""
        if self.stored is not None:
            indices = np.array([draw.index for draw in draws], np.int64)
            images, labels = torch.from_numpy(self.stored[0][indices]), torch.from_numpy(self.stored[1][indices])
        else:
            read = [self._read(draw.index) for draw in draws]
            images = torch.from_numpy(np.stack([image for image, _ in read]))
            labels = torch.tensor([label for _, label in read])
        if self.flip:
            flipped = torch.from_numpy(uniform(np.array([draw.seed for draw in draws], np.uint64), 0) < self.flip)
            images[flipped] = images[flipped].flip(-1)
        return Batch(images, labels)

    def _read(self, index: int) -> tuple[NDArray[np.uint8], int]:
        # Ends at the latest when too many are noted.
        assert self.fit is not None
        assert not isinstance(self.source, LatentSource)
        while True:
            try:
                image, label = self.source[index]
                return self.fit(image), label
            except CorruptImage:
                self.tally.note(index)
                index = (index + 1) % len(self.source)


class Requests(Dataset[Request]):
    """Noise and classes of images that are to be made, each from its own number: the same however they are shared.

    Args:
        count: How many.
        classes: They take turns.
        shape: Channels, height and width.
        seed: Of the noise.
    """

    def __init__(self, count: int, classes: int, shape: tuple[int, int, int], seed: int) -> None:
        self.count, self.classes, self.shape, self.seed = count, classes, shape, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, draw: Draw) -> Request:
        return self.__getitems__([draw])

    def __getitems__(self, draws: Sequence[Draw]) -> Request:
        """A batch of draws; torch's loader asks for all of them at once."""
        labels = [NO_CLASS if draw.index == NOTHING else draw.index % self.classes for draw in draws]
        return Request(
            torch.stack([noise_of(draw.index, self.shape, self.seed) for draw in draws]), torch.tensor(labels)
        )


def noise_of(number: int, shape: tuple[int, int, int], seed: int) -> Tensor:
    """The noise of this number, float32, the same on every machine; other seeds and numbers have other noise."""
    # By numpy, whose generator takes both: torch's on a CPU looks at 32 bits of a seed.
    chance = np.random.Generator(np.random.Philox(key=np.array([seed, max(number, 0)], np.uint64)))
    return torch.from_numpy(chance.standard_normal(shape, np.float32))


def stored(source: Source | LatentSource, batching: Batching) -> tuple[NDArray[Any], NDArray[np.int64]] | None:
    """Images (N, C, H, W) and classes where all are in memory as they are wanted."""
    if isinstance(source, LatentSource):
        return source.latents, source.labels
    wanted = (batching.channels, *batching.image_size)
    if isinstance(source, ArraySource) and source.pixels.shape[1:] == wanted:
        return source.pixels, source.labels
    return None


def some(source: Source | LatentSource, batching: Batching, limit: int | None, at_once: int) -> Iterator[Tensor]:
    """Images of a half in batches, evenly among all, those that cannot be read left out."""
    count = len(source) if limit is None else min(limit, len(source))
    indices = np.linspace(0, len(source) - 1, count).astype(np.int64)
    kept = stored(source, batching)
    fit = Fit(batching, 1.0) if kept is None else None
    for first in range(0, count, at_once):
        part = indices[first : first + at_once]
        if kept is not None:
            yield torch.from_numpy(kept[0][part])
            continue
        read: list[NDArray[np.uint8]] = []
        for index in part.tolist():
            assert fit is not None
            assert not isinstance(source, LatentSource)
            try:
                read.append(fit(source[index][0]))
            except CorruptImage:
                continue
        if read:
            yield torch.from_numpy(np.stack(read))


def as_it_is(batch: Batch | Request) -> Batch | Request:
    """A batch is whole when it comes; nothing is left to collate."""
    return batch
