"""The processes of the benchmark of speed: what they say is heard in order, and in time."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def speed(module_at: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)  # scripts import each other by name
    return module_at(BENCHMARKS / "speed.py")


def test_what_was_said_in_time_is_heard_when_another_took_all_of_it(speed: Any) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""], text=True)
    worker = speed.Worker("job", process)
    for line in ("building\n", json.dumps({"ready": "job"}) + "\n"):
        worker.said.put(line)
    assert worker.hear(time.monotonic() - 1) == {"ready": "job"}
    assert worker.hear(time.monotonic() - 1) is None
    process.wait()
