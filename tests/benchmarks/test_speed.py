"""The processes of the benchmark of speed: what they say is heard in order, and in time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
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


JOBS = """
import time

def job(name, seconds):
    def begin():
        time.sleep(seconds)
        def measure():
            yield {"what": name, "when": time.monotonic()}
        return measure
    return begin

def jobs():
    waits = {"quick 1": 0, "quick 2": 0, "slow": 1.6, "never": 600}
    return {name: job(name.split()[0], seconds) for name, seconds in waits.items()}
"""


@pytest.fixture
def kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module of jobs, some of which are not ready for long."""
    (tmp_path / "some_jobs.py").write_text(JOBS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), str(BENCHMARKS))))
    monkeypatch.syspath_prepend(tmp_path)
    yield "some_jobs"
    sys.modules.pop("some_jobs", None)


def test_jobs_are_measured_when_the_file_is_there_and_none_waits_for_one_that_is_not_ready(
    speed: Any, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, free = tmp_path / "speed.json", tmp_path / "free"
    began = time.monotonic()
    threading.Timer(0.8, free.touch).start()
    told = f"--kind {kind} --wait {free} --seconds 4 --out {out} --only never slow".split()
    monkeypatch.setattr(sys, "argv", ["speed.py", *told, "quick 2|quick 1"])
    speed.main()
    report = json.loads(out.read_text())
    assert [row["job"] for row in report["rows"]] == ["quick 1", "quick 2", "slow"]
    assert min(row["when"] for row in report["rows"]) > began + 0.8
    assert report["jobs"]["never"] == "not ready"
    assert report["seconds"] < 30


def test_jobs_come_in_the_order_in_which_they_are_asked_for(speed: Any) -> None:
    jobs = dict.fromkeys(("a 1", "b 1", "a 2", "c"), "kind")
    assert list(speed.named(jobs, ["c", "b|a"], ["a 2"])) == ["c", "a 1", "b 1"]
    assert list(speed.named(jobs, [""], [])) == list(jobs)
