"""From draws to rows of packed documents, or of puzzles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ...train.draws import NOTHING, Draw
from .network import IGNORED
from .puzzles import Puzzles
from .reading import Half
from .tokens import Tokens


class Rows(NamedTuple):
    """A batch.

    Attributes:
        tokens: (B, N), int64.
        targets: (B, N), int64, what each token should foretell; -100 for nothing.
        fresh: (B, N), boolean, where a document begins; of puzzles all False: a row is one.
    """

    tokens: Tensor
    targets: Tensor
    fresh: Tensor


class TextRows(Dataset[Rows]):
    """Rows of a stream of documents, one after the other.

    Args:
        tokens: The stream: documents end to end, each after the token `end`.
        context: Tokens of a row.
        end: The token.
        whole: Whether the last row, which is not full, counts too.
    """

    def __init__(self, tokens: Tokens, context: int, end: int, *, whole: bool) -> None:
        self.tokens, self.context, self.end = tokens, context, end
        last = len(tokens) - 1  # the last token foretells nothing
        self.count = -(-last // context) if whole else last // context

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, draw: Draw) -> Rows:
        return self.__getitems__([draw])

    def __getitems__(self, draws: Sequence[Draw]) -> Rows:
        """A batch of draws; torch's loader asks for all of them at once."""
        tokens = np.full((len(draws), self.context), self.end, np.int64)
        targets = np.full((len(draws), self.context), IGNORED, np.int64)
        fresh = np.zeros((len(draws), self.context), bool)  # what only fills up is no document for each token
        for row, draw in enumerate(draws):
            if draw.index == NOTHING:
                continue
            first = draw.index * self.context
            part = np.asarray(self.tokens[first : first + self.context + 1], np.int64)
            there = len(part) - 1
            tokens[row, :there], targets[row, :there] = part[:-1], part[1:]
            fresh[row, :there] = part[:-1] == self.end
        return Rows(*(torch.from_numpy(one) for one in (tokens, targets, fresh)))


class PuzzleRows(Dataset[Rows]):
    """Rows that are made up as they are asked for."""

    def __init__(self, puzzles: Puzzles, half: Half) -> None:
        self.puzzles = puzzles
        self.half: Half = half

    def __len__(self) -> int:
        return self.puzzles.chosen[self.half]

    def __getitem__(self, draw: Draw) -> Rows:
        return self.__getitems__([draw])

    def __getitems__(self, draws: Sequence[Draw]) -> Rows:
        """A batch of draws; torch's loader asks for all of them at once."""
        rows = [self.puzzles.row(self.half, max(0, draw.index)) for draw in draws]
        tokens, targets = (torch.from_numpy(np.stack(part)) for part in zip(*rows, strict=True))
        for row, draw in enumerate(draws):
            if draw.index == NOTHING:
                targets[row] = IGNORED
        return Rows(tokens, targets, torch.zeros_like(tokens, dtype=torch.bool))


def as_it_is(batch: Rows) -> Rows:
    """A batch is whole when it comes; nothing is left to collate."""
    return batch
