"""Reviews of films, byte by byte: IMDB as folders of files, or as tables of reviews and their sentiment."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from .sequences import Ranges, Split, Tokens, split_of

CLASSES = ("negative", "positive")
FOLDERS = {"neg": 0, "pos": 1}
LABELS = {"neg": 0, "negative": 0, "0": 0, "pos": 1, "positive": 1, "1": 1}
TEXT, LABEL, SPLIT = ("review", "text"), ("sentiment", "label"), "split"
LENGTH = 4_096
LONGEST = 2**16  # bytes that are kept of a review


def is_folder(folder: Path) -> bool:
    """Whether a folder has reviews as IMDB's archive has them."""
    return all((folder / half / kind).is_dir() for half in ("train", "test") for kind in FOLDERS)


def read_folder(folder: Path) -> Ranges:
    """train/pos, train/neg, test/pos, test/neg, a file for each review. The test half is the validation half, too."""
    halves = [_folder(folder / half, half) for half in ("train", "test")]
    return _data(f"reviews in {folder}", *halves)


def read_tables(train: Path, test: Path) -> Ranges:
    """Two tables, one for each half."""
    halves = [split_of([texts], labels, path.stem) for path in (train, test) for texts, labels in [_columns(path)[:2]]]
    return _data(f"reviews in {train} and {test.name}", *halves)


def read_table(path: Path) -> Ranges:
    """One table. A column "split" says which rows are test; without one, every second row of each class is."""
    texts, labels, held = _columns(path)
    if held is None:
        held = [False] * len(labels)
        for label in set(labels):
            for index in [i for i, one in enumerate(labels) if one == label][1::2]:
                held[index] = True
    rows = split_of([texts], labels, "train")
    train, test = (rows.some([i for i, one in enumerate(held) if one == is_test]) for is_test in (False, True))
    return _data(f"reviews in {path}", train, dataclasses.replace(test, title="test"))


def tokens_of(text: bytes) -> Tokens:
    """Bytes as tokens."""
    return np.frombuffer(text[:LONGEST], np.uint8)


def _data(name: str, train: Split, test: Split) -> Ranges:
    for half in (train, test):
        if not len(half):
            raise ValueError(
                f"data: {name}: expected reviews to learn from and to be judged by, got no {half.title} ones"
            )
    return Ranges(name, "text", train, test, test, CLASSES, 256, LENGTH)


def _folder(folder: Path, title: str) -> Split:
    texts: list[Tokens] = []
    labels: list[int] = []
    for kind, label in FOLDERS.items():
        for path in sorted((folder / kind).glob("*.txt")):
            if not path.is_file():  # a pipe would never end
                continue
            with path.open("rb") as file:
                content = file.read(LONGEST)
            if content:
                texts.append(tokens_of(content))
                labels.append(label)
    return split_of([texts], labels, title)


def _columns(path: Path) -> tuple[list[Tokens], list[int], list[bool] | None]:
    """Reviews, classes and, where a column tells, whether each is a test row."""
    csv.field_size_limit(2**24)
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return _read(csv.reader(file), path)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected text in UTF-8, got the byte {error.object[error.start]:#04x}") from None
    except csv.Error as error:
        raise ValueError(f"{path}: expected rows with commas ({error})") from None


def _read(rows: Iterator[list[str]], path: Path) -> tuple[list[Tokens], list[int], list[bool] | None]:
    head = next(rows, [])
    review, label = _column(head, TEXT, path), _column(head, LABEL, path)
    split = head.index(SPLIT) if SPLIT in head else None
    texts: list[Tokens] = []
    labels: list[int] = []
    held: list[bool] = []
    for number, row in enumerate(rows, 2):
        if len(row) != len(head) or row[label].strip().lower() not in LABELS or not row[review]:
            raise ValueError(
                f"{path}: row {number}: expected a review and one of {', '.join(LABELS)}, got {row[label][:40]!r}"
                if len(row) > label
                else f"{path}: row {number}: expected {len(head)} columns"
            )
        texts.append(tokens_of(row[review].encode("utf-8", "surrogatepass")))
        labels.append(LABELS[row[label].strip().lower()])
        held.append(split is not None and row[split].strip().lower().startswith("te"))
    if not texts:
        raise ValueError(f"{path}: expected rows with reviews, got none")
    return texts, labels, None if split is None else held


def _column(head: Sequence[str], wanted: Sequence[str], path: Path) -> int:
    for name in wanted:
        if name in head:
            return head.index(name)
    raise ValueError(f"{path}: expected a column called {' or '.join(wanted)}, got {', '.join(head)[:80] or 'none'}")
