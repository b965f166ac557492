"""From draws to batches of padded sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ...train.draws import NOTHING, Draw
from .sequences import Split, Tokens

NO_CLASS = -1  # of a row that only fills a batch up
PADDING = 0  # tokens count from 1 in a batch


class Batch(NamedTuple):
    """Sequences, or pairs of them, and their classes.

    Attributes:
        tokens: (B, N) or (B, 2, N), int16, from 1 on; 0 is padding.
        lengths: (B,) or (B, 2), int64: how many are tokens.
        labels: (B,), int64; `NO_CLASS` in rows that only fill the batch up.
    """

    tokens: Tensor
    lengths: Tensor
    labels: Tensor


class Sequences(Dataset[Batch]):
    """Sequences of a split, a batch at a time, all cut or padded to one length.

    Args:
        split: Sequences and classes.
        length: Tokens of a row.
    """

    def __init__(self, split: Split, length: int) -> None:
        self.split, self.length = split, length

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, draw: Draw) -> Batch:
        return self.__getitems__([draw])

    def __getitems__(self, draws: Sequence[Draw]) -> Batch:
        """A batch of draws; torch's loader asks for all of them at once."""
        indices = [draw.index for draw in draws]
        columns = [
            padded([column[index] if index != NOTHING else column[0][:1] for index in indices], self.length)
            for column in self.split.rows
        ]
        labels = [int(self.split.labels[index]) if index != NOTHING else NO_CLASS for index in indices]
        pairs = len(columns) > 1
        tokens, lengths = ([column[part] for column in columns] for part in range(2))
        return Batch(
            torch.stack(tokens, dim=1) if pairs else tokens[0],
            torch.stack(lengths, dim=1) if pairs else lengths[0],
            torch.tensor(labels),
        )


def padded(rows: Sequence[Tokens], length: int) -> tuple[Tensor, Tensor]:
    """Sequences as (B, N), int16, and how long each is, (B,)."""
    tokens = np.full((len(rows), length), PADDING, np.int16)
    lengths = np.zeros(len(rows), np.int64)
    for number, row in enumerate(rows):
        cut = row[:length]
        tokens[number, : len(cut)] = cut.astype(np.int16) + 1
        lengths[number] = len(cut)
    return torch.from_numpy(tokens), torch.from_numpy(lengths)


def as_it_is(batch: Batch) -> Batch:
    """A batch is whole when it comes; nothing is left to collate."""
    return batch
