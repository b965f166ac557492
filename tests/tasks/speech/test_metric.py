"""Errors of words and letters, counted as jiwer counts them."""

from __future__ import annotations

import jiwer
import numpy as np
import pytest

from affinear.tasks.speech.metric import Errors, align, compare, distance, score_of


def random_text(random: np.random.Generator, least: int = 1) -> str:
    return " ".join(random.choice(["a", "b", "cat", "dog", "the"], size=random.integers(least, 12)))


def test_rates_are_those_of_jiwer_over_the_whole_set():
    random = np.random.default_rng()
    said = [random_text(random) for _ in range(40)]
    heard = [random_text(random, 0) for _ in range(40)]
    total = sum((compare(one, other) for one, other in zip(said, heard, strict=True)), Errors())
    assert total.numbers["wer"] == pytest.approx(jiwer.wer(said, heard), rel=1e-12)
    assert total.numbers["cer"] == pytest.approx(jiwer.cer(said, heard), rel=1e-12)
    kinds = total.numbers
    assert kinds["wrong"] + kinds["missed"] + kinds["extra"] == pytest.approx(kinds["wer"], rel=1e-12)
    assert total.recordings == 40


def test_an_alignment_is_a_cheapest_one_of_exactly_these_words():
    random = np.random.default_rng()
    for _ in range(40):
        said, heard = (random_text(random, 0).split() for _ in range(2))
        steps = align(said, heard)
        assert [step.said for step in steps if step.kind != "extra"] == said
        assert [step.heard for step in steps if step.kind != "missed"] == heard
        assert sum(step.kind != "same" for step in steps) == distance(said, heard)
        assert all((step.said == step.heard) == (step.kind == "same") for step in steps)


def test_nothing_said_and_nothing_heard():
    assert compare("", "").numbers["wer"] == 0
    assert compare("", "a b").numbers["wer"] == 2
    assert compare("a b", "").numbers == {"wer": 1.0, "cer": 1.0, "wrong": 0.0, "missed": 1.0, "extra": 0.0}


def test_speakers_are_parts_and_errors_are_added_before_they_are_divided():
    found = [("ann", compare("a b c d", "a b c d")), ("bob", compare("a", "b")), ("ann", compare("a", "a"))]
    score = score_of(found)
    assert score["wer"] == 1 / 6
    assert score.count == 3
    assert {part.name: (part.count, part.numbers["wer"]) for part in score.parts} == {"ann": (2, 0.0), "bob": (1, 1.0)}
