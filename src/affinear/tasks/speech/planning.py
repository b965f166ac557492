"""Which recordings share a batch: those of about one length, as many as so many seconds hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch.utils.data import Sampler

from ...train.draws import GOLDEN, NOTHING, WORD, Draw, mix, stream

NEIGHBOURS = 8  # batches whose recordings change places with each other from epoch to epoch
ALIKE = 0.75  # of the longest in a bucket is what the shortest has at least


@dataclass(frozen=True, slots=True)
class Turn(Draw):
    """A recording to be loaded, or a place of a batch that stays empty.

    Attributes:
        share: What the recording counts in the mean of its batch, over a place's: places / recordings.
    """

    share: float = 0.0


class ByDuration(Sampler[Draw]):
    """Recordings by the batch. Every batch has as many places; where recordings are long, some of them stay empty.

    Recordings are sorted by length and cut into buckets, of which a bucket makes some batches. An epoch shuffles the
    recordings of each bucket, and then all batches. Every recording comes once an epoch, but for those that are not to
    come at all.

    Args:
        seconds: How long each recording is.
        chosen: Numbers of those that come.
        places: Recordings that a batch has at most.
        most: Seconds that a batch has at most, those of padding included; one recording it has always.
        seed: Of the order, and of what happens to recordings.

    Example:
        >>> plan = ByDuration([1.0, 9.0, 1.0, 1.0], [0, 1, 2, 3], places=3, most=9.0, seed=0)
        >>> draws = list(plan)
        >>> len(draws), sorted(draw.index for draw in draws)
        (6, [-1, -1, 0, 1, 2, 3])
    """

    def __init__(self, seconds: Sequence[float], chosen: Sequence[int], places: int, most: float, seed: int) -> None:
        self.places, self.seed, self.epoch = places, seed, 0
        self.buckets = _buckets(seconds, chosen, places, most)
        self.batches = sum(-(-len(members) // size) for members, size in self.buckets)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that is drawn next."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.batches * self.places

    def __iter__(self) -> Iterator[Draw]:
        count = sum(len(members) for members, _ in self.buckets)
        start = mix(np.array([self.seed & WORD], np.uint64)) + np.array([self.epoch & WORD], np.uint64)
        words = stream(mix(start) + np.arange(count + self.batches, dtype=np.uint64) * np.uint64(GOLDEN), 0)
        seeds = (stream(words, 1) >> np.uint64(1)).tolist()
        found: list[list[Draw]] = []
        first = 0
        for members, size in self.buckets:
            order = np.argsort(words[first : first + len(members)], kind="stable").tolist()
            drawn = [(members[i], seeds[first + i]) for i in order]
            found += [self._batch(drawn[i : i + size]) for i in range(0, len(drawn), size)]
            first += len(members)
        for number in np.argsort(words[count:], kind="stable").tolist():
            yield from found[number]

    def _batch(self, drawn: Sequence[tuple[int, int]]) -> list[Draw]:
        """Recordings over all places, evenly, so that processes that share the batch have about as many each."""
        batch: list[Draw] = [Turn(NOTHING, 0)] * self.places
        for number, (index, seed) in enumerate(drawn):
            batch[number * self.places // len(drawn)] = Turn(index, seed, self.places / len(drawn))
        return batch


def _buckets(seconds: Sequence[float], chosen: Sequence[int], places: int, most: float) -> list[tuple[list[int], int]]:
    """Recordings of about one length, and how many of them make a batch; the longest come first."""
    order = sorted(chosen, key=lambda index: (-seconds[index], index))
    found: list[tuple[list[int], int]] = []
    while order:
        longest = seconds[order[0]]
        size = max(1, min(places, int(most / max(longest, 1e-3))))
        alike = [index for index in order[: NEIGHBOURS * size] if seconds[index] >= ALIKE * longest]
        found.append((alike, size))
        order = order[len(alike) :]
    return found
