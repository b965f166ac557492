"""The page of detection says what was measured, what was not, and first what cannot be concluded."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

ARMS = ("mavit_tiny", "none", "resnet50")
KINDS = ("mask_rcnn", "cascade_mask_rcnn")


@pytest.fixture
def page(script: Any) -> Any:
    return script("pages.detection")


def nucleus(kind: str, arm: str, seed: int, ap: float) -> dict[str, Any]:
    numbers = {"ap": ap, "ap50": ap + 0.2, "ap75": ap - 0.1}
    plan = {"kinds": KINDS, "arms": ARMS, "steps": 200, "batch": 16, "cap": 400}
    cell = {"plan": "nuclei", "kind": kind, "arm": arm, "seed": seed}
    about = {"parameters": 4.3e7, "step_s": 0.21, "peak_gib": 7.25, "wall_s": 60.0, "device": "GPU", "images": 132}
    return {"cell": cell, "plan": plan, "box": numbers, "mask": {"ap": ap - 0.02}, **about}


def blood(seed: int, ap50: float) -> dict[str, Any]:
    made = nucleus("retinanet", "mavit_tiny", seed, ap50 - 0.2)
    made["cell"]["plan"] = "bccd"
    made["box"]["by_class"] = [0.7, 0.5, 0.4]
    return made


def test_a_page_of_detection_has_means_deviations_and_the_verdict(page: Any, tmp_path: Path) -> None:
    aps = {("mask_rcnn", arm): 0.4 for arm in ARMS} | {("cascade_mask_rcnn", arm): 0.5 for arm in ARMS}
    cells = [nucleus(*key, seed, ap + 0.01 * seed) for key, ap in aps.items() for seed in range(3)]
    random.shuffle(cells)
    text = page.written(tmp_path, cells)
    assert text.index("What cannot be concluded") < text.index(
        "| Mask R-CNN | mavit_tiny | 3 | 41.0 ± 1.0 | 61.0 ± 1.0"
    )
    assert "| Cascade Mask R-CNN | around none | 3 | 51.0 ± 1.0" in text
    assert "is met where both were trained" in text
    assert "Blood" not in text
    assert (tmp_path / "README.md").read_text() == text
    worse = [nucleus("cascade_mask_rcnn", "none", seed, 0.3) for seed in range(3)]
    again = page.written(tmp_path, [*worse, *(blood(seed, 0.85) for seed in range(3))])
    assert "is missed for around none" in again
    assert "| mean ± deviation | 65.0 ± 0.0 | 85.0 ± 0.0 |" in again
    assert "AP50 of 80 %: met" in again


def test_a_page_of_detection_says_what_is_missing_and_undecided(page: Any, tmp_path: Path) -> None:
    assert "are not here yet" in page.written(tmp_path / "none", [blood(0, 0.7)])
    one = page.written(tmp_path / "one", [nucleus("mask_rcnn", "none", 0, 0.4)])
    assert "is undecided" in one
    assert "difference of a point or two is noise" in one
