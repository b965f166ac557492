"""Steps fit into the time; they are decided once, by one process or, of several, by whoever comes last."""

from __future__ import annotations

import json
import math
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest


@pytest.fixture
def pacing(script: Any) -> Any:
    return script("running.pacing")


def plan(pacing: Any, **changes: Any) -> Any:
    told = {
        "trainings": {"text a": 3, "text b": 1},
        "shares": {"text": 1.0},
        "until": time.time() + 100,
        "crowd": 2,
        "beside": 1.0,
    }
    return pacing.Pacing(**{**told, **changes})


def test_all_trainings_fit_into_the_time(pacing: Any):
    one = plan(pacing, until=100.0)
    steps = one.steps({"text a": 0.1, "text b": 0.5}, now=0.0)["text"]
    taken = steps * (3 * 0.1 + 0.5) + 4 * 1.0
    assert (pacing.MARGIN - 0.01) * 200 < taken <= pacing.MARGIN * 200


def test_kinds_share_the_time(pacing: Any):
    one = plan(
        pacing, trainings={"text a": 1, "image a": 1}, shares={"text": 3.0, "image": 1.0}, beside=0.0, until=40.0
    )
    steps = one.steps({"text a": 0.1, "image a": 0.1}, now=0.0)
    assert steps["text"] == pytest.approx(3 * steps["image"], abs=3)


def test_what_was_not_measured_counts_nothing_and_no_time_is_two_steps(pacing: Any):
    one = plan(pacing, until=0.0)
    assert one.steps({"text a": 0.1}, now=10.0) == {"text": 2}
    assert one.steps({}, now=0.0) == {"text": 2}


def test_processes_measure_each_thing_once_and_agree(pacing: Any, tmp_path: Path):
    folder, seen, found = tmp_path / "pace", list[str](), list[dict[str, int]]()
    pacing.begin(folder, plan(pacing))

    def measure(name: str) -> float:
        seen.append(name)
        time.sleep(0.1)
        return 0.1

    crowd = [threading.Thread(target=lambda: found.append(pacing.agreed(folder, measure))) for _ in range(3)]
    for one in crowd:
        one.start()
    for one in crowd:
        one.join()
    assert sorted(seen) == ["text a", "text b"]
    assert len(found) == 3
    assert found[0] == found[1] == found[2]
    assert found[0]["text"] > 100


def test_what_cannot_be_measured_does_not_hold_the_others_up(pacing: Any, tmp_path: Path):
    folder = tmp_path / "pace"
    pacing.begin(folder, plan(pacing))

    def measure(name: str) -> float:
        if name == "text b":
            raise RuntimeError("no such kernel")
        return 0.1

    assert pacing.agreed(folder, measure)["text"] > 100


def test_a_later_call_keeps_what_was_decided(pacing: Any, tmp_path: Path):
    folder = tmp_path / "pace"
    pacing.begin(folder, plan(pacing))
    (folder / "text a.claim").touch()  # by a call that was stopped
    pacing.begin(folder, plan(pacing))
    assert not (folder / "text a.claim").exists()
    decided = pacing.agreed(folder, lambda name: 0.1)
    pacing.begin(folder, plan(pacing, crowd=9))
    assert pacing.agreed(folder, lambda name: 9.9) == decided == json.loads((folder / "steps.json").read_text())


def test_nobody_waits_for_ever(pacing: Any, tmp_path: Path):
    folder = tmp_path / "pace"
    pacing.begin(folder, plan(pacing))
    (folder / "text a.claim").touch()  # of a process that died
    assert pacing.agreed(folder, lambda name: 0.1, patience=0.5)["text"] > 100


def test_all_steps_and_what_is_beside_them_end_in_time(pacing: Any):
    random = np.random.default_rng()
    paces = {f"arm {i}": float(random.uniform(0.01, 0.1)) for i in range(random.integers(2, 8))}
    room = pacing.Room(until=1000.0, beside=5.0, least=2)
    plan = room.plan(paces, now=400.0)
    assert plan.arms == list(paces)
    took = sum(5.0 + plan.steps * pace for pace in paces.values())
    assert took <= pacing.MARGIN * 600.0 < took + sum(paces.values())


def test_arms_at_the_end_are_left_out_for_steps_but_never_the_first_two(pacing: Any):
    paces = {"a": 0.1, "b": 0.1, "c": 0.2, "d": 0.2}
    steps = pacing.MARGIN * 100.0 / 0.4  # of the first three
    room = pacing.Room(until=100.0, beside=0.0, least=int(steps))
    assert room.plan(paces, now=0.0) == pacing.Plan(int(steps), ["a", "b", "c"])
    assert pacing.Room(100.0, 0.0, 10_000).plan(paces, now=0.0).arms == ["a", "b"]
    assert pacing.Room(0.0, 0.0, 10_000).plan(paces, now=5.0) == pacing.Plan(2, ["a", "b"])


def test_what_cannot_be_timed_takes_no_time_and_has_its_turn(pacing: Any):
    room = pacing.Room(until=100.0, beside=0.0, least=2)
    plan = room.plan({"a": math.inf, "b": 0.5}, now=0.0)
    assert plan == pacing.Plan(math.floor(pacing.MARGIN * 100.0 / 0.5), ["a", "b"])
    assert room.plan({"a": math.inf}, now=0.0).steps == 2


def test_what_one_process_planned_stands(pacing: Any, tmp_path: Path):
    asked: list[str] = []

    def measure(arm: str) -> float:
        asked.append(arm)
        if arm == "broken":
            raise RuntimeError("no such arm")
        return 0.5

    first = pacing.planned(tmp_path, ["a", "broken"], pacing.Room(time.time() + 6000.0, 0.0, 2), measure)
    again = pacing.planned(tmp_path, ["a", "broken"], pacing.Room(0.0, 0.0, 2), measure)
    assert asked == ["a", "broken"]
    assert first == again
    assert 9_000 < first.steps <= 10_200
    assert first.arms == ["a", "broken"]
