"""How far what was heard is from what was said: edits of words and letters, counted over a whole data set."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ...train.task import Part, Score

Kind = Literal["same", "wrong", "missed", "extra"]


@dataclass(frozen=True)
class Step:
    """A step of an alignment.

    Attributes:
        kind: "same"; "wrong", another word was heard; "missed", none was; "extra", there was none to hear.
        said: The word that was said; "" if extra.
        heard: The word that was heard; "" if missed.
    """

    kind: Kind
    said: str
    heard: str


@dataclass(frozen=True)
class Errors:
    """Edits between what was said and what was heard; those of two recordings add up.

    Attributes:
        wrong: Words in whose place another was heard.
        missed: Words in whose place nothing was heard.
        extra: Words that were heard and not said.
        words: Words that were said.
        letters: Edits of letters, gaps included.
        signs: Letters that were said, gaps included.
        recordings: How many there are.
    """

    wrong: int = 0
    missed: int = 0
    extra: int = 0
    words: int = 0
    letters: int = 0
    signs: int = 0
    recordings: int = 0

    def __add__(self, other: Errors) -> Errors:
        return Errors(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    @property
    def numbers(self) -> dict[str, float]:
        """WER, CER, and the kinds of errors, each over what was said; where nothing was said, over one."""
        words, signs = max(1, self.words), max(1, self.signs)
        return {
            "wer": (self.wrong + self.missed + self.extra) / words,
            "cer": self.letters / signs,
            "wrong": self.wrong / words,
            "missed": self.missed / words,
            "extra": self.extra / words,
        }


def distance(one: Sequence[Hashable], other: Sequence[Hashable]) -> int:
    """The fewest substitutions, deletions and insertions that make one sequence the other.

    Examples:
        >>> distance("kitten", "sitting"), distance("", "abc")
        (3, 3)
    """
    numbers: dict[Hashable, int] = {}
    a, b = (np.array([numbers.setdefault(item, len(numbers)) for item in items], np.int64) for items in (one, other))
    place = np.arange(len(b) + 1)
    row = place.copy()
    for i, item in enumerate(a, 1):
        kept = np.minimum(row[1:] + 1, row[:-1] + (b != item))
        # Insertions run along the row: each place takes the cheapest of those before it plus the way from there.
        row = np.minimum.accumulate(np.concatenate(([i], kept)) - place) + place
    return int(row[-1])


def align(said: Sequence[str], heard: Sequence[str]) -> list[Step]:
    """A cheapest alignment of words; where several are, the one with the most substitutions comes first.

    Examples:
        >>> [step.kind for step in align("a b c".split(), "a x c d".split())]
        ['same', 'wrong', 'same', 'extra']
    """
    rows, columns = len(said) + 1, len(heard) + 1
    cost = np.zeros((rows, columns), np.int64)
    cost[:, 0], cost[0] = np.arange(rows), np.arange(columns)
    for i in range(1, rows):
        for j in range(1, columns):
            through = cost[i - 1, j - 1] + (said[i - 1] != heard[j - 1])
            cost[i, j] = min(through, cost[i - 1, j] + 1, cost[i, j - 1] + 1)
    found: list[Step] = []
    i, j = rows - 1, columns - 1
    while i or j:
        if i and j and cost[i, j] == cost[i - 1, j - 1] + (said[i - 1] != heard[j - 1]):
            i, j = i - 1, j - 1
            found.append(Step("same" if said[i] == heard[j] else "wrong", said[i], heard[j]))
        elif i and cost[i, j] == cost[i - 1, j] + 1:
            i -= 1
            found.append(Step("missed", said[i], ""))
        else:
            j -= 1
            found.append(Step("extra", "", heard[j]))
    return found[::-1]


def compare(said: str, heard: str) -> Errors:
    """The errors of one recording, of plain texts.

    Examples:
        >>> compare("the cat sat", "the mat").numbers["wer"]
        0.6666666666666666
    """
    kinds = [step.kind for step in align(said.split(), heard.split())]
    wrong, missed, extra = (kinds.count(kind) for kind in ("wrong", "missed", "extra"))
    return Errors(wrong, missed, extra, len(said.split()), distance(said, heard), len(said), 1)


def score_of(found: Iterable[tuple[str, Errors]], skipped: Sequence[str] = ()) -> Score:
    """The score of a test set: errors are added up, and then divided; each speaker is a part.

    Args:
        found: Speaker and errors of every recording.
        skipped: Recordings that could not be read.
    """
    speakers: dict[str, Errors] = {}
    for speaker, errors in found:
        speakers[speaker] = speakers.get(speaker, Errors()) + errors
    total = sum(speakers.values(), Errors())
    parts = tuple(Part(name, errors.recordings, errors.numbers) for name, errors in sorted(speakers.items()))
    return Score(total.numbers, total.recordings, parts if len(parts) > 1 else (), tuple(skipped))
