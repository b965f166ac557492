"""ListOps: nested lists of digits under MIN, MAX, MED and SM (the sum's last digit), made up or read.

    [MAX 4 [MIN 7 9 ] [MED 1 2 3 ] 0 ]   is 7

Trees are grown many at a time, level by level, as the Long Range Arena defines them: every node is an operator with
probability 1/4 above the last level, and has from 2 arguments on; kept are those of a length within the bounds.
"""

from __future__ import annotations

import csv
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..options import options
from .sequences import Ranges, Rows, Split, Tokens, rows_of

OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
SYMBOLS = (*(str(digit) for digit in range(10)), *OPERATORS, "]")
MIN, MAX, MED, SM, END = range(10, 15)
NUMBER = {symbol: number for number, symbol in enumerate(SYMBOLS)}
OPERATOR_SHARE = 0.25
USUAL = {
    "train": 96_000,
    "validation": 2_000,
    "test": 2_000,
    "seed": 0,
    "shortest": 500,
    "longest": 2_000,
    "depth": 10,
    "arguments": 10,
}
CHUNK = 500  # trees that are kept of one stream of random numbers
GROWN = 4_096  # trees that are grown at a time
PATIENCE = 200  # times that so many are grown without enough being kept
FILES = {"train": "basic_train.tsv", "validation": "basic_val.tsv", "test": "basic_test.tsv"}
LENGTH = 2_048

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Level:
    """The nodes of one depth, of many trees, in order.

    Attributes:
        tree: Which tree each belongs to.
        parent: Its number in the level above.
        count: How many arguments it has; 0 for a digit.
        symbol: The digit, or the operator.
    """

    tree: Integers
    parent: Integers
    count: Integers
    symbol: Integers


def made(spec: str) -> Ranges:
    """The data set that "listops", or "listops:train=1000,seed=3", stands for.

    Raises:
        ValueError: If an option is not known, or hardly any tree has such a length.
    """
    chosen = options(spec, USUAL)
    if min(chosen["arguments"], chosen["depth"]) < 2 or not 0 < chosen["longest"] <= 2**16:
        raise ValueError(
            "data: listops: expected a depth and arguments of at least 2, and a longest of at most 65536, got "
            f"depth={chosen['depth']}, arguments={chosen['arguments']}, longest={chosen['longest']}"
        )
    counts = [chosen[name] for name in FILES]
    if min(counts) < 1:
        raise ValueError("data: listops: expected at least one sequence in train, validation and test")
    rows, labels = trees(sum(counts), chosen)
    ends = np.cumsum(counts)
    train, validation, test = (
        Split((_between(rows, int(end - count), int(end)),), labels[end - count : end], title)
        for title, count, end in zip(FILES, counts, ends, strict=True)
    )
    name = "listops" if chosen == USUAL else spec
    return Ranges(name, "listops", train, validation, test, SYMBOLS[:10], len(SYMBOLS), max(chosen["longest"], 16))


