"""A language model of n-grams: how likely a word is after others, out of an ARPA file or counted from texts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .text import plain

BEGIN, END, UNKNOWN = MARKS = "<s>", "</s>", "<unk>"
LONGEST = 10  # words of an n-gram in a file
Words = tuple[str, ...]


@dataclass(frozen=True)
class NGrams:
    """Logarithms of probabilities, with a way down to shorter contexts.

    Attributes:
        order: Words of the longest n-gram.
        logs: Natural logarithm of each n-gram's last word after the others.
        steps: What is added when a context is shortened by its first word; nothing where it is not listed.
    """

    order: int
    logs: Mapping[Words, float]
    steps: Mapping[Words, float]

    @staticmethod
    def count(texts: Iterable[str], order: int = 3) -> NGrams:
        """Counted from plain texts and smoothed by Witten and Bell's rule, interpolated.

        p(w | h) = (c(h w) + t(h) p(w | shorter h)) / (c(h) + t(h)), where t(h) is how many different words follow h;
        one word more than the texts have, the unknown one, shares what is left over at the bottom.

        Examples:
            >>> model = NGrams.count(["a b a b", "a b b"], 2)
            >>> total = sum(math.exp(model.score(word, ("a",))) for word in ("a", "b", END, UNKNOWN))
            >>> round(total, 9)
            1.0
        """
        grams: Counter[Words] = Counter()
        for text in texts:
            words = (BEGIN, *text.split(), END)
            for size in range(1, order + 1):
                grams.update(words[i : i + size] for i in range(len(words) - size + 1))
        del grams[(BEGIN,)]
        contexts: Counter[Words] = Counter()
        kinds: Counter[Words] = Counter()
        for gram, times in grams.items():
            contexts[gram[:-1]] += times
            kinds[gram[:-1]] += 1
        chances: dict[Words, float] = {}
        steps: dict[Words, float] = {}
        vocabulary = kinds[()] + 1
        for gram in sorted(grams, key=len):
            context = gram[:-1]
            total, different = contexts[context], kinds[context]
            below = chances[gram[1:]] if context else 1 / vocabulary
            chances[gram] = (grams[gram] + different * below) / (total + different)
            steps[context] = math.log(different / (total + different))
        chances[(UNKNOWN,)] = math.exp(steps.pop((), 0.0)) / vocabulary
        return NGrams(order, {gram: math.log(chance) for gram, chance in chances.items()}, steps)

    @staticmethod
    def read(path: Path) -> NGrams:
        """Out of an ARPA file, or counted from a text file, a sentence on every line.

        Raises:
            ValueError: If it is not there, or neither.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"lm: expected an ARPA file or a text, got {str(path)!r}, which cannot be read") from error
        if "\\data\\" in text[:10_000]:
            return _read_arpa(text.splitlines(), path)
        lines = [line for line in map(plain, text.splitlines()) if line]
        if not lines:
            raise ValueError(
                f"lm: expected an ARPA file or a text with a sentence on every line, got nothing in {path}"
            )
        return NGrams.count(lines)

    def score(self, word: str, context: Words) -> float:
        """The natural logarithm of a word's probability after others, of which the last few count."""
        context = context[len(context) - self.order + 1 :] if len(context) >= self.order else context
        word = word if (word,) in self.logs else UNKNOWN
        added = 0.0
        while (*context, word) not in self.logs:
            if not context:
                return added + -math.log(1e7)  # an ARPA file without an unknown word
            added += self.steps.get(context, 0.0)
            context = context[1:]
        return added + self.logs[(*context, word)]

    def sentence(self, text: str) -> float:
        """The natural logarithm of a whole plain text, its end included."""
        words = (BEGIN, *text.split(), END)
        return sum(self.score(word, words[:i]) for i, word in enumerate(words[1:], 1))


def _order(line: str, where: str) -> int:
    """How many words the n-grams below a headline have."""
    told = line[1:].partition("-")[0]
    if told not in map(str, range(1, LONGEST + 1)):
        raise ValueError(f"{where}: expected n-grams of 1 to {LONGEST} words, got {line[:40]!r}")
    return int(told)


def _read_arpa(lines: Sequence[str], path: Path) -> NGrams:
    logs: dict[Words, float] = {}
    steps: dict[Words, float] = {}
    size = 0
    for number, line in enumerate(lines, 1):
        line = line.strip()
        if line.startswith("\\") and line.endswith("-grams:"):
            size = _order(line, f"{path}: line {number}")
        elif line == "\\end\\":
            break
        elif line and size:
            fields = line.split()
            if len(fields) not in (size + 1, size + 2):
                raise ValueError(
                    f"{path}: line {number}: expected a logarithm, {size} words and perhaps another logarithm, got "
                    f"{line!r}"
                )
            gram = tuple(field.lower() if field.lower() in MARKS else plain(field) for field in fields[1 : size + 1])
            try:
                logs[gram] = float(fields[0]) * math.log(10)
                if len(fields) == size + 2:
                    steps[gram] = float(fields[-1]) * math.log(10)
            except ValueError:
                raise ValueError(f"{path}: line {number}: expected numbers around the words, got {line!r}") from None
    if not logs:
        raise ValueError(f"{path}: expected n-grams below a line such as \\1-grams:, found none")
    return NGrams(max(map(len, logs)), logs, steps)
