"""Steps of kinds are told on the command line, and what came out is found wherever it was done."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


def test_steps_are_the_usual_ones_unless_told(script: Any):
    steps_of, usual = script("running.kinds").steps_of, {"text": 9, "image": 8}
    assert steps_of(None, usual) == usual
    assert steps_of(["image=3", "image=4"], usual) == {"text": 9, "image": 4}


@pytest.mark.parametrize("told", ["image", "image=", "image=1", "image=-3", "sound=3", "=3"])
def test_steps_that_are_told_otherwise_are_refused(script: Any, told: str):
    with pytest.raises(ValueError, match="--steps: expected KIND=N, at least 2 steps for one of text, image, got"):
        script("running.kinds").steps_of([told], {"text": 9, "image": 8})


def test_cells_are_found_in_the_order_of_kinds_arms_and_seeds(script: Any, tmp_path: Path):
    cells = [(kind, arm, seed) for kind in ("text", "image") for arm in ("mala", "none") for seed in range(2)]
    for kind, arm, seed in reversed(cells):
        folder = tmp_path / kind / f"{arm}-{seed}"
        folder.mkdir(parents=True)
        (folder / "result.json").write_text(json.dumps({"kind": kind, "arm": arm, "seed": seed}))
    (tmp_path / "text" / "linear-0").mkdir()  # which is not done
    found = script("running.kinds").found_in(tmp_path, ["text", "image"], ["mala", "linear", "none"])
    assert [(one["kind"], one["arm"], one["seed"]) for one in found] == cells
