"""Trainings in their order: as many steps as there is time for, arms that are left out, and what fails."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest


@pytest.fixture
def in_order(script: Any) -> Any:
    return script("running.in_order")


def doing(script: Any, **changes: Any) -> Any:
    """What does nothing, but for what is said."""
    nothing: dict[str, Any] = {
        "cells": lambda *_: [],
        "pace": lambda kind, arm: 1.0,
        "do": lambda words: None,
        "told": lambda cell: "told",
    }
    return script("running.turns").Doing(**{**nothing, **changes})


def test_all_steps_and_what_is_beside_them_end_in_time(in_order: Any):
    random = np.random.default_rng()
    paces = {f"arm {i}": float(random.uniform(0.01, 0.1)) for i in range(random.integers(2, 8))}
    room = in_order.Room(until=1000.0, beside=5.0, least=2)
    plan = room.plan(paces, now=400.0)
    assert plan.arms == list(paces)
    took = sum(5.0 + plan.steps * pace for pace in paces.values())
    assert took <= in_order.MARGIN * 600.0 < took + sum(paces.values())


def test_arms_at_the_end_are_left_out_for_steps_but_never_the_first_two(in_order: Any):
    paces = {"a": 0.1, "b": 0.1, "c": 0.2, "d": 0.2}
    steps = in_order.MARGIN * 100.0 / 0.4  # of the first three
    room = in_order.Room(until=100.0, beside=0.0, least=int(steps))
    assert room.plan(paces, now=0.0) == in_order.Plan(int(steps), ["a", "b", "c"])
    assert in_order.Room(100.0, 0.0, 10_000).plan(paces, now=0.0).arms == ["a", "b"]
    assert in_order.Room(0.0, 0.0, 10_000).plan(paces, now=5.0) == in_order.Plan(2, ["a", "b"])


def test_what_cannot_be_timed_takes_no_time_and_has_its_turn(in_order: Any):
    room = in_order.Room(until=100.0, beside=0.0, least=2)
    plan = room.plan({"a": math.inf, "b": 0.5}, now=0.0)
    assert plan == in_order.Plan(math.floor(in_order.MARGIN * 100.0 / 0.5), ["a", "b"])
    assert room.plan({"a": math.inf}, now=0.0).steps == 2


def test_what_was_decided_stands(in_order: Any, script: Any, tmp_path: Path):
    asked: list[str] = []

    def pace(kind: str, arm: str) -> float:
        asked.append(f"{kind} {arm}")
        if arm == "broken":
            raise RuntimeError("no such arm")
        return 0.5

    room = in_order.Room(time.time() + 6000.0, 0.0, 2)
    first = in_order.planned(tmp_path, "speech", ["a", "broken"], doing(script, pace=pace), room)
    again = in_order.planned(tmp_path, "speech", ["a", "broken"], doing(script, pace=pace), in_order.Room(0.0, 0.0, 2))
    assert asked == ["speech a", "speech broken"]
    assert first == again
    assert 9_000 < first.steps <= 10_200
    assert first.arms == ["a", "broken"]


def test_what_fails_does_not_keep_the_others_from_their_turn(in_order: Any, script: Any, tmp_path: Path):
    cells = [script("running.cells").Cell.in_files(name, tmp_path, ()) for name in ("done", "wrong", "late", "good")]
    cells[0].result.write_text("{}")
    cells[3].failure.write_text("of the call before")
    done: list[str] = []

    def do(words: Sequence[str]) -> None:
        (name,) = words
        done.append(name)
        if name == "wrong":
            raise ValueError("of no use")
        if name == "good":
            (tmp_path / "good.json").write_text("{}")

    left = in_order.do_in_order(cells, doing(script, do=do), math.inf)
    assert done == ["wrong", "late", "good"]
    assert [one.title for one in left] == ["wrong", "late"]
    assert "of no use" in cells[1].failure.read_text()
    assert not cells[3].failure.exists()
    assert in_order.do_in_order(left, doing(script, do=do), 0.0) == left


def test_what_would_not_end_in_time_is_not_begun(
    in_order: Any, script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    clock, lasts = [1000.0], float(np.random.default_rng().uniform(20.0, 40.0))
    monkeypatch.setattr(in_order.time, "time", lambda: clock[0])
    cells = [script("running.cells").Cell.in_files(f"arm-{seed}", tmp_path, ()) for seed in range(4)]

    def do(words: Sequence[str]) -> None:
        clock[0] += lasts
        (tmp_path / f"{words[0]}.json").write_text("{}")

    left = in_order.do_in_order(cells, doing(script, do=do), 1000.0 + 2.9 * lasts)
    assert [one.title for one in left] == ["arm-2", "arm-3"]
    assert in_order.do_in_order(left, doing(script, do=do), clock[0] + 1.0) == left[1:]  # nobody knows how long
