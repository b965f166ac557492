"""Trainings take turns, with steps that fit into the time that is left."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def turns(script: Any) -> Any:
    return script("running.turns")


def plan(turns: Any, folder: Path, **changes: Any) -> Any:
    told = {
        "folder": folder,
        "kinds": ["text", "image"],
        "arms": ["a", "b"],
        "seeds": [0, 1],
        "most": {"text": 10**9, "image": 10**9},
        "shares": {"text": 3.0, "image": 1.0},
        "fit": 2,
        "least": 1,
        "until": time.monotonic() + 1000,
    }
    return turns.Turns(**{**told, **changes})


def doing(turns: Any, folder: Path, paces: dict[str, float], failing: Sequence[str] = ()) -> Any:
    """Trainings that do nothing but write their steps, and fail where that is asked for."""
    cells = turns.Cell

    def cells_of(kind: str, arm: str, seed: int, steps: int) -> list[Any]:
        place = folder / kind / f"{arm}-{seed}"
        return [cells.in_folder(f"{kind} {arm} {seed}", place, [str(place), str(steps)])]

    def do(words: Sequence[str]) -> None:
        place = Path(words[0])
        if place.name in failing:
            raise RuntimeError("no such kernel")
        place.mkdir(parents=True)
        (place / "result.json").write_text(json.dumps({"steps": int(words[1]), "at": time.monotonic()}))

    def pace(kind: str, arm: str) -> float:
        if arm not in paces:
            raise RuntimeError("no memory")
        return paces[arm]

    return turns.Doing(cells_of, pace, do, lambda cell: "done")


def found(folder: Path) -> dict[str, dict[str, Any]]:
    paths = sorted(folder.glob("*/*/result.json"))
    return {f"{path.parent.parent.name} {path.parent.name}": json.loads(path.read_text()) for path in paths}


def test_kinds_share_the_time_and_first_seeds_come_first(turns: Any, tmp_path: Path):
    paces = {arm: random.uniform(0.01, 0.1) for arm in ("a", "b")}
    assert turns.take_turns(plan(turns, tmp_path), doing(turns, tmp_path, paces)) == []
    cells = found(tmp_path)
    text, image = (2 * cells[f"{kind} a-0"]["steps"] * sum(paces.values()) for kind in ("text", "image"))
    whole = turns.MARGIN * 1000 - 2 * 4 * turns.BESIDE
    assert text == pytest.approx(0.75 * whole, rel=0.02)
    assert image == pytest.approx(0.25 * whole, rel=0.02)
    for kind in ("text", "image"):
        assert len({cells[f"{kind} {arm}-{seed}"]["steps"] for arm in "ab" for seed in (0, 1)}) == 1
    order = sorted(cells, key=lambda name: cells[name]["at"])
    assert [name[-1] for name in order] == list("00001111")
    assert [name.split()[0] for name in order[:4]] == ["text", "text", "image", "image"]


def test_what_was_decided_and_done_stays(turns: Any, tmp_path: Path):
    paces = {"a": 0.1, "b": 0.2}
    turns.take_turns(plan(turns, tmp_path, seeds=[0]), doing(turns, tmp_path, paces))
    before = found(tmp_path)
    (tmp_path / "image" / "a-0" / "result.json").unlink()
    (tmp_path / "image" / "a-0").rmdir()
    decided = json.loads((tmp_path / "steps.json").read_text())
    (tmp_path / "steps.json").write_text(json.dumps({"text": decided["text"]}))
    slower = doing(turns, tmp_path, {"a": 9.0, "b": 9.0})
    assert turns.take_turns(plan(turns, tmp_path), slower) == []
    after = found(tmp_path)
    del before["image a-0"]
    assert {name: after[name] for name in before} == before
    assert after["image a-0"]["steps"] < decided["image"]
    assert after["text a-1"]["steps"] == before["text a-0"]["steps"]


@pytest.mark.parametrize(("changes", "steps"), [({"fit": 0}, 40), ({}, 40), ({"until": 0.0}, None)])
def test_no_more_than_the_most_and_nothing_when_time_is_over(
    turns: Any, tmp_path: Path, changes: dict[str, Any], steps: int | None
):
    one = plan(turns, tmp_path, most={"text": 40, "image": 40}, **changes)
    left = turns.take_turns(one, doing(turns, tmp_path, {"a": 0.1, "b": 0.1}))
    assert {cell["steps"] for cell in found(tmp_path).values()} == ({steps} if steps else set())
    assert len(left) == (0 if steps else 8)


@pytest.mark.parametrize(("seconds", "steps"), [(5, {2}), (140, {700}), (70, set(range(250, 500)))])
def test_fewer_seeds_end_rather_than_too_few_steps(turns: Any, tmp_path: Path, seconds: float, steps: set[int]):
    changes: dict[str, Any] = {"kinds": ["text"], "seeds": [0], "least": 700, "until": time.monotonic() + seconds}
    turns.take_turns(plan(turns, tmp_path, **changes), doing(turns, tmp_path, {"a": 0.05, "b": 0.06}))
    (found_steps,) = {cell["steps"] for cell in found(tmp_path).values()}
    assert found_steps in steps


def test_what_fails_is_told_and_the_others_go_on(turns: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    failing = doing(turns, tmp_path, {"a": 0.1}, failing=["b-0", "b-1"])
    left = turns.take_turns(plan(turns, tmp_path), failing)
    assert sorted(found(tmp_path)) == ["image a-0", "image a-1", "text a-0", "text a-1"]
    assert [cell.title for cell in left] == ["text b 0", "image b 0", "text b 1", "image b 1"]
    assert left[0].failure.read_text() == "RuntimeError: no such kernel\n"
    assert "text b 0: FAILED, RuntimeError: no such kernel" in capsys.readouterr().out
