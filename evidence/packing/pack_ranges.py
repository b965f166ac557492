"""Some sequences of a data set in one file, for a machine that not all of them can be brought to.

    PYTHONPATH=src python evidence/packing/pack_ranges.py cifar-10 image.safetensors --train 8000 --test 2000
    PYTHONPATH=src python evidence/packing/pack_ranges.py reviews.csv text.safetensors --train 16000 --test 2000 \
        --length 2048

They are drawn from each part, evenly by chance, and stay what they are, but for their length. `--data FILE` of `--task
ranges` reads the file, and so do `--cifar` and `--text` of `evidence/ranges.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import numpy as np

from affinear.tasks.ranges import keeping
from affinear.tasks.ranges.opening import open_ranges
from affinear.tasks.ranges.sequences import Ranges, Split, split_of

FEW = 16  # to choose by, which nobody does there; a data set has some


def main() -> int:
    """Read a data set, and write a part of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="as `affinear train --task ranges --data` takes it")
    parser.add_argument("out", type=Path, help="a new file, .safetensors")
    parser.add_argument("--train", type=int, required=True, help="sequences to learn from")
    parser.add_argument("--test", type=int, required=True, help="sequences to be judged by")
    parser.add_argument("--length", type=int, help="tokens of a sequence that are kept; all if left out")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    try:
        packed = some_of(open_ranges(given.data), given.train, given.test, given.seed)
        packed = packed if given.length is None else cut(packed, given.length)
        path = keeping.keep(packed, given.out)
    except (OSError, ValueError) as error:
        raise SystemExit(f"pack_ranges: {error}") from error
    print(f"{path}: {packed.sizes[0]:,} sequences to learn from, {packed.sizes[1]:,} to be judged by")
    return 0


def some_of(data: Ranges, train: int, test: int, seed: int) -> Ranges:
    """A data set with so many sequences of each part, or all where there are fewer.

    Raises:
        ValueError: If one is to have none.
    """
    if min(train, test) < 1:
        raise ValueError(f"--train, --test: expected at least 1, got {min(train, test)}")
    random = np.random.default_rng(seed)

    def drawn(split: Split, count: int) -> Split:
        chosen = random.choice(len(split), min(count, len(split)), replace=False)
        return split.some(np.sort(chosen).tolist())

    return dataclasses.replace(
        data,
        name=f"{data.name}, {train} and {test} of its sequences",
        train=drawn(data.train, train),
        validation=drawn(data.validation, FEW),
        test=drawn(data.test, test),
    )


def cut(data: Ranges, length: int) -> Ranges:
    """The same sequences, and of each at most so many tokens.

    Raises:
        ValueError: If nothing would be left, or the data is pictures, whose pixels all belong to them.
    """
    if length < 1 or data.kind in ("image", "pathfinder"):
        raise ValueError(f"--length: expected at least 1, and data that may be cut, got {length} for {data.kind}")

    def shorter(split: Split) -> Split:
        return split_of([[column[index][:length] for index in range(len(split))] for column in split.rows],
                        split.labels.tolist(), split.title)  # fmt: skip

    return dataclasses.replace(
        data,
        name=f"{data.name}, up to {length:,} tokens of each",
        length=min(length, data.length),
        train=shorter(data.train),
        validation=shorter(data.validation),
        test=shorter(data.test),
    )


if __name__ == "__main__":
    raise SystemExit(main())
