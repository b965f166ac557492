"""Sequences of tokens with a class each: what a data set of the Long Range Arena is once it is open."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

KINDS = ("listops", "text", "retrieval", "image", "pathfinder")

Tokens = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Rows:
    """Sequences of any lengths, end to end.

    Attributes:
        tokens: All of them, uint8, from 0 on; what a batch pads with is a token more.
        starts: Where each begins, and the end of the last, int64.
    """

    tokens: Tokens
    starts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> Tokens:
        return self.tokens[self.starts[index] : self.starts[index + 1]]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Of each."""
        return np.diff(self.starts)

    def some(self, indices: Sequence[int]) -> Rows:
        """Some of them, in this order."""
        return rows_of([self[index] for index in indices])


def rows_of(parts: Sequence[Tokens]) -> Rows:
    """Sequences, laid end to end.

    Examples:
        >>> rows_of([np.array([1, 2], np.uint8), np.array([3], np.uint8)]).lengths.tolist()
        [2, 1]
    """
    starts = np.concatenate(([0], np.cumsum([len(part) for part in parts]))).astype(np.int64)
    tokens = np.concatenate(parts) if len(parts) else np.zeros(0, np.uint8)
    return Rows(tokens.astype(np.uint8), starts)


@dataclass(frozen=True, eq=False)
class Split:
    """One part of a data set: sequences, or pairs of them, and their classes.

    Attributes:
        rows: One column of sequences, or two.
        labels: The class of each, int64.
        title: What it is called, such as "train".
    """

    rows: tuple[Rows, ...]
    labels: NDArray[np.int64]
    title: str

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max((int(column.lengths.max()) for column in self.rows if len(column)), default=0)

    @property
    def shortest(self) -> int:
        """Tokens of the shortest sequence."""
        return min((int(column.lengths.min()) for column in self.rows if len(column)), default=0)

    def path(self, index: int) -> str:
        """What a sequence is called."""
        return f"{self.title} sequence {index}"

    def some(self, indices: Sequence[int]) -> Split:
        """A part of it."""
        return replace(
            self, rows=tuple(column.some(indices) for column in self.rows), labels=self.labels[list(indices)]
        )


@dataclass(frozen=True, eq=False)
class Ranges:
    """A data set that is open.

    Attributes:
        name: For people.
        kind: One of `KINDS`.
        train: To learn from.
        validation: To choose by.
        test: To be judged by.
        classes: Their names.
        symbols: Kinds of tokens.
        length: The most tokens that are taken of a sequence unless somebody says otherwise.
        judged: Which part is judged by: "test" or "validation".
    """

    name: str
    kind: str
    train: Split
    validation: Split
    test: Split
    classes: tuple[str, ...]
    symbols: int
    length: int
    judged: str = "test"

    @property
    def held(self) -> Split:
        """What is judged by."""
        return self.test if self.judged == "test" else self.validation

    @property
    def sizes(self) -> tuple[int, int]:
        """Sequences to learn from, and to be judged by."""
        return len(self.train), len(self.held)

    @property
    def pairs(self) -> bool:
        """Whether two sequences are judged together."""
        return len(self.train.rows) == 2

    @property
    def fingerprint(self) -> str:
        """A few letters that are others for other tokens, classes, or another part to be judged by."""
        digest = hashlib.blake2b(f"{self.kind} {self.judged} {self.classes}".encode(), digest_size=8)
        for split in (self.train, self.held):
            for column in split.rows:
                digest.update(np.ascontiguousarray(column.starts).data)
                digest.update(np.ascontiguousarray(column.tokens).data)
            digest.update(np.ascontiguousarray(split.labels).data)
        return digest.hexdigest()


def split_of(columns: Sequence[Sequence[Tokens]], labels: Sequence[int] | NDArray[np.integer], title: str) -> Split:
    """A split out of lists of sequences."""
    return Split(tuple(rows_of(column) for column in columns), np.asarray(labels, np.int64), title)
