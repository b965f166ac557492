"""From scores of tokens to text: the likeliest piece of each, or the likeliest text over many alignments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .ngram import BEGIN, END, NGrams
from .text import BLANK, SPACE, Spelling

KEPT = 40  # pieces of a token that a beam looks at
NOTHING = -math.inf


def greedy(numbers: Sequence[int], last: int = BLANK) -> list[int]:
    """Likeliest pieces of tokens as CTC reads them: repeated ones count once, and blanks are nothing.

    Args:
        numbers: Of every token.
        last: That of the token before the first.

    Examples:
        >>> greedy([0, 3, 3, 0, 3, 1, 1])
        [3, 3, 1]
    """
    found: list[int] = []
    for number in numbers:
        if number not in (last, BLANK):
            found.append(number)
        last = number
    return found


@dataclass(frozen=True)
class Beam:
    """How texts are searched for.

    Attributes:
        width: Texts that are kept after every token.
        grams: The language model, or None.
        weight: Of its logarithms.
        bonus: For every word, since a language model likes short texts.
    """

    width: int
    grams: NGrams | None = None
    weight: float = 0.5
    bonus: float = 0.5


@dataclass
class _Text:
    """A text that is kept: how likely its alignments are that end in a blank, and that end in its last piece."""

    blank: float = NOTHING
    piece: float = NOTHING
    language: float = 0.0

    @property
    def heard(self) -> float:
        return _add(self.blank, self.piece)


def beam_search(logs: Tensor, spelling: Spelling, beam: Beam) -> list[int]:
    """The pieces of the likeliest text, over all of its alignments.

    Args:
        logs: (N, pieces), logarithms of probabilities.
        spelling: What the pieces are.
        beam: How to search. A wide one without a language model sums over all alignments.
    """
    scores: list[list[float]] = logs.double().tolist()
    kept: dict[tuple[int, ...], _Text] = {(): _Text(blank=0.0)}
    for row in scores:
        kept = _after(kept, row, spelling, beam)
        best = sorted(kept.items(), key=lambda item: item[1].heard + item[1].language, reverse=True)
        kept = dict(best[: beam.width])

    def whole(item: tuple[tuple[int, ...], _Text]) -> float:
        return item[1].heard + item[1].language + _ended(item[0], spelling, beam)

    return list(max(kept.items(), key=whole)[0])


def _after(
    kept: dict[tuple[int, ...], _Text], row: Sequence[float], spelling: Spelling, beam: Beam
) -> dict[tuple[int, ...], _Text]:
    """All texts that the kept ones can become with one more token."""
    likely = sorted(range(len(row)), key=row.__getitem__, reverse=True)[:KEPT]
    found: dict[tuple[int, ...], _Text] = {}
    for text, old in kept.items():
        heard = old.heard
        same = found.setdefault(text, _Text())
        same.language = old.language
        same.blank = _add(same.blank, heard + row[BLANK])
        if text:
            same.piece = _add(same.piece, old.piece + row[text[-1]])
        for number in likely:
            if number == BLANK:
                continue
            longer = (*text, number)
            # A piece that follows itself has to be parted from itself by a blank.
            start = old.blank if text and number == text[-1] else heard
            if start == NOTHING:
                continue
            new = found.get(longer)
            if new is None:
                added = _word_ended(text, number, spelling, beam)
                new = found[longer] = _Text(language=old.language + added)
            new.piece = _add(new.piece, start + row[number])
    return found


def _word_ended(text: tuple[int, ...], number: int, spelling: Spelling, beam: Beam) -> float:
    """What the language model adds when a piece begins a new word, and so ends the one before."""
    if beam.grams is None or not text or not spelling.pieces[number - 1].startswith(SPACE):
        return 0.0
    words = spelling.decode(text).split()
    if not words or spelling.pieces[text[-1] - 1] == SPACE:
        return 0.0
    return beam.weight * beam.grams.score(words[-1], (BEGIN, *words[:-1])) + beam.bonus


def _ended(text: tuple[int, ...], spelling: Spelling, beam: Beam) -> float:
    """What the language model adds for the last word and the end."""
    if beam.grams is None:
        return 0.0
    words = spelling.decode(text).split()
    context = (BEGIN, *words)
    last = 0.0
    if words and spelling.pieces[text[-1] - 1] != SPACE:
        last = beam.weight * beam.grams.score(words[-1], context[:-1]) + beam.bonus
    return last + beam.weight * beam.grams.score(END, context)


def _add(a: float, b: float) -> float:
    """The logarithm of the sum of two numbers whose logarithms are given."""
    if a < b:
        a, b = b, a
    return a if b == NOTHING else a + math.log1p(math.exp(b - a))
