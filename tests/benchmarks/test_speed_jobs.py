"""What the jobs of the benchmark of speed tell of a step, where a GPU is not needed to tell it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


class Machine:
    """A GPU that takes a second for a step, and lets the host wait for the one before when it is given another."""

    def __init__(self) -> None:
        self.is_busy = False
        self.steps = 0

    def step(self) -> None:
        """One step, of which the host does its part."""
        assert not self.is_busy
        self.is_busy = True
        self.steps += 1
        time.sleep(0.002)

    def synchronize(self) -> None:
        """Wait for it."""
        self.is_busy = False


@pytest.fixture
def jobs(module_at: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)  # scripts import each other by name
    return module_at(BENCHMARKS / "speed_jobs.py")


def test_the_host_never_waits_for_the_step_before(jobs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    monkeypatch.setattr(torch.cuda, "synchronize", machine.synchronize)
    assert 2 <= jobs.host_ms(machine.step, 5) < 1000
    assert machine.steps == 5


def test_what_the_host_does_is_told_by_name_and_number(jobs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    x = torch.randn(64, 64)
    found = jobs.parts(lambda: [x @ x for _ in range(7)], 2, torch.profiler.ProfilerActivity.CPU)
    assert {name: count for _, count, name in found}["aten::mm"] == 7
    times = [part[0] for part in found]
    assert times == sorted(times, reverse=True)
