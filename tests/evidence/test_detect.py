"""Detection: in which order cells are trained, and that those of a page are not trained again."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def detect(script: Any) -> Any:
    return script("detect")


def test_the_first_seed_of_all_backbones_comes_before_the_second_of_any_but_the_first(detect: Any) -> None:
    cells = detect.trainings(["nuclei"], 3)
    arms, kinds = detect.PLANS["nuclei"].arms, detect.PLANS["nuclei"].kinds
    assert len({one.name for one in cells}) == len(cells) == 3 * len(arms) * len(kinds)
    own = len(kinds) * 3
    assert {one.arm for one in cells[:own]} == {arms[0]}
    firsts, others = cells[own : own + len(kinds) * (len(arms) - 1)], cells[own + len(kinds) * (len(arms) - 1) :]
    assert [(one.kind, one.arm, one.seed) for one in firsts] == [(kind, arm, 0) for kind in kinds for arm in arms[1:]]
    assert [one.kind for one in others] == [kind for kind in kinds for _ in range(len(others) // len(kinds))]


def test_cells_of_a_page_are_taken_if_they_were_trained_as_is_asked_for(detect: Any, tmp_path: Path) -> None:
    plan, page, cells = detect.PLANS["nuclei"], tmp_path / "page", tmp_path / "cells"
    page.mkdir()
    told = [
        {"cell": asdict(detect.Training("nuclei", "mask_rcnn", arm, 2)), "plan": {**asdict(plan), "steps": steps}}
        for arm, steps in (("none", plan.steps), ("linear", plan.steps + 1))
    ]
    (page / "nuclei.json").write_text(json.dumps(told))
    detect.take(page, cells, {"nuclei": plan})
    assert [file.name for file in cells.iterdir()] == ["nuclei-mask_rcnn-none-2.json"]
    assert json.loads((cells / "nuclei-mask_rcnn-none-2.json").read_text())["cell"]["arm"] == "none"
