"""Texts out of scores: the beam against every alignment there is, and n-grams against their own definition."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch

from affinear.tasks.speech.decoding import Beam, beam_search, greedy
from affinear.tasks.speech.ngram import BEGIN, END, UNKNOWN, NGrams
from affinear.tasks.speech.text import Spelling

SPELLING = Spelling.of_letters([], "ab")


def every_text(logs: torch.Tensor) -> dict[tuple[int, ...], float]:
    """Probability of each text, by all alignments one after the other."""
    found: dict[tuple[int, ...], float] = {}
    for path in itertools.product(range(logs.shape[1]), repeat=len(logs)):
        text = tuple(greedy(path))
        found[text] = found.get(text, 0.0) + math.exp(sum(logs[i, n].item() for i, n in enumerate(path)))
    return found


def test_a_wide_beam_finds_the_likeliest_text_over_all_alignments():
    for _ in range(5):
        logs = (2 * torch.randn(6, SPELLING.size, dtype=torch.float64)).log_softmax(-1)
        chances = every_text(logs)
        found = tuple(beam_search(logs, SPELLING, Beam(10_000)))
        assert chances[found] == pytest.approx(max(chances.values()), rel=1e-12)
        assert sum(chances.values()) == pytest.approx(1)


def test_a_language_model_joins_in_by_words():
    grams = NGrams.count(["a b", "a b", "b b"], 2)
    beam = Beam(10_000, grams, weight=0.7, bonus=0.3)
    logs = torch.randn(5, SPELLING.size, dtype=torch.float64).log_softmax(-1)

    def value(text: tuple[int, ...], chance: float) -> float:
        words = SPELLING.decode(text).split()
        return math.log(chance) + 0.7 * grams.sentence(" ".join(words)) + 0.3 * len(words)

    chances = every_text(logs)
    best = max(value(*item) for item in chances.items())
    found = tuple(beam_search(logs, SPELLING, beam))
    assert value(found, chances[found]) == pytest.approx(best, rel=1e-9)


def test_of_a_long_text_a_language_model_is_told_the_last_words_alone():
    asked: list[tuple[str, ...]] = []

    class Listening(NGrams):
        def score(self, word: str, context: tuple[str, ...]) -> float:
            asked.append(context)
            return super().score(word, context)

    grams = NGrams.count(["ab ba a", "b ab"], 3)
    numbers = [2, 3, 0, 1, 0, 3, 0, 1, 0, 1] * 1000  # "ab b", with a gap too many now and then
    logs = torch.full((len(numbers), SPELLING.size), -9.0).scatter_(1, torch.tensor(numbers)[:, None], -1e-3)
    found = beam_search(logs, SPELLING, Beam(3, Listening(grams.order, grams.logs, grams.steps), weight=0.1))
    assert found == greedy(numbers)
    assert max(map(len, asked)) <= 3


def test_a_narrow_beam_without_doubt_is_greedy():
    numbers = torch.randint(0, SPELLING.size, (30,))
    logs = torch.full((30, SPELLING.size), -20.0).scatter_(1, numbers[:, None], -1e-6)
    assert beam_search(logs, SPELLING, Beam(2)) == greedy(numbers.tolist())


def test_counted_probabilities_sum_to_one_after_any_context():
    grams = NGrams.count(["the cat sat", "the dog sat down", "a cat"], 3)
    words = [gram[0] for gram in grams.logs if len(gram) == 1]
    assert UNKNOWN in words
    for context in ((), (BEGIN,), ("the",), ("the", "cat"), ("never", "seen"), (BEGIN, "the")):
        assert sum(math.exp(grams.score(word, context)) for word in words) == pytest.approx(1)
    assert grams.score("cat", ("the",)) > grams.score("down", ("the",))
    assert grams.score("zebra", ("the",)) == grams.score(UNKNOWN, ("the",))


ARPA = """
\\data\\
ngram 1=4
ngram 2=2

\\1-grams:
-1.0 <unk>
-0.5 the -0.3
-0.7 cat
-0.9 </s>

\\2-grams:
-0.1 the cat
-0.2 cat </s>

\\end\\
"""


def test_an_arpa_file_is_read_with_its_steps_down(tmp_path: Path):
    path = tmp_path / "words.arpa"
    path.write_text(ARPA)
    grams = NGrams.read(path)
    assert grams.order == 2
    ten = math.log(10)
    assert grams.score("cat", ("the",)) == pytest.approx(-0.1 * ten)
    assert grams.score(END, ("the",)) == pytest.approx((-0.3 - 0.9) * ten)
    assert grams.score("dog", ("cat",)) == pytest.approx(-1.0 * ten)


def test_an_arpa_file_may_write_the_unknown_word_in_capitals(tmp_path: Path):
    path = tmp_path / "words.arpa"
    path.write_text("\\data\\\n\\1-grams:\n-1.5 <UNK>\n-0.5 CAT\n\\end\\\n")
    grams = NGrams.read(path)
    assert grams.score("dog", ()) == pytest.approx(-1.5 * math.log(10))
    assert grams.score("cat", ()) == pytest.approx(-0.5 * math.log(10))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "got nothing"),
        ("\\data\\\n\\1-grams:\n-1 a b c d", "line 3"),
        ("\\data\\\n\\1-grams:\nx a", "numbers around"),
        ("\\data\\\n\\many-grams:\n-1 a", "line 2: expected n-grams of"),
    ],
)
def test_a_language_model_that_is_none_is_refused(tmp_path: Path, content: str, said: str):
    path = tmp_path / "lm"
    path.write_text(content)
    with pytest.raises(ValueError, match=said):
        NGrams.read(path)


def test_a_text_is_counted(tmp_path: Path):
    path = tmp_path / "book.txt"
    path.write_text("The cat sat.\nThe cat ran!\n")
    grams = NGrams.read(path)
    assert grams.score("cat", (BEGIN, "the")) > grams.score("ran", (BEGIN, "the"))
    with pytest.raises(ValueError, match="cannot be read"):
        NGrams.read(tmp_path / "absent")
