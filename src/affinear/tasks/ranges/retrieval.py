"""Pairs of papers of which one may cite the other: the files of the ACL Anthology Network, byte by byte.

A line has a label, two identifiers and two texts, with tabs between them and no quotes: what the benchmark calls
new_aan_pairs.train.tsv, new_aan_pairs.eval.tsv and new_aan_pairs.test.tsv.
"""

from __future__ import annotations

from pathlib import Path

from .sequences import Ranges, Split, Tokens, split_of
from .text import tokens_of

CLASSES = ("unrelated", "related")
ENDS = {"train": ".train.tsv", "validation": ".eval.tsv", "test": ".test.tsv"}
LENGTH = 4_000
FIELDS = 5
LABELS = {"0": 0, "0.0": 0, "1": 1, "1.0": 1}


def files_in(folder: Path) -> dict[str, Path]:
    """The files of each part that are there."""
    found = {title: sorted(one for one in folder.glob(f"*{end}") if one.is_file()) for title, end in ENDS.items()}
    return {title: paths[0] for title, paths in found.items() if paths}


def read(folder: Path) -> Ranges:
    """A folder with all three files.

    Raises:
        ValueError: If one is missing, or a line has other fields.
    """
    files = files_in(folder)
    missing = [f"*{end}" for title, end in ENDS.items() if title not in files]
    if missing:
        raise ValueError(f"data: pairs of papers need {', '.join('*' + end for end in ENDS.values())} in {folder}; "
                         f"missing: {', '.join(missing)}")  # fmt: skip
    train, validation, test = (_read(files[title], title) for title in ENDS)
    return Ranges(f"pairs of papers in {folder}", "retrieval", train, validation, test, CLASSES, 256, LENGTH)


def _read(path: Path, title: str) -> Split:
    columns: tuple[list[Tokens], list[Tokens]] = ([], [])
    labels: list[int] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            fields = line.rstrip(b"\r\n").split(b"\t")
            label = fields[0].decode("ascii", "replace").strip()
            if len(fields) != FIELDS or label not in LABELS or not fields[3] or not fields[4]:
                raise ValueError(
                    f"{path}: line {number}: expected a label of 0 or 1, two identifiers and two texts with tabs "
                    f"between them, got {len(fields)} fields and the label {label[:20]!r}"
                )
            labels.append(LABELS[label])
            for column, text in zip(columns, fields[3:], strict=True):
                column.append(tokens_of(text))
    if not labels:
        raise ValueError(f"{path}: expected pairs of papers, got none")
    return split_of(columns, labels, title)
