"""From scores of tokens to text: the likeliest piece of each, or the likeliest text over many alignments."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

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
class _Chance:
    """How likely the alignments of a text are that end in a blank, and that end in its last piece."""

    blank: float = NOTHING
    piece: float = NOTHING
    language: float = 0.0

    @property
    def heard(self) -> float:
        return _add(self.blank, self.piece)

    @property
    def value(self) -> float:
        return self.heard + self.language


@dataclass(eq=False)
class _Text:
    """A text that is kept: the one that it goes on from, and its last piece.

    Texts share what they begin with, so that a token costs no more at the end of an hour than at its beginning.
    """

    before: _Text | None
    number: int
    chance: _Chance

    @property
    def place(self) -> _Place:
        return self.before, self.number

    @property
    def numbers(self) -> list[int]:
        found: list[int] = []
        text = self
        while text.before is not None:
            found.append(text.number)
            text = text.before
        return found[::-1]


_Place = tuple[_Text | None, int]  # where a text goes on from, and by what: the same for the same text


def beam_search(logs: Tensor, spelling: Spelling, beam: Beam) -> list[int]:
    """The pieces of the likeliest text, over all of its alignments.

    Args:
        logs: (N, pieces), logarithms of probabilities.
        spelling: What the pieces are.
        beam: How to search. A wide one without a language model sums over all alignments.
    """
    scores: list[list[float]] = logs.double().tolist()
    kept = [_Text(None, BLANK, _Chance(blank=0.0))]
    # A text that falls out and comes back is the same one, as long as another goes on from it.
    known: WeakValueDictionary[_Place, _Text] = WeakValueDictionary({kept[0].place: kept[0]})
    for row in scores:
        found = _after(kept, row, spelling, beam)
        best = heapq.nlargest(beam.width, found.items(), key=lambda item: item[1].value)
        kept = [_placed(known, place, chance) for place, chance in best]
    return max(kept, key=lambda text: text.chance.value + _ended(text, spelling, beam)).numbers


def _placed(known: WeakValueDictionary[_Place, _Text], place: _Place, chance: _Chance) -> _Text:
    """The text of a place, with its new chance."""
    text = known.get(place)
    if text is None:
        text = known[place] = _Text(*place, chance)
    text.chance = chance
    return text


def _after(kept: Sequence[_Text], row: Sequence[float], spelling: Spelling, beam: Beam) -> dict[_Place, _Chance]:
    """All texts that the kept ones can become with one more token."""
    likely = sorted(range(len(row)), key=row.__getitem__, reverse=True)[:KEPT]
    found: dict[_Place, _Chance] = {}
    for text in kept:
        old, heard = text.chance, text.chance.heard
        same = found.setdefault(text.place, _Chance(language=old.language))
        same.blank = _add(same.blank, heard + row[BLANK])
        if text.before is not None:
            same.piece = _add(same.piece, old.piece + row[text.number])
        for number in likely:
            # A piece that follows itself has to be parted from itself by a blank.
            start = old.blank if number == text.number else heard
            if number == BLANK or start == NOTHING:
                continue
            new = found.get((text, number))
            if new is None:
                added = _word_ended(text, number, spelling, beam)
                new = found[text, number] = _Chance(language=old.language + added)
            new.piece = _add(new.piece, start + row[number])
    return found


def _word_ended(text: _Text, number: int, spelling: Spelling, beam: Beam) -> float:
    """What the language model adds when a piece begins a new word, and so ends the one before."""
    if beam.grams is None or not spelling.pieces[number - 1].startswith(SPACE):
        return 0.0
    return _last_word(text, spelling, beam, beam.grams)


def _ended(text: _Text, spelling: Spelling, beam: Beam) -> float:
    """What the language model adds for the last word and the end."""
    if beam.grams is None:
        return 0.0
    end = beam.grams.score(END, _words(text, spelling, beam.grams.order))
    return _last_word(text, spelling, beam, beam.grams) + beam.weight * end


def _last_word(text: _Text, spelling: Spelling, beam: Beam, grams: NGrams) -> float:
    """What the language model says to the last word of a text; nothing where a gap has ended it already."""
    if text.before is None or spelling.pieces[text.number - 1] == SPACE:
        return 0.0
    words = _words(text, spelling, grams.order)
    return beam.weight * grams.score(words[-1], words[:-1]) + beam.bonus


def _words(text: _Text, spelling: Spelling, count: int) -> tuple[str, ...]:
    """The last so many words of a text, or all and the beginning before them."""
    pieces: list[str] = []
    whole, letters = 0, False
    while text.before is not None and whole < count:
        piece = spelling.pieces[text.number - 1]
        pieces.append(piece)
        letters |= piece != SPACE
        if letters and piece.startswith(SPACE):
            whole, letters = whole + 1, False
        text = text.before
    words = "".join(reversed(pieces)).replace(SPACE, " ").split()
    return tuple(words) if text.before is not None else (BEGIN, *words)


def _add(a: float, b: float) -> float:
    """The logarithm of the sum of two numbers whose logarithms are given."""
    if a < b:
        a, b = b, a
    return a if b == NOTHING else a + math.log1p(math.exp(b - a))
