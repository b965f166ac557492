"""Copying and associative recall, made up on the fly: what a network can remember, and how much of it.

`recall` is the multi-query associative recall of Zoology: keys and their values, then every key again, near or far,
and after each its value is to be named. `copy` is a row of symbols, a sign, and the same row again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..options import options
from .reading import Half
from .spelling import NUMBERS, Spelling

IGNORED = -100
USUAL: Mapping[str, Mapping[str, int]] = {
    "recall": {"length": 256, "pairs": 16, "symbols": 8192, "train": 100_000, "test": 1_000, "seed": 0},
    "copy": {"length": 256, "symbols": 64, "train": 100_000, "test": 1_000, "seed": 0},
}
NEAR = 0.01  # how strongly recall asks again soon; 1 is evenly
SIGN = 0  # stands between a row and its copy, and is no symbol

Row = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Puzzles:
    """Rows that are made when they are asked for.

    Attributes:
        name: What `--data` said.
        rule: "recall" or "copy".
        chosen: Every option by name.
    """

    name: str
    rule: str
    chosen: Mapping[str, int]

    @property
    def sizes(self) -> tuple[int, int]:
        """Rows of an epoch, and to be judged by."""
        return self.chosen["train"], self.chosen["test"]

    @property
    def fingerprint(self) -> str:
        """Of rule and options."""
        told = f"{self.rule} {sorted(self.chosen.items())}"
        return hashlib.blake2b(told.encode(), digest_size=12).hexdigest()

    @property
    def context(self) -> int:
        """Tokens of a row."""
        return self.chosen["length"]

    @property
    def spelling(self) -> Spelling:
        """Tokens are numbers."""
        return Spelling(f"{NUMBERS}{self.chosen['symbols'] + (self.rule == 'copy')}")

    def row(self, half: Half, index: int) -> tuple[Row, Row]:
        """Tokens and what each should foretell, -100 for nothing; the same whenever it is asked for."""
        random = np.random.default_rng((self.chosen["seed"], half == "test", index))
        return (recall if self.rule == "recall" else copy)(random, self.chosen)


def made(spec: str) -> Puzzles:
    """What "recall" or "copy" stands for, with options such as "recall:length=512,pairs=64".

    Raises:
        ValueError: If an option is not known, or does not fit the others.
    """
    rule = spec.partition(":")[0]
    chosen = options(spec, USUAL[rule])
    if min(chosen["train"], chosen["test"]) < 1 or not 4 <= chosen["length"] <= 2**20:
        raise ValueError(f"data: {rule}: expected rows of 4 to {2**20} tokens, at least one to learn from and to judge")
    if not 4 <= chosen["symbols"] <= 2**19:
        raise ValueError(f"data: {rule}: symbols: expected from 4 to {2**19}, got {chosen['symbols']}")
    if rule == "recall":
        pairs, length = chosen["pairs"], chosen["length"]
        most = min(length // 4, chosen["symbols"] // 2 - 1)
        if not 1 <= pairs <= most:
            raise ValueError(
                f"data: recall: pairs: expected from 1 to {most}, as each has a key of its own and takes "
                f"two tokens to learn and two to ask in a row of {length}, got {pairs}"
            )
    return Puzzles(spec, rule, chosen)


def recall(random: np.random.Generator, chosen: Mapping[str, int]) -> tuple[Row, Row]:
    """Pairs of a key and a value, then every key once more, and in between what means nothing."""
    length, pairs, symbols = chosen["length"], chosen["pairs"], chosen["symbols"]
    half = symbols // 2
    keys = 1 + random.choice(half - 1, pairs, replace=False)  # below are keys, above values
    values = half + random.integers(0, symbols - half, pairs)
    tokens = random.integers(0, symbols, length)
    tokens[0 : 2 * pairs : 2], tokens[1 : 2 * pairs : 2] = keys, values
    places = (length - 2 * pairs) // 2
    share = np.arange(1, places + 1) ** (NEAR - 1.0)
    asked = 2 * pairs + 2 * random.choice(places, pairs, replace=False, p=share / share.sum())
    tokens[asked] = keys
    targets = np.full(length, IGNORED)
    targets[asked] = values
    return tokens, targets


def copy(random: np.random.Generator, chosen: Mapping[str, int]) -> tuple[Row, Row]:
    """A row of symbols, a sign, and the row again, of which the latter is to be foretold."""
    half = chosen["length"] // 2
    row = 1 + random.integers(0, chosen["symbols"], half)
    tokens = np.full(chosen["length"], SIGN)
    tokens[:half], tokens[half + 1 : 2 * half] = row, row[: half - 1]
    targets = np.full(chosen["length"], IGNORED)
    targets[half : 2 * half] = row
    return tokens, targets
