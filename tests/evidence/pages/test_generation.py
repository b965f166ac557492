"""The page of generation says which arms are told apart, and which are behind softmax."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def made(arm: str, seed: int, frechet: float) -> dict[str, Any]:
    score = {"frechet": frechet, "kernel": 0.02, "precision": 0.5, "recall": 0.4}
    return {"arm": arm, "seed": seed, "score": score, "parameters": 33e6, "steps": 1500, "settings": {"made": 5000}}


def test_generation_tells_arms_that_overlap_and_what_is_behind_sdpa(written: Callable[..., str], tmp_path: Path):
    cells = [made("softmax", s, 60.0 + s) for s in range(3)] + [made("mala", s, 61.0 + s) for s in range(3)]
    cells += [made("none", s, 90.0 + s) for s in range(3)]
    told = {"machine": {"device": "X1"}, "features": "inception", "cells": cells}
    (tmp_path / "generate.json").write_text(json.dumps(told))
    rows: list[dict[str, Any]] = [
        {"around": "plain", "pixels": 512, "tokens": 1024, "mechanism": name, "images_per_second": rate, "peak_gb": 1.0}
        for name, rate in (("softmax", 10.0), ("mala", 12.0), ("nala", 9.0))
    ]
    rows += [{**row, "compiled": True, "images_per_second": 2 * row["images_per_second"] + 5} for row in rows[:2]]
    rows += [{**rows[2], "tokens": 256}, {**rows[0], "tokens": 256}]  # below the bar's length
    (tmp_path / "generate-speed.json").write_text(json.dumps({"steps": 50, "rows": rows}))
    text = written("generation", tmp_path, tmp_path / "page")
    assert "Not told apart from the best arm, softmax, as their seeds overlap: mala." in text
    assert "The arm without attention is 30.0 of distance behind" in text
    assert "Some arms have" not in text
    assert "| softmax | 3 | 61.0 ± 1.0 |" in text
    assert "Not for nala at 1,024 tokens (plain, eager, 0.90)." in text
    assert "| plain | compiled | 1,024 | mala | 29.00 | 1.16 | 1.00 |" in text
