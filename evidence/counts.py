"""What needs no network, on the kinds of the Long Range Arena: counts of tokens, the first token, or nothing at all.

    PYTHONPATH=src:evidence python evidence/counts.py cifar-10 reviews.csv --length 1024

Three answers are judged by the whole test part: a linear classifier's of how often each token occurs, which needs no
order; the commonest one of what begins with the same token, as a list of ListOps does with its outermost operator; and
the commonest of all. A network that is not above them has not been shown to read anything.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from affinear.tasks.ranges.opening import open_ranges
from affinear.tasks.ranges.sequences import Ranges, Split

STEPS, BATCH, RATE = 1_500, 256, 1e-3
RARE = 1e-4  # what a deviation is at least, so that a token of one sequence does not outweigh all


def main() -> int:
    """Tell the accuracy of each data set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="+", help="as `affinear train --task ranges --data` takes it")
    parser.add_argument(
        "--length", type=int, help="tokens that are taken of a sequence; all that the kind has if left out"
    )
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for spec in given.data:
        data = open_ranges(spec)
        length = given.length or data.length
        right = accuracy(data, length, given.seed)
        print(f"{data.kind}: {right:.1%} of {data.sizes[1]:,}, by counts of up to {length:,} tokens", flush=True)
        first, always = by_first(data), by_nothing(data)
        print(f"{data.kind}: {first:.1%} by the first token alone, {always:.1%} by nothing", flush=True)
    return 0


def by_first(data: Ranges) -> float:
    """The share of test sequences that have the commonest answer of training sequences with their first token."""
    learnt, judged = (firsts(split) for split in (data.train, data.held))
    table = np.zeros((data.symbols, len(data.classes)), np.int64)
    np.add.at(table, (learnt, data.train.labels), 1)
    return float((table.argmax(1)[judged] == data.held.labels).mean())


def by_nothing(data: Ranges) -> float:
    """The share of test sequences that have the commonest answer of all training sequences."""
    return float((np.bincount(data.train.labels).argmax() == data.held.labels).mean())


def firsts(split: Split) -> NDArray[np.int64]:
    """The token that each sequence begins with."""
    return np.array([split.rows[0][index][0] for index in range(len(split))], np.int64)


def accuracy(data: Ranges, length: int, seed: int) -> float:
    """The share of test sequences that counts of their first tokens tell."""
    torch.manual_seed(seed)
    learnt, judged = (shares(split, data.symbols, length) for split in (data.train, data.held))
    mean, deviation = learnt.mean(0), learnt.std(0) + RARE
    labels = torch.from_numpy(data.train.labels)
    linear = torch.nn.Linear(learnt.shape[1], len(data.classes))
    optimizer = torch.optim.Adam(linear.parameters(), RATE)
    for _ in range(STEPS):
        chosen = torch.randint(len(labels), (BATCH,))
        optimizer.zero_grad()
        F.cross_entropy(linear((learnt[chosen] - mean) / deviation), labels[chosen]).backward()
        optimizer.step()
    with torch.no_grad():
        guesses = linear((judged - mean) / deviation).argmax(1)
    return float((guesses == torch.from_numpy(data.held.labels)).float().mean())


def shares(split: Split, symbols: int, length: int) -> Tensor:
    """How often each token occurs among the first ones of each sequence, (sequences, columns x symbols)."""
    rows = [
        np.concatenate(
            [
                np.bincount(column[index][:length], minlength=symbols) / len(column[index][:length])
                for column in split.rows
            ]
        )
        for index in range(len(split))
    ]
    return torch.from_numpy(np.stack(rows).astype(np.float32))


if __name__ == "__main__":
    raise SystemExit(main())
