"""Recall by size of a state: cells in an order that can be cut short, and a page that says what is missing."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest


def test_all_arms_of_a_seed_come_before_the_next(script: Any):
    cells = list(script("recall").cells())
    assert len(set(cells)) == len(cells) == 3 * (6 * 3 + 6)
    first = cells[:6]
    assert {one.arm for one in first} == {"softmax", "linear", "mala", "nala", "inline", "mamba2"}
    assert {(one.width, one.rotary, one.seed) for one in first} == {(16, False, 0)}


def test_a_cell_is_trained_and_told(script: Any):
    recall = script("recall")
    learnt, judged = recall.rows("train", 64), recall.rows("test", 8)
    found = recall.trained(recall.Cell("nala", 4, False, 1), learnt, judged, steps=2)
    assert [step for step, _ in found["curve"]] == [1, 2]
    assert 0 <= found["accuracy"] == found["curve"][-1][1] <= 1
    assert found["state"] == 8 * 4 + 8 + 4 + 1  # covariance, means and count; nala has features of twice the width
    assert recall.state_numbers(recall.Cell("softmax", 4, False, 0)) is None


def test_a_state_space_model_has_a_state_as_large(script: Any):
    recall = script("recall")
    cell = recall.Cell("mamba2", 16, False, 0)
    found = recall.trained(cell, recall.rows("train", 64), recall.rows("test", 8), steps=2)
    assert found["state"] == 256
    other = sum(weight.numel() for weight in recall.network_of(recall.Cell("mala", 16, False, 0)).parameters())
    assert 0.5 * other < found["parameters"] < 1.2 * other


def test_the_page_begins_with_what_it_cannot_tell(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    recall = script("recall")
    made = [
        {
            **asdict(recall.Cell("mala", 16, False, seed)),
            "accuracy": 0.8 + 0.1 * seed,
            "state": 289,
            "parameters": 12345,
        }
        for seed in range(3)
    ]
    made.append({**made[0], "rotary": True, "accuracy": 0.4})
    done = [{**one, "seconds": 60, "curve": []} for one in made]
    about = {"puzzle": recall.PUZZLE, "steps": 800, "machine": {"device": "CPU", "torch": "2"}}
    (tmp_path / "recall.json").write_text(json.dumps({**about, "cells": done}))
    monkeypatch.setattr(sys, "argv", ["recall.py", "--output", str(tmp_path), "--page"])
    assert recall.main() == 0
    page = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert page.splitlines()[2].startswith(
        "**What cannot be concluded.** 4 networks of 12,345 to 12,345 numbers, 3 seeds"
    )
    assert "| mala | - | - | 90.0 ± 10.0 | 289 |" in page
    assert "| mala | 90.0 ± 10.0 | 40.0 (one seed) |" in page
    monkeypatch.setattr(sys, "argv", ["recall.py", "--output", str(tmp_path), "--steps", "5"])
    with pytest.raises(SystemExit, match="has another puzzle, or 800 steps"):
        recall.main()
