"""Recall and copying: what is asked can be answered from the row, and from nothing else."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from affinear.models.making import MOST_NUMBERS
from affinear.tasks.language.network import made as network_made
from affinear.tasks.language.puzzles import IGNORED, made
from affinear.tasks.language.samples import PuzzleRows
from affinear.train.draws import Draw


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


@pytest.mark.exhaustive
def test_recall_can_be_learnt_by_what_keeps_every_key():
    torch.manual_seed(0)
    puzzles = made("recall:length=24,pairs=3,symbols=16,train=30000,test=200")
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "conv_size": 4,
        "mechanism": "softmax",
    }
    network = network_made("affinear_tiny", sizes, {"vocabulary": 16, "end": 0}, MOST_NUMBERS)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    rows = PuzzleRows(puzzles, "train")
    for step in range(500):
        batch = rows.__getitems__([Draw(step * 48 + index, 0) for index in range(48)])
        loss = network(batch.tokens, batch.targets, None)
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    test = PuzzleRows(puzzles, "test").__getitems__([Draw(index, 0) for index in range(200)])
    _, right = network(test.tokens, test.targets, None, each=True)
    assert right[test.targets != IGNORED].float().mean() > 0.95
