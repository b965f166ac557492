"""Which images come when, and the seed of all that is random about each: a function of seed and epoch, nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, Sampler

NOTHING = -1  # the index of a row that only fills a batch up
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: steps of it spread any run of numbers evenly
WORD = (1 << 64) - 1

Words = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Draw:
    """An image to be loaded.

    Attributes:
        index: Its number in the source, or `NOTHING`.
        seed: Of everything random about it; not negative, below 2^63.
    """

    index: int
    seed: int


def mix(words: Words) -> Words:
    """Numbers that look random, one for each; the finaliser of splitmix64, which maps no two to the same."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def stream(seeds: Words, number: int) -> Words:
    """The random words of a stream: one for each seed, unlike those of any other stream."""
    return mix(seeds + np.array([(number + 1) * GOLDEN & WORD], np.uint64))


def uniform(seeds: Words, number: int) -> NDArray[np.float64]:
    """Random numbers from 0 up to 1 of a stream, one for each seed."""
    return (stream(seeds, number) >> np.uint64(11)).astype(np.float64) * 2.0**-53


class Draws(Sampler[Draw]):
    """All images in a random order that each epoch has for itself.

    Args:
        count: How many images there are.
        seed: Of the order and of what happens to the images.
        repeats: How often in a row an image comes, each time with another seed. The length of an epoch stays, so an
            epoch then has only one in so many of the images.
    """

    def __init__(self, count: int, seed: int, repeats: int = 1) -> None:
        self.count, self.seed, self.repeats, self.epoch = count, seed, repeats, 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that is drawn next."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Draw]:
        start = mix(np.array([self.seed & WORD], np.uint64)) + np.array([self.epoch & WORD], np.uint64)
        words = stream(mix(start) + np.arange(self.count, dtype=np.uint64) * np.uint64(GOLDEN), 0)
        repeats = min(self.repeats, max(self.count, 1))
        chosen = np.argsort(words, kind="stable")[: -(-self.count // repeats)]
        order = chosen.repeat(repeats)[: self.count]
        seeds = stream(words, 1) >> np.uint64(1)
        for first in range(0, self.count, 4096):  # whole arrays of Python numbers would take much memory
            part = slice(first, first + 4096)
            yield from map(Draw, order[part].tolist(), seeds[part].tolist())


class InOrder(Sampler[Draw]):
    """All images once, from first to last.

    Args:
        count: How many images there are.
        total: How many draws to make; those after the last image are of `NOTHING`.
    """

    def __init__(self, count: int, total: int) -> None:
        self.count, self.total = count, total

    def set_epoch(self, epoch: int) -> None:
        """Every epoch is the same."""

    def __len__(self) -> int:
        return self.total

    def __iter__(self) -> Iterator[Draw]:
        for index in range(self.total):
            yield Draw(index if index < self.count else NOTHING, 0)


class Batches(BatchSampler):
    """Draws by the batch: over all processes, to be cut up among them by accelerate.

    Args:
        sampler: What to draw.
        batch_size: How many at a time.
        drop_last: Whether to leave out a last batch that is not full.
    """

    sampler: Draws | InOrder

    def __init__(self, sampler: Draws | InOrder, batch_size: int, drop_last: bool) -> None:
        super().__init__(cast("Any", sampler), batch_size, drop_last)  # typed for numbers alone

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that is drawn next."""
        self.sampler.set_epoch(epoch)
