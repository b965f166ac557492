"""Counts of pairs are a distribution, and tell more than counts of tokens where one follows from the other."""

from __future__ import annotations

from typing import Any

import numpy as np


def test_likelihoods_of_what_may_follow_are_one(script: Any):
    pairs, random = script("pairs"), np.random.default_rng()
    learnt = random.integers(7, size=200)
    for before in range(8):  # the last never came
        judged = np.stack([np.full(8, before), np.arange(8)], axis=1)
        shares = [float(pairs.pairs(learnt, row, 8)[0]) for row in judged]
        np.testing.assert_allclose(sum(shares), 1, rtol=1e-12)


def test_what_follows_from_the_token_before_is_foretold(script: Any):
    pairs = script("pairs")
    text = np.tile(np.arange(10), 100)
    assert abs(pairs.perplexity(pairs.singles(text, 10)[text]) - 10) < 1e-9
    assert pairs.perplexity(pairs.pairs(text, text, 10)) < 1.1


def test_rows_are_drawn_from_everywhere(script: Any):
    pairs = script("pairs")
    learnt = np.arange(40 * pairs.ROW + 7)
    found = pairs.drawn(learnt, 20 * pairs.ROW + 9, np.random.default_rng())
    rows = found.reshape(20, pairs.ROW)
    assert (rows == rows[:, :1] + np.arange(pairs.ROW)).all()
    assert len(set(rows[:, 0])) == 20
    assert not (rows[:, 0] < 20 * pairs.ROW).all()
