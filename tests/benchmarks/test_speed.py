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
    worker = speed.Worker(["job"], process)
    for line in ("building\n", json.dumps({"ready": "job"}) + "\n"):
        worker.said.put(line)
    assert worker.hear(time.monotonic() - 1) == {"ready": "job"}
    assert worker.hear(time.monotonic() - 1) is None
    process.wait()


JOBS = """
import os, time

def job(name, seconds):
    def begin():
        time.sleep(seconds)
        def measure():
            yield {"what": name, "when": time.monotonic(), "process": os.getpid()}
            assert name != "bad"
        return measure
    return begin

def jobs():
    waits = {"quick 1": 0, "quick 2": 0, "bad": 0, "late": 0.8, "slow": 5, "never": 600, "profile quick 1": 0}
    found = {name: job(name.split()[0], seconds) for name, seconds in waits.items()}
    return {**found, "broken": lambda: 1 / 0}
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
    threading.Timer(2.5, free.touch).start()
    told = f"--kind {kind} --wait {free} --seconds 8 --out {out} --only never slow".split()
    monkeypatch.setattr(sys, "argv", ["speed.py", *told, "quick 2|quick 1"])
    speed.main()
    report = json.loads(out.read_text())
    assert [row["job"] for row in report["rows"]] == ["quick 1", "quick 2", "slow"]
    assert min(row["when"] for row in report["rows"]) > began + 2.5
    assert report["jobs"]["never"] == "not ready"
    assert report["seconds"] < 60


def test_jobs_come_in_the_order_in_which_they_are_asked_for(speed: Any) -> None:
    jobs = dict.fromkeys(("a 1", "b 1", "a 2", "c"), "kind")
    assert list(speed.named(jobs, ["c", "b|a"], ["a 2"])) == ["c", "a 1", "b 1"]
    assert list(speed.named(jobs, [""], [])) == list(jobs)


def rows(speed: Any, monkeypatch: pytest.MonkeyPatch, told: list[str]) -> list[dict[str, Any]]:
    """What a run reports."""
    monkeypatch.setattr(sys, "argv", ["speed.py", *told])
    speed.main()
    return json.loads(Path(told[told.index("--out") + 1]).read_text())["rows"]


def test_jobs_share_a_process_which_outlives_those_that_fail(
    speed: Any, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = ["--kind", kind, "--out", str(tmp_path / "speed.json"), "--only", "broken", "bad", "quick 1", "profile"]
    found = rows(speed, monkeypatch, [*told, "--share", "broken|bad|quick 1"])
    assert [row["job"] for row in found] == ["bad", "quick 1", "profile quick 1"]
    assert len({row["process"] for row in found}) == 1


def test_a_shared_process_begins_nothing_that_would_not_be_ready_in_time(
    speed: Any, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = tmp_path / "free"
    threading.Timer(4, free.touch).start()
    told = ["--kind", kind, "--out", str(tmp_path / "speed.json"), "--only", "late", "never", "--share", "late|never"]
    found = rows(speed, monkeypatch, [*told, "--wait", str(free), "--ready", "1", "--seconds", "2"])
    assert [row["job"] for row in found] == ["late"]


def test_what_was_put_off_gets_ready_when_all_else_is_measured(
    speed: Any, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = tmp_path / "free"
    threading.Timer(4, free.touch).start()
    told = ["--kind", kind, "--out", str(tmp_path / "speed.json"), "--only", "late", "broken", "quick 1", "bad"]
    told += ["--share", "late|broken|quick|bad"]
    found = rows(speed, monkeypatch, [*told, "--wait", str(free), "--ready", "1", "--seconds", "20"])
    assert [row["job"] for row in found] == ["late", "quick 1", "bad"]
    assert len({row["process"] for row in found}) == 1


def test_a_profile_goes_to_the_process_of_its_job(speed: Any) -> None:
    jobs = dict.fromkeys(("a 1", "b 1", "a 2", "profile b 1"), "kind")
    assert list(map(list, speed.shared(jobs, []))) == [["a 1"], ["b 1", "profile b 1"], ["a 2"]]
    assert list(map(list, speed.shared(jobs, ["a|b"]))) == [list(jobs)]