def trees(count: int, chosen: dict[str, int]) -> tuple[Rows, Integers]:
    """So many different trees as tokens, and their values; the same for the same options, whoever computes them."""
    chunks = -(-count // CHUNK)
    with ThreadPoolExecutor() as pool:
        made = list(pool.map(partial(_chunk, count, chosen), range(chunks)))
    seen: set[bytes] = set()
    kept: list[Tokens] = []
    values: list[int] = []
    extra = chunks
    while True:
        for rows, labels in made:
            for index in range(len(rows)):
                mark = rows[index].tobytes()
                if mark not in seen and len(kept) < count:
                    seen.add(mark)
                    kept.append(rows[index])
                    values.append(int(labels[index]))
        if len(kept) == count:
            return rows_of(kept), np.asarray(values, np.int64)
        if extra > 4 * chunks + 16:
            raise ValueError(f"data: listops: there are too few different trees for {count:,} sequences; ask for fewer")
        made, extra = [_chunk(count + extra * CHUNK, chosen, extra)], extra + 1  # trees that came twice are replaced


def _chunk(total: int, chosen: dict[str, int], number: int) -> tuple[Rows, Integers]:
    """So many trees of one stream of random numbers."""
    count = min(CHUNK, max(1, total - number * CHUNK))
    random = np.random.default_rng((chosen["seed"], number))
    kept: list[Tokens] = []
    values: list[int] = []
    for _ in range(PATIENCE):
        levels = grow(GROWN if chosen["longest"] > 64 else 256, random, chosen["depth"], chosen["arguments"])
        lengths = _sizes(levels)[0]
        good = np.flatnonzero((lengths > chosen["shortest"]) & (lengths < chosen["longest"]))
        rows, labels = written(levels, good)
        kept += [rows[index] for index in range(len(rows))]
        values += labels.tolist()
        if len(kept) >= count:
            return rows_of(kept[:count]), np.asarray(values[:count], np.int64)
    raise ValueError(
        f"data: listops: hardly any tree has between {chosen['shortest']} and {chosen['longest']} tokens; widen them"
    )


def grow(count: int, random: np.random.Generator, depth: int, arguments: int) -> list[Level]:
    """So many trees, level by level."""
    levels: list[Level] = []
    tree, parent = np.arange(count), np.zeros(count, np.int64)
    for number in range(1, depth + 1):
        operator = random.random(len(tree)) < (OPERATOR_SHARE if number < depth else -1)
        counts = np.where(operator, random.integers(2, arguments, len(tree), endpoint=True), 0)
        symbols = np.where(operator, random.integers(MIN, END, len(tree)), random.integers(0, 10, len(tree)))
        levels.append(Level(tree, parent, counts, symbols))
        if not operator.any():
            break
        parent = np.repeat(np.arange(len(tree)), counts)
        tree = tree[parent]
    return levels


def _sizes(levels: list[Level]) -> list[Integers]:
    """How many tokens stand below and at each node, level by level: operator and bracket count two, a digit one."""
    sizes: list[Integers] = []
    below: Integers | None = None
    for position in reversed(range(len(levels))):
        level = levels[position]
        size = np.where(level.count > 0, 2, 1)
        if below is not None:
            size = size + np.bincount(levels[position + 1].parent, below, len(size)).astype(np.int64)
        sizes.append(size)
        below = size
    return sizes[::-1]


def written(levels: list[Level], chosen: Integers) -> tuple[Rows, Integers]:
    """Some of these trees as tokens, and their values."""
    keep = np.zeros(len(levels[0].tree), bool)
    keep[chosen] = True
    levels = _some(levels, keep)
    sizes, values = _sizes(levels), _values(levels)
    starts = np.concatenate(([0], np.cumsum(sizes[0])))
    tokens = np.zeros(int(starts[-1]), np.uint8)
    place = starts[:-1]
    for position, level in enumerate(levels):
        tokens[place] = level.symbol
        operator = level.count > 0
        tokens[(place + sizes[position] - 1)[operator]] = END
        if position + 1 < len(levels):
            child = levels[position + 1].parent
            before = np.cumsum(sizes[position + 1]) - sizes[position + 1]  # of all nodes of the level before it
            first = np.searchsorted(child, np.arange(len(level.tree)))  # of each node's arguments
            place = place[child] + 1 + before - before[first[child]]
    return Rows(tokens, starts.astype(np.int64)), values


def _some(levels: list[Level], keep: NDArray[np.bool_]) -> list[Level]:
    """The trees that are kept, with their nodes numbered anew."""
    found: list[Level] = []
    for position, level in enumerate(levels):
        mine = keep[level.tree]
        parent = level.parent[mine]
        if position:
            renumbered = np.cumsum(keep[levels[position - 1].tree]) - 1
            parent = renumbered[parent]
        found.append(Level(level.tree[mine], parent, level.count[mine], level.symbol[mine]))
    return [level for level in found if len(level.tree)] or found[:1]


def _values(levels: list[Level]) -> Integers:
    """What each tree comes to."""
    below: Integers = np.zeros(0, np.int64)
    for level in reversed(levels):
        value = level.symbol.copy()
        operator = np.flatnonzero(level.count)
        if len(operator):
            counts = level.count[operator]
            firsts = np.cumsum(counts) - counts  # arguments stand in the order of their operators
            owner = np.repeat(np.arange(len(operator)), counts)
            ordered = below[np.lexsort((below, owner))]
            lower, upper = ordered[firsts + (counts - 1) // 2], ordered[firsts + counts // 2]
            found = {
                MIN: ordered[firsts],
                MAX: ordered[firsts + counts - 1],
                MED: (lower + upper) // 2,  # the mean of the middle two, cut off
                SM: np.add.reduceat(below, firsts) % 10,
            }
            for symbol, result in found.items():
                mine = level.symbol[operator] == symbol
                value[operator[mine]] = result[mine]
        below = value
    return below


def _between(rows: Rows, first: int, last: int) -> Rows:
    starts = rows.starts[first : last + 1]
    return Rows(rows.tokens[starts[0] : starts[-1]], starts - starts[0])


def tokens_of(text: str, source: str) -> Tokens:
    """The tokens of an expression; parentheses, which the published files have, count for nothing.

    Raises:
        ValueError: If there is a word that is no symbol, or nothing at all.

    Examples:
        >>> tokens_of("( ( [MAX 3 ) ] )", "x").tolist()
        [11, 3, 14]
    """
    words = text.replace("(", " ").replace(")", " ").replace("]", " ] ").split()
    for word in words:
        if word not in NUMBER:
            raise ValueError(f"{source}: expected digits, {', '.join(OPERATORS)} and ], got {word[:40]!r}")
    if not words:
        raise ValueError(f"{source}: expected an expression such as [MAX 2 9 ], got nothing")
    return np.array([NUMBER[word] for word in words], np.uint8)


def text_of(tokens: Tokens) -> str:
    """An expression as people write it.

    Examples:
        >>> text_of(np.array([11, 3, 4, 14], np.uint8))
        '[MAX 3 4 ]'
    """
    return " ".join(SYMBOLS[int(token)] for token in tokens)


def read(folder: Path) -> Ranges:
    """The files that the benchmark's own generator writes: basic_train.tsv, basic_val.tsv, basic_test.tsv.

    Raises:
        ValueError: If one is missing, or a line is no expression and its value.
    """
    train, validation, test = (_read(folder / name, title) for title, name in FILES.items())
    return Ranges(f"ListOps in {folder}", "listops", train, validation, test, SYMBOLS[:10], len(SYMBOLS), LENGTH)


def _read(path: Path, title: str) -> Split:
    if not path.is_file():
        raise ValueError(f"data: ListOps needs {', '.join(FILES.values())}; missing: {path}")
    rows: list[Tokens] = []
    labels: list[int] = []
    csv.field_size_limit(2**24)
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        for number, fields in enumerate(csv.reader(file, delimiter="\t"), 1):
            if number == 1 and fields[:1] == ["Source"]:
                continue
            if len(fields) != 2 or fields[1].strip() not in SYMBOLS[:10]:
                raise ValueError(f"{path}: line {number}: expected an expression, a tab and a digit")
            rows.append(tokens_of(fields[0], f"{path}: line {number}"))
            labels.append(int(fields[1]))
    if not rows:
        raise ValueError(f"{path}: expected expressions, got none")
    return Split((rows_of(rows),), np.asarray(labels, np.int64), title)
