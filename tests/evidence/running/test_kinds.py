"""Kinds take turns with steps that are told or fit into the time, and what came out is found wherever it was done."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def kinds(script: Any) -> Any:
    return script("running.kinds")


def turns(module: Any, folder: Path, paces: dict[str, float], **changes: Any) -> Any:
    """Trainings of two kinds, timed as given."""

    def cells_of(kind: str, arm: str, seed: int, steps: int) -> list[Any]:
        place = folder / kind / f"{arm}-{seed}"
        return [module.Cell.in_folder(f"{kind} {arm} {seed}", place, [str(place), str(steps)])]

    def pace(kind: str, arm: str) -> float:
        if arm not in paces:
            raise RuntimeError("no memory")
        return paces[arm]

    told = {
        "folder": folder,
        "kinds": ["text", "image"],
        "arms": ["a", "b"],
        "seeds": [0, 1],
        "most": {"text": 10**9, "image": 10**9},
        "shares": {"text": 3.0, "image": 1.0},
        "fit": 2,
        "least": 1,
        "until": time.time() + 1000,
        "cells": cells_of,
        "pace": pace,
    }
    return module.Turns(**{**told, **changes})


def doing(kinds: Any) -> Any:
    """Trainings that do nothing but write their steps."""

    def do(words: Sequence[str]) -> None:
        place = Path(words[0])
        place.mkdir(parents=True)
        (place / "result.json").write_text(json.dumps({"steps": int(words[1]), "at": time.monotonic()}))

    return kinds.Doing(do, lambda cell: "done")


def found(folder: Path) -> dict[str, dict[str, Any]]:
    paths = sorted(folder.glob("*/*/result.json"))
    return {f"{path.parent.parent.name} {path.parent.name}": json.loads(path.read_text()) for path in paths}


def test_kinds_share_the_time_and_first_seeds_come_first(kinds: Any, script: Any, tmp_path: Path):
    paces = {arm: random.uniform(0.01, 0.1) for arm in ("a", "b")}
    assert kinds.take_turns(turns(kinds, tmp_path, paces), doing(kinds)) == []
    cells = found(tmp_path)
    text, image = (2 * cells[f"{kind} a-0"]["steps"] * sum(paces.values()) for kind in ("text", "image"))
    whole = script("running.pacing").MARGIN * 1000
    assert text == pytest.approx(0.75 * whole - 4 * kinds.BESIDE, rel=0.02)
    assert image == pytest.approx(0.25 * whole - 4 * kinds.BESIDE, rel=0.02)
    for kind in ("text", "image"):
        assert len({cells[f"{kind} {arm}-{seed}"]["steps"] for arm in "ab" for seed in (0, 1)}) == 1
    order = sorted(cells, key=lambda name: cells[name]["at"])
    assert [name[-1] for name in order] == list("00001111")
    assert [name.split()[0] for name in order[:4]] == ["text", "text", "image", "image"]


def test_what_was_decided_and_done_stays(kinds: Any, tmp_path: Path):
    paces = {"a": 0.1, "b": 0.2}
    kinds.take_turns(turns(kinds, tmp_path, paces, seeds=[0]), doing(kinds))
    before = found(tmp_path)
    (tmp_path / "image" / "a-0" / "result.json").unlink()
    (tmp_path / "image" / "a-0").rmdir()
    decided = json.loads((tmp_path / "steps.json").read_text())
    (tmp_path / "steps.json").write_text(json.dumps({"text": decided["text"]}))
    assert kinds.take_turns(turns(kinds, tmp_path, {"a": 9.0, "b": 9.0}), doing(kinds)) == []
    after = found(tmp_path)
    del before["image a-0"]
    assert {name: after[name] for name in before} == before
    assert after["image a-0"]["steps"] < decided["image"]
    assert after["text a-1"]["steps"] == before["text a-0"]["steps"]


@pytest.mark.parametrize(("changes", "steps"), [({"fit": 0}, 40), ({}, 40), ({"until": 0.0}, None)])
def test_no_more_than_the_most_and_nothing_when_time_is_over(
    kinds: Any, tmp_path: Path, changes: dict[str, Any], steps: int | None
):
    one = turns(kinds, tmp_path, {"a": 0.1, "b": 0.1}, most={"text": 40, "image": 40}, **changes)
    left = kinds.take_turns(one, doing(kinds))
    assert {cell["steps"] for cell in found(tmp_path).values()} == ({steps} if steps else set())
    assert len(left) == (0 if steps else 8)


@pytest.mark.parametrize(("seconds", "steps"), [(5, {2}), (140, {700}), (70, set(range(250, 500)))])
def test_fewer_seeds_end_rather_than_too_few_steps(kinds: Any, tmp_path: Path, seconds: float, steps: set[int]):
    changes: dict[str, Any] = {"kinds": ["text"], "seeds": [0], "least": 700, "until": time.time() + seconds}
    kinds.take_turns(turns(kinds, tmp_path, {"a": 0.05, "b": 0.06}, **changes), doing(kinds))
    (found_steps,) = {cell["steps"] for cell in found(tmp_path).values()}
    assert found_steps in steps


def test_an_arm_without_a_pace_has_its_turn_and_a_kind_without_any_has_the_most(kinds: Any, tmp_path: Path):
    assert kinds.take_turns(turns(kinds, tmp_path / "some", {"a": 0.1}), doing(kinds)) == []
    steps = {name: cell["steps"] for name, cell in found(tmp_path / "some").items()}
    assert len(steps) == 8
    assert steps["text a-0"] == steps["text b-1"] < 10**9
    assert kinds.take_turns(turns(kinds, tmp_path / "none", {}), doing(kinds)) == []
    assert {cell["steps"] for cell in found(tmp_path / "none").values()} == {10**9}


def test_an_arm_that_takes_longer_than_is_left_does_not_keep_another_from_its_turn(
    kinds: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    clock, lasts = [1000.0], {"a": 30.0, "b": 2.0}
    monkeypatch.setattr(time, "time", lambda: clock[0])
    one, writes = turns(kinds, tmp_path, {}, kinds=["text"], fit=0, until=1050.0), doing(kinds).do

    def do(words: Sequence[str]) -> None:
        clock[0] += lasts[Path(words[0]).name[0]]
        writes(words)

    left = kinds.take_turns(one, kinds.Doing(do, lambda cell: "done"))
    assert [cell.title for cell in left] == ["text a 1"]


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
