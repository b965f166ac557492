"""Recall and copying: what is asked can be answered from the row, and from nothing else."""

from __future__ import annotations

import random

import numpy as np
import pytest

from affinear.tasks.language.puzzles import IGNORED, made


def test_every_key_is_asked_once_and_its_value_stands_in_the_row():
    puzzles = made(f"recall:length=64,pairs=8,symbols=100,train=9,test=9,seed={random.randrange(10**6)}")
    for index in range(9):
        tokens, targets = puzzles.row("train", index)
        known = {int(tokens[2 * i]): int(tokens[2 * i + 1]) for i in range(8)}
        asked = np.flatnonzero(targets != IGNORED)
        assert len(known) == len(asked) == 8
        assert asked.min() >= 16
        assert {int(tokens[place]): int(targets[place]) for place in asked} == known
        assert max(known) < 50 <= min(known.values())
        assert (len(tokens), int(tokens.max()) < 100) == (64, True)


def test_a_copy_is_foretold_from_the_sign_on():
    tokens, targets = made("copy:length=20,symbols=9,train=3,test=3").row("test", 1)
    assert tokens[10] == 0
    assert tokens[11:].tolist() == tokens[:9].tolist()
    assert targets[10:].tolist() == tokens[:10].tolist()
    assert (targets[:10] == IGNORED).all()


def test_rows_are_the_same_whenever_they_are_asked_for_and_halves_differ():
    puzzles = made("recall:length=32,pairs=4,symbols=64,train=9,test=9")
    one, other, test = puzzles.row("train", 3), puzzles.row("train", 3), puzzles.row("test", 3)
    assert np.array_equal(one[0], other[0])
    assert not np.array_equal(one[0], test[0])
    assert puzzles.fingerprint != made("recall:length=32,pairs=4,symbols=64,train=9,test=9,seed=1").fingerprint


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("recall:pairs=100", "pairs: expected from 1 to 64"),
        ("recall:symbols=20,pairs=10", "pairs: expected from 1 to 9"),
        ("copy:pairs=3", "copy takes no 'pairs'"),
        ("copy:length=2", "expected rows of 4 to"),
        ("recall:symbols=2", "symbols: expected from 4 to"),
    ],
)
def test_a_puzzle_that_cannot_be_is_refused(spec: str, said: str):
    with pytest.raises(ValueError, match=said):
        made(spec)
