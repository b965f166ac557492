"""From draws to batches: waves and the numbers of their pieces. What cannot be read is passed over and noted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from ...train.corrupt import Tally
from ...train.draws import NOTHING, Draw, uniform
from .audio import CorruptAudio
from .planning import Turn
from .recordings import Recordings
from .resampling import resample


class Waves(NamedTuple):
    """A batch as it is loaded.

    Attributes:
        waves: (B, S), float32, zeros after the end of each.
        samples: (B,), int64, samples of each.
        targets: (B, L), int64, numbers of pieces, zeros after the end of each.
        lengths: (B,), int64, pieces of each.
        shares: (B,), float32, what each counts in the mean; zero for what only fills a batch up.
        places: (B,), int64, how many places the batch has in this process, empty ones included.
        indices: (B,), int64, which recording each is.
    """

    waves: Tensor
    samples: Tensor
    targets: Tensor
    lengths: Tensor
    shares: Tensor
    places: Tensor
    indices: Tensor


class Spells(Protocol):
    """What texts are spelled with."""

    def encode(self, text: str, /) -> list[int]:
        """The numbers of a text."""
        ...


class TrainSamples(Dataset[Waves]):
    """Recordings to learn from, a batch at a time. In place of a corrupt one, the next good one comes.

    Args:
        half: The recordings.
        spelling: Of their texts.
        speeds: How fast they may be played, each as likely as the others.
        tally: Where corrupt ones are noted.
    """

    def __init__(self, half: Recordings, spelling: Spells, speeds: Sequence[float], tally: Tally) -> None:
        self.half, self.spelling, self.speeds, self.tally = half, spelling, speeds, tally

    def __len__(self) -> int:
        return len(self.half)

    def __getitem__(self, draw: Draw) -> Waves:
        return self.__getitems__([draw])

    def __getitems__(self, draws: Sequence[Draw]) -> Waves:
        """A batch of draws; torch's loader asks for all of them at once."""
        drawn = [draw for draw in draws if draw.index != NOTHING]
        rows: list[tuple[Tensor, list[int], float, int]] = []
        for draw in drawn:
            wave, index = self._read(draw.index)
            speed = self.speeds[int(uniform(np.array([draw.seed], np.uint64), 2)[0] * len(self.speeds))]
            share = draw.share if isinstance(draw, Turn) else 1.0
            rows.append((played(wave, speed), self.spelling.encode(self.half.rows[index].text), share, index))
        return batch_of(rows, len(draws))

    def _read(self, index: int) -> tuple[Tensor, int]:
        # Ends at the latest when too many are noted.
        while True:
            try:
                return self.half[index], index
            except CorruptAudio:
                self.tally.note(index)
                index = (index + 1) % len(self.half)


class TestSamples(Dataset[Waves]):
    """Recordings to be judged by, the longest first, so that those of a batch are of about one length.

    Args:
        half: The recordings.
        tally: Where corrupt ones are noted.
    """

    __test__ = False  # or pytest would collect it

    def __init__(self, half: Recordings, tally: Tally) -> None:
        self.half, self.tally = half, tally
        self.order = sorted(range(len(half)), key=lambda index: (-half.rows[index].seconds, index))

    def __len__(self) -> int:
        return len(self.half)

    def __getitem__(self, draw: Draw) -> Waves:
        return self.__getitems__([draw])

    def __getitems__(self, draws: Sequence[Draw]) -> Waves:
        """A batch of draws; torch's loader asks for all of them at once."""
        rows: list[tuple[Tensor, list[int], float, int]] = []
        for draw in draws:
            if draw.index == NOTHING:
                continue
            index = self.order[draw.index]
            try:
                rows.append((self.half[index], [], 1.0, index))
            except CorruptAudio:
                self.tally.note(index)
        return batch_of(rows, len(draws))


def batch_of(rows: Sequence[tuple[Tensor, list[int], float, int]], places: int) -> Waves:
    """Rows of wave, pieces, share and number as a batch; without any, one that counts nothing."""
    rows = rows or [(torch.zeros(1), [], 0.0, NOTHING)]
    waves, pieces, shares, indices = zip(*rows, strict=True)
    return Waves(
        waves=pad_sequence(list(waves), batch_first=True),
        samples=torch.tensor([len(wave) for wave in waves]),
        targets=pad_sequence([torch.tensor(numbers, dtype=torch.int64) for numbers in pieces], batch_first=True),
        lengths=torch.tensor([len(numbers) for numbers in pieces]),
        shares=torch.tensor(shares, dtype=torch.float32),
        places=torch.full((len(rows),), places),
        indices=torch.tensor(indices),
    )


def played(wave: Tensor, speed: float) -> Tensor:
    """A wave (S,) played so much faster, and so much higher; `real_speed` says how much."""
    return resample(wave, round(100 * real_speed(speed)), 100)


def real_speed(speed: float) -> float:
    """How fast something is played that is to be played so fast: in whole hundredths.

    Examples:
        >>> real_speed(0.944)
        0.94
    """
    return round(100 * speed) / 100


def as_it_is(batch: Waves) -> Waves:
    """A batch is whole when it comes; nothing is left to collate."""
    return batch
