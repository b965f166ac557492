"""The page of generation says which arms are told apart, and which are behind softmax."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def made(arm: str, seed: int, frechet: float) -> dict[str, Any]:
    score = {"frechet": frechet, "kernel": 0.02, "precision": 0.5, "recall": 0.4}
    told = {"arm": arm, "seed": seed, "score": score, "parameters": 33e6, "steps": 1500, "images": 17_000}
    told["made_per_second"] = 400.0 + seed
    return {**told, "settings": {"made": 5000, "sample_steps": 20}, "recipe": {"batch_size": 64}}


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
    assert "33.0 M | 401 ± 1 |" in text
    assert "trained for 1,500 of 64, so that every image came 5.6 times." in text
    assert "samples.png" not in text
    assert "--output outputs --steps 1500 --made 5000 --sample-steps 20 --minutes 9" in text
    (tmp_path / "samples.png").touch()
    assert "![Images of all arms](samples.png)" in written("generation", tmp_path, tmp_path / "page")
    assert "5,000 images of averaged weights, 20 of Euler's steps each, against the 17,000 images" in text
    assert "Not for nala at 1,024 tokens (plain, eager, 0.90)." in text
    assert "| plain | compiled | 1,024 | mala | 29.00 | 1.16 | 1.00 |" in text


def test_arms_that_were_cut_off_are_told_by_their_losses_batch_by_batch(written: Callable[..., str], tmp_path: Path):
    losses = [
        {"arm": arm, "seed": 0, "at": [10, 20, 30, 40][:count], "loss": [0.9, 0.5, 0.4 + more, 0.3 + more][:count]}
        for arm, count, more in (("mala", 4, 0.012), ("softmax", 3, 0.0))
    ]
    told = {"machine": {"device": "X1"}, "features": "inception", "cells": [], "losses": losses}
    (tmp_path / "generate.json").write_text(json.dumps(told))
    (tmp_path / "check.json").write_text(json.dumps({"images": [3000, 1500], "frechet": 25.3, "kernel": -1e-5}))
    text = written("generation", tmp_path, tmp_path / "page")
    assert "there is no FID of any arm" in text
    assert "the stretches of steps that end with 20 to 30" in text
    assert text.index("| softmax | 0.4500 |") < text.index("| mala | 0.4560 | +0.0060 (+0.0000 to +0.0120) | 40 |")
    assert "1,500 real images are 25.30 from 3,000 others" in text
