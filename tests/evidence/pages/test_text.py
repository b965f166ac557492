"""Pages of results say first what they cannot tell, and then what cells came to."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

MACHINE = {"device": "a GPU", "torch": "2", "cores": 4}


def cell(kind: str, arm: str, seed: int, **given: Any) -> dict[str, Any]:
    recipe = {"steps": 1000, "batch_size": 64, "lr": 1e-3}
    told = {"kind": kind, "arm": arm, "seed": seed, "parameters": 15_000_000, "recipe": recipe}
    return {**told, "settings": {"length": None}, **given}


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
    alone = {
        "machine": MACHINE,
        "rows": [{"kind": "text", "arm": "mala", "ms": 12.34, "gigabytes": 3.5, "no_graph": ""}],
    }
    page = script("pages.language").language_page(found, alone)
    head = page.split("\n## ")[0]
    assert "**What cannot be concluded.** 9 trainings" in head
    assert "2 of 4 settings have fewer than 3 seeds" in head
    assert "| mala | 3 | 22.10 ± 0.10 | +2.00 (1.99 to 2.02), decided | 15.00M | 1,000 |" in page
    assert "| nala | 1 | 21.00 (one seed) | +1.00, one seed |" in page
    assert "| softmax | 25.10 | 20.10 |" in page
    assert "| mala | 30.00 ± 7.07 |" in page
    assert "| text | mala | 12.34 | 3.50 | yes |" in page
    assert "Recall is that of two small layers" in page
    assert "million tokens" not in page
    assert "a document sees those that stand before it in its row" in page
    assert "mamba2" not in page


def test_language_is_told_with_how_much_was_read(script: Any):
    settings, data = {"context": 512}, {"sizes": [9, 1], "train_tokens": 9_900_000}
    cells = [{**text("mamba2", 0, 20.0), "settings": settings, "data": data}]
    page = script("pages.language").language_page({"machine": MACHINE, "parallel": 4, "cells": cells}, None)
    assert "abstracts, 32.8 million tokens seen in training, of 9.9 million; about 15M" in page
    assert "Recall" not in page
    assert "its time says nothing about kernels that are made for it" in page


@pytest.mark.parametrize("parallel", [1, 2])
def test_steps_are_told_where_trainings_had_the_machine(script: Any, parallel: int):
    took = {"peak_memory": 2**30, "no_graph": ""}
    cells = [{**text("mala", seed, 20.0), **took, "ms_per_step": 5.0 + seed} for seed in range(3)]
    cells += [{**text("nala", 0, 20.0), **took, "ms_per_step": 7.25, "no_graph": "an operation waits"}]
    page = script("pages.language").language_page({"machine": MACHINE, "parallel": parallel, "cells": cells}, None)
    assert ("| text | mala | 6.00 | 1.00 | yes |" in page) == (parallel == 1)
    assert ("| text | nala | 7.25 | 1.00 | no |" in page) == (parallel == 1)
    assert ("trainings shared the machine" in page) == (parallel == 2)


def test_ranges_are_told_by_kind_beside_chance_and_what_was_published(script: Any, tmp_path: Path):
    cells = [cell("image", "mala", seed, score={"accuracy": 0.35 + 0.01 * seed}) for seed in range(3)]
    cells += [cell("image", "none", seed, score={"accuracy": 0.18 + 0.03 * seed}) for seed in range(2)]
    cells += [cell("text", "mala", 0, score={"accuracy": 0.61}, settings={"length": 1024})]
    found = {"machine": MACHINE, "parallel": 6, "cells": cells, "judged": {"image": 2000}}
    (tmp_path / "ranges.json").write_text(json.dumps(found))
    pages, target = script("pages.text"), tmp_path / "results" / "ranges"
    before = sys.argv
    try:
        sys.argv = ["text.py", str(tmp_path / "ranges.json"), "--output", str(target)]
        sys.argv += ["--note", "One rate.", "--command", "make data", "--command", "make cells"]
        assert pages.main() == 0
    finally:
        sys.argv = before
    page = (target / "README.md").read_text(encoding="utf-8")
    assert "| mala | 3 | 36.00 ± 1.00 | +16.00 (3.29 to 28.71), undecided |" in page
    assert "**Bar: 10 points above chance, 20 %.** Held by `mala`; missed by `none` by 0.5 points." in page
    assert "**Bar: 10 points above chance, 60 %.** All hold it." in page
    assert "Published: softmax 40.57" in page
    assert "1,000 steps of 64 of up to 1,024, 0.5 % of as many sequences, at a rate of 0.001 in place of 0.0001" in page
    assert "by 2,000 test sequences, which alone leaves every accuracy uncertain by up to 2.1 points (95 %)." in page
    assert "Nearer to the bar than that, so that it is open: `none`." in page
    assert "32 sequences of up to 4,096 tokens. Here: 1,000 steps of 64 of up to 1,024, 4 %" in page
    assert "Pathfinder" not in page
    assert page.index("**What cannot be concluded.** One rate. 6 trainings") < page.index("| arm |")
    assert page.endswith("\n```sh\nmake data\nmake cells\n```\n")
    assert "was not measured: trainings shared the machine" in page
    assert json.loads((target / "ranges.json").read_text())["cells"] == cells


@pytest.mark.parametrize("kind", ["listops", "pathfinder"])
def test_kinds_without_a_bar_are_told_beside_what_is_right_without_reading(script: Any, kind: str):
    cells = [cell(kind, "none", seed, score={"accuracy": 0.18 + 0.01 * seed}) for seed in range(3)]
    found = {"machine": MACHINE, "parallel": 1, "shared": True, "cells": cells, "judged": {kind: 2000}}
    page = script("pages.ranges").ranges_page(found, None)
    assert "Bar" not in page
    assert "the bar" not in page
    assert ("is right in 17 to 18 % of them" in page) == (kind == "listops")
    assert ("is right in half of them" in page) == (kind == "pathfinder")


def test_a_page_of_a_cpu_names_no_gpu(script: Any):
    cells = [cell("image", "none", 0, score={"accuracy": 0.1})]
    found = {"machine": {"device": "CPU", "torch": "2", "cores": 2}, "parallel": 1, "cells": cells}
    alone = {
        "machine": found["machine"],
        "rows": [{"kind": "image", "arm": "none", "ms": 9.87, "gigabytes": 0.0, "no_graph": "no GPU"}],
    }
    page = script("pages.text").PAGES["ranges"]({**found, "judged": {"image": 400}}, alone)
    assert "Nearer to chance than that: `none`." in page
    assert "Nearer to the bar" not in page
    assert "each arm alone on the CPU" in page
    assert "| image | none | 9.87 | - | no |" in page
    assert "Held by no arm; missed by `none` by 10.0 points" in page
    assert "Trained on a CPU of 2 cores, a thread for each training, torch 2, 1 at a time" in page
    assert "GPU" not in page


@pytest.mark.parametrize("name", ["language", "ranges"])
def test_no_cells_are_no_results(script: Any, name: str):
    page = script("pages.text").PAGES[name]({"machine": MACHINE, "parallel": 1, "cells": []}, None)
    assert "0 trainings" in page
    assert "| arm |" not in page
