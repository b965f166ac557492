"""Counts of tokens tell what is in them, and not what is in their order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from affinear.tasks.ranges.sequences import Ranges, Tokens, split_of


def data_of(sequences: list[tuple[list[int], int]]) -> Ranges:
    rows: list[Tokens] = [np.array(tokens, np.uint8) for tokens, _ in sequences]
    split = split_of([rows], [label for _, label in sequences], "test")
    return Ranges("made up", "text", split, split, split, ("a", "b"), 3, 4)


def test_tokens_are_told_and_their_order_is_not(script: Any):
    counts = script("counts")
    assert counts.accuracy(data_of([([0, 0, 1], 0), ([0, 1, 1], 1)] * 8), 3, seed=0) == 1
    assert counts.accuracy(data_of([([0, 1], 0), ([1, 0], 1)] * 8), 2, seed=0) == 0.5


def test_counts_are_shares_of_what_is_taken(script: Any):
    counts = script("counts")
    split = data_of([([0, 1, 2, 2], 0), ([1], 1)]).test
    assert counts.shares(split, 3, 2).tolist() == [[0.5, 0.5, 0], [0, 1, 0]]


def test_the_first_token_tells_what_follows_from_it_alone(script: Any):
    counts = script("counts")
    learnt, judged = [([0, 1], 1), ([0, 2], 1), ([0, 2], 0), ([1, 1], 0), ([2], 1)], [([0, 0], 1), ([1, 2], 0)]
    data = replace(data_of(learnt), test=data_of([*judged, ([1, 1], 1), ([2], 1)]).test)
    assert counts.by_first(data) == 0.75
    assert counts.by_nothing(data) == 0.75
    assert counts.by_nothing(replace(data, test=data_of([*judged, ([0], 0)]).test)) == 1 / 3
