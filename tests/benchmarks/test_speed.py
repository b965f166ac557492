"""The processes of the benchmark of speed: what they say is heard in order, and in time."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts import each other by name."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")


def test_what_was_said_in_time_is_heard_when_another_took_all_of_it():
    from speed import Worker

    process = subprocess.Popen([sys.executable, "-c", ""], text=True)
    worker = Worker("job", process)
    for line in ("building\n", json.dumps({"ready": "job"}) + "\n"):
        worker.said.put(line)
    assert worker.hear(time.monotonic() - 1) == {"ready": "job"}
    assert worker.hear(time.monotonic() - 1) is None
    process.wait()
