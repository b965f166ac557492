"""Transcripts as networks learn them: plain words, and the pieces that they are spelled with."""

from __future__ import annotations

import itertools
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

SPACE = "▁"  # how a piece writes the gap before a word
BLANK = 0  # what CTC says between pieces
MOST_PIECES, LONGEST_PIECE = 2**14, 32  # that a file of weights may ask for
APOSTROPHES = str.maketrans({"\u2019": "'", "\u2018": "'", "\u02bc": "'", "`": "'"})


def plain(text: str) -> str:
    """Lower-case words with single spaces; of all signs only apostrophes within words are kept.

    Examples:
        >>> plain("  'Well,' she SAID: don\u2019t -- it's 3 o'clock!")
        "well she said don't it's 3 o'clock"
    """
    text = unicodedata.normalize("NFKC", text).translate(APOSTROPHES).lower()
    kept = "".join(sign if sign == "'" or unicodedata.category(sign)[0] in "LMN" else " " for sign in text)
    return " ".join(word for word in (word.strip("'") for word in kept.split()) if word)


@dataclass(frozen=True)
class Spelling:
    """The pieces that words are spelled with: letters, or byte pairs in the manner of BPE.

    Attributes:
        pieces: By number from 1 on; 0 is the blank. The gap before a word is "▁".
        merges: Which two pieces become one, the earliest first; none for letters.

    Examples:
        >>> letters = Spelling.of_letters(["ab a"])
        >>> letters.pieces, letters.encode("b a"), letters.decode([3, 1, 2])
        (('▁', 'a', 'b'), [3, 1, 2], 'b a')
    """

    pieces: tuple[str, ...]
    merges: tuple[tuple[str, str], ...] = ()
    _words: dict[str, list[int]] = field(default_factory=dict[str, list[int]], init=False, repr=False, compare=False)

    @staticmethod
    def of_letters(texts: Iterable[str], alphabet: str | None = None) -> Spelling:
        """A piece for every letter of some plain texts, or of an alphabet, and one for the gap between words."""
        letters = set(plain_letters(alphabet)) if alphabet is not None else set("".join(texts))
        return Spelling((SPACE, *sorted(letters - {" ", SPACE})))

    @staticmethod
    def of_pairs(texts: Iterable[str], count: int, alphabet: str | None = None) -> Spelling:
        """The letters, and pieces of several letters that are common in some plain texts, so many in all."""
        letters = Spelling.of_letters(texts := list(texts), alphabet).pieces
        merges = learn_merges(Counter(word for text in texts for word in text.split()), count - len(letters))
        return Spelling((*letters, *dict.fromkeys(a + b for a, b in merges)), tuple(merges))

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {piece: number for number, piece in enumerate(self.pieces, 1)}

    @cached_property
    def _ranks(self) -> dict[tuple[str, str], int]:
        return {pair: rank for rank, pair in enumerate(self.merges)}

    @property
    def size(self) -> int:
        """How many numbers there are, the blank among them."""
        return len(self.pieces) + 1

    def missing(self, text: str) -> str:
        """The letters of a plain text that no piece spells, in order."""
        return "".join(sorted(set(text) - {" "} - set(self.pieces)))

    def encode(self, text: str) -> list[int]:
        """The numbers of a plain text; letters that no piece spells are left out."""
        found: list[int] = []
        for index, word in enumerate(text.split()):
            found += self._spelled(word, first=index == 0)
        return found

    def decode(self, numbers: Sequence[int]) -> str:
        """The text of some numbers; blanks are nothing."""
        text = "".join(self.pieces[number - 1] for number in numbers if number != BLANK)
        return " ".join(text.replace(SPACE, " ").split())

    def _spelled(self, word: str, first: bool) -> list[int]:
        """A word in pieces. Byte pairs begin with the gap; of letters the first word's gap is not spelled."""
        if not self.merges:
            gap = [] if first else [self._numbers[SPACE]]
            return gap + [self._numbers[letter] for letter in word if letter in self._numbers]
        if word not in self._words:
            pieces = [piece for piece in (SPACE, *word) if piece in self._numbers]
            self._words[word] = [self._numbers[piece] for piece in merged(pieces, self._ranks)]
        return self._words[word]


def plain_letters(alphabet: str) -> str:
    """The letters of an alphabet, as transcripts have them."""
    return unicodedata.normalize("NFKC", alphabet).translate(APOSTROPHES).lower()


def merged(pieces: Sequence[str], ranks: dict[tuple[str, str], int]) -> list[str]:
    """Pieces with neighbours joined: always the pair that was learnt first, until none is left.

    Examples:
        >>> merged(list("abab"), {("a", "b"): 0, ("ab", "ab"): 1})
        ['abab']
    """
    parts = list(pieces)
    while len(parts) > 1:
        rank, place = min((ranks.get(pair, len(ranks)), i) for i, pair in enumerate(itertools.pairwise(parts)))
        if rank == len(ranks):
            break
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts


def learn_merges(words: Counter[str], count: int) -> list[tuple[str, str]]:
    """The commonest pairs of neighbours, each counted with all before it joined; those that come once are left.

    Examples:
        >>> learn_merges(Counter({"aa": 2, "aab": 3}), 2)
        [('a', 'a'), ('▁', 'aa')]
    """
    spelled = {word: [SPACE, *word] for word in words}
    pairs: Counter[tuple[str, str]] = Counter()
    holding: dict[tuple[str, str], set[str]] = {}

    def account(word: str, sign: int) -> None:
        for pair in zip(spelled[word], spelled[word][1:], strict=False):
            pairs[pair] += sign * words[word]
            holding.setdefault(pair, set()).add(word)

    for word in spelled:
        account(word, 1)
    found: list[tuple[str, str]] = []
    while len(found) < count and pairs:
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        if pairs[best] < 2:
            break
        found.append(best)
        for word in sorted(holding.pop(best)):
            account(word, -1)
            spelled[word] = merged(spelled[word], {best: 0})
            account(word, 1)
        pairs += Counter()  # drops what is gone
    return found
