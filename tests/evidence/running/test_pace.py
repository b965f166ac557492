"""The number of steps that fit the time, which all cells agree on."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest


@pytest.fixture
def pace(script: Any) -> Any:
    """Time for two rounds in 200 seconds, but for what is told."""
    usual = {"crowd": 1, "rounds": 2, "until": time.time() + 200, "judging": 10.0}
    return lambda folder, **given: script("running.pace").Pace(folder, **{**usual, **given})


def test_the_slowest_decides_for_all(tmp_path: Path, pace: Any):
    rates = np.random.default_rng().uniform(0.05, 0.1, 3).tolist()
    three = pace(tmp_path, crowd=3)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda rate: three.steps(f"cell {rate}", 10**6, lambda: rate), rates))
    assert len(set(found)) == 1
    fits = (0.85 * 200 / 2 - 10) / max(rates)
    assert fits - 60 <= found[0] <= fits


def test_later_cells_do_what_was_decided_and_measure_nothing(tmp_path: Path, pace: Any):
    first = pace(tmp_path).steps("first", 10**6, lambda: 0.01)
    assert pace(tmp_path, until=time.time() + 9000).steps("second", 10**6, lambda: 1 / 0) == first


def test_there_are_no_more_steps_than_wanted_and_no_fewer_than_sense_makes(tmp_path: Path, pace: Any):
    assert pace(tmp_path / "many").steps("cell", 300, lambda: 1e-6) == 300
    assert pace(tmp_path / "few", fewest=20).steps("cell", 300, lambda: 1e6) == 20


def test_steps_that_build_kernels_are_not_timed(script: Any):
    calls, running = list[str](), script("running.pace")
    assert running.timed(lambda: calls.append("step"), lambda: calls.append("finish")) >= 0
    assert calls == ["step"] * running.WARM + ["finish"] + ["step"] * running.TIMED + ["finish"]
