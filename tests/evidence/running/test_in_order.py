"""Trainings in their order: what fails keeps nothing else from its turn, and what would end late is not begun."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest


@pytest.fixture
def in_order(script: Any) -> Any:
    return script("running.in_order")


def test_what_fails_does_not_keep_the_others_from_their_turn(
    in_order: Any, script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
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

    left = in_order.do_in_order(cells, in_order.Doing(do, lambda cell: "told"), math.inf)
    assert done == ["wrong", "late", "good"]
    assert [one.title for one in left] == ["wrong", "late"]
    assert cells[1].failure.read_text() == "ValueError: of no use\n"
    assert "wrong: FAILED, ValueError: of no use" in capsys.readouterr().out
    assert not cells[3].failure.exists()
    assert in_order.do_in_order(left, in_order.Doing(do, lambda cell: "told"), 0.0) == left


def test_what_would_not_end_in_time_is_not_begun(
    in_order: Any, script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    clock, lasts = [1000.0], float(np.random.default_rng().uniform(20.0, 40.0))
    monkeypatch.setattr(in_order.time, "time", lambda: clock[0])
    cells = [script("running.cells").Cell.in_files(f"arm-{seed}", tmp_path, ()) for seed in range(4)]

    def do(words: Sequence[str]) -> None:
        clock[0] += lasts
        (tmp_path / f"{words[0]}.json").write_text("{}")

    doing = in_order.Doing(do, lambda cell: "told")
    left = in_order.do_in_order(cells, doing, 1000.0 + 2.9 * lasts)
    assert [one.title for one in left] == ["arm-2", "arm-3"]
    assert in_order.do_in_order(left, doing, clock[0] + 1.0) == left[1:]  # nobody knows how long
