"""Pages of results say first what they cannot tell, and then what cells came to."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

MACHINE = {"device": "a GPU", "torch": "2", "cores": 4}


def cell(kind: str, arm: str, seed: int, **given: Any) -> dict[str, Any]:
    return {"kind": kind, "arm": arm, "seed": seed, "parameters": 15_000_000, "recipe": {"steps": 1000}, **given}


def text(arm: str, seed: int, perplexity: float) -> dict[str, Any]:
    positions = {"tokens 0 to 31": {"perplexity": perplexity + 5}, "tokens 32 to 63": {"perplexity": perplexity}}
    return cell("text", arm, seed, width=0, score={"perplexity": perplexity, "accuracy": 0.3}, positions=positions)


def recall(arm: str, seed: int, accuracy: float) -> dict[str, Any]:
    return cell("recall", arm, seed, width=16, score={"perplexity": 2.0, "accuracy": accuracy}, positions={})


def test_language_is_told_by_arm_with_what_three_seeds_decide(script: Any):
    cells = [text("softmax", seed, 20 + 0.1 * seed) for seed in range(3)]
    cells += [text("mala", seed, 22 + 0.1 * seed + 0.01 * (seed == 1)) for seed in range(3)]
    cells += [text("nala", 0, 21.0), recall("mala", 0, 0.25), recall("mala", 1, 0.35)]
    found = {"machine": MACHINE, "parallel": 4, "cells": cells}
    alone = {"rows": [{"kind": "text", "arm": "mala", "ms": 12.34, "gigabytes": 3.5}]}
    page = script("pages.text").language_page(found, alone)
    head = page.split("\n## ")[0]
    assert "**What cannot be concluded.** 9 trainings" in head
    assert "2 of 4 settings have fewer than 3 seeds" in head
    assert "| mala | 3 | 22.10 ± 0.10 | +2.00 (1.99 to 2.02), decided | 15.00M | 1,000 |" in page
    assert "| nala | 1 | 21.00 (one seed) | +1.00, one seed |" in page
    assert "| softmax | 25.10 | 20.10 |" in page
    assert "| mala | 30.00 ± 7.07 |" in page
    assert "| text | mala | 12.3 | 3.50 |" in page


def test_ranges_are_told_by_kind_beside_chance_and_what_was_published(script: Any, tmp_path: Path):
    cells = [cell("image", "mala", seed, score={"accuracy": 0.35 + 0.01 * seed}) for seed in range(3)]
    cells += [cell("image", "none", seed, score={"accuracy": 0.18 + 0.03 * seed}) for seed in range(2)]
    (tmp_path / "ranges.json").write_text(json.dumps({"machine": MACHINE, "parallel": 6, "cells": cells}))
    pages, target = script("pages.text"), tmp_path / "results" / "ranges"
    before = sys.argv
    try:
        sys.argv = ["text.py", str(tmp_path / "ranges.json"), "--output", str(target)]
        assert pages.main() == 0
    finally:
        sys.argv = before
    page = (target / "README.md").read_text(encoding="utf-8")
    assert "| mala | 3 | 36.00 ± 1.00 | +16.00 (3.29 to 28.71), undecided |" in page
    assert "Less than ten points above chance: none. Published: softmax 40.57" in page
    assert "was not measured" in page
    assert json.loads((target / "ranges.json").read_text())["cells"] == cells


@pytest.mark.parametrize("name", ["language", "ranges"])
def test_no_cells_are_no_results(script: Any, name: str):
    page = script("pages.text").PAGES[name]({"machine": MACHINE, "parallel": 1, "cells": []}, None)
    assert "0 trainings" in page
    assert "| arm |" not in page
