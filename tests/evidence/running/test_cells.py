"""Cells are worked off by few processes, which outlive a cell that is done, and not one that failed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ..conftest import EVIDENCE

# What `serve` says and hears, without the seconds of its imports.
STAND_IN = """
import json, os, signal, sys, time
def stopped(*_):
    open(result + ".state", "w").write("saved")
    os._exit(0)
for line in sys.stdin:
    asked = json.loads(line)
    result, fate = asked["arguments"]
    log = open(asked["log"], "a", buffering=1)
    print("doing", fate, file=log)
    if fate == "fails":
        print("ValueError: no luck", file=log)
        sys.exit(1)
    if fate == "long" and not os.path.exists(result + ".state"):
        signal.signal(signal.SIGTERM, stopped)
        open(result + ".begun", "w")
        time.sleep(60)
    if fate == "slow":
        time.sleep(0.5)
    if fate != "later":
        open(result, "w").write(json.dumps({"process": os.getpid(), "threads": os.environ["OMP_NUM_THREADS"]}))
    os.write(1, b".")
"""


class Experiment:
    """Cells of given fates, the program that does them, and what was told."""

    def __init__(self, folder: Path, module: Any, fates: str) -> None:
        self.module, self.told = module, list[str]()
        self.program = folder / "program.py"
        self.program.write_text(STAND_IN)
        self.cells = [self.cell(folder / "cells" / f"{i}", fate) for i, fate in enumerate(fates.split())]

    def cell(self, place: Path, fate: str) -> Any:
        result, log = place.with_suffix(".json"), place.with_suffix(".txt")
        return self.module.Cell(f"cell {place.name}", result, log, (str(result), fate))

    def work_off(self, parallel: int = 1, minutes: float = 1.0, **how: Any) -> list[str]:
        way = self.module.How(parallel, minutes, **how)
        left = self.module.work_off(str(self.program), self.cells, way, lambda one: self.told.append(one.title) or "ok")
        return [one.title for one in left]

    @property
    def processes(self) -> list[int]:
        return [found["process"] for one in self.cells if (found := one.read()) is not None]


@pytest.fixture
def experiment(script: Any, tmp_path: Path) -> Any:
    return lambda fates: Experiment(tmp_path, script("running.cells"), fates)


def test_one_process_does_many_cells_and_another_goes_on_after_a_failure(
    experiment: Any, capsys: pytest.CaptureFixture[str]
):
    tried = experiment("good good fails good")
    assert tried.work_off() == ["cell 2"]
    assert tried.told == ["cell 0", "cell 1", "cell 3"]
    first, second, third = tried.processes
    assert first == second != third
    assert tried.cells[2].failure.read_text() == "ValueError: no luck\n"
    out = capsys.readouterr().out
    assert "4 of 4 cells are left, 1 at a time" in out
    assert "cell 2: FAILED, ValueError: no luck; " in out
    assert "4/4, " in out
    tried.cells[2] = tried.cell(tried.cells[2].result.with_suffix(""), "good")
    tried.told.clear()
    assert tried.work_off() == []
    assert tried.told == ["cell 2"]
    assert not tried.cells[2].failure.exists()


def test_every_cell_may_have_a_process_of_its_own(experiment: Any):
    tried = experiment("good good good")
    assert tried.work_off(fresh=True, threads=3) == []
    assert len(set(tried.processes)) == 3
    assert tried.cells[0].read()["threads"] == "3"


def test_several_at_a_time_are_several_processes(experiment: Any):
    tried = experiment("slow slow slow slow")
    assert tried.work_off(parallel=2) == []
    assert len(set(tried.processes)) == 2


def test_what_runs_when_the_time_is_over_is_asked_to_stop_and_goes_on_later(
    experiment: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    tried = experiment("good long good")
    begun, real = Path(f"{tried.cells[1].result}.begun"), time.monotonic
    with monkeypatch.context() as patched:  # the time is over once the long one has begun
        patched.setattr(tried.module.time, "monotonic", lambda: real() + (1000 if begun.exists() else 0))
        assert tried.work_off() == ["cell 1", "cell 2"]
    assert Path(f"{tried.cells[1].result}.state").read_text() == "saved"
    assert "cell 1: not done, doing long" in capsys.readouterr().out
    assert tried.work_off() == []
    assert tried.told == ["cell 0", "cell 1", "cell 2"]


def test_what_cannot_go_on_later_may_end(experiment: Any):
    tried = experiment("slow good")
    assert tried.work_off(minutes=0.3 / 60, stop=False) == ["cell 1"]
    assert tried.told == ["cell 0"]


def test_a_cell_that_ends_without_a_result_is_left_and_has_not_failed(
    experiment: Any, capsys: pytest.CaptureFixture[str]
):
    tried = experiment("later good")
    assert tried.work_off() == ["cell 0"]
    assert tried.told == ["cell 1"]
    assert not tried.cells[0].failure.exists()
    assert "cell 0: not done, doing later" in capsys.readouterr().out


def test_without_time_nothing_is_begun_and_what_is_done_needs_no_process(experiment: Any):
    tried = experiment("good")
    assert tried.work_off(minutes=0) == ["cell 0"]
    assert not tried.cells[0].log.exists()
    tried.cells[0].result.parent.mkdir()
    tried.cells[0].result.write_text('{"process": 1}')
    tried.program.unlink()
    assert tried.work_off() == []
    assert tried.told == []


PROGRAM = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, {evidence!r})
from affinear.train import Interrupted
from running.cells import Cell, How, is_worker, serve, work_off
from running.files import keep

def do(told):
    print("doing", told[0])
    if told[1] == "fails":
        raise ValueError("no luck")
    if told[1] == "dies":
        os._exit(3)
    if told[1] == "stops":
        raise Interrupted("it was saved", 15)
    if told[1] == "long":
        Path(told[0] + ".begun").write_text(str(os.getpid()))
        time.sleep(60)
    keep(Path(told[0]), {{"process": os.getpid()}})

if is_worker():
    raise SystemExit(serve(do))
cells = []
for number, fate in enumerate(sys.argv[2:]):
    place = Path(sys.argv[1], str(number))
    cells.append(Cell(fate, place.with_suffix(".json"), place.with_suffix(".txt"), (str(place) + ".json", fate)))
work_off(__file__, cells, How(1, 9), lambda one: str((one.read() or {{}})["process"]))
"""


def started(folder: Path, *fates: str) -> subprocess.Popen[str]:
    program = folder / "program.py"
    program.write_text(PROGRAM.format(evidence=str(EVIDENCE)))
    command = [sys.executable, str(program), str(folder / "cells"), *fates]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.exhaustive
def test_a_script_serves_until_a_cell_fails_dies_or_is_stopped(tmp_path: Path):
    fates = ("good", "good", "fails", "good", "dies", "good", "stops", "good")
    out = started(tmp_path, *fates).communicate(timeout=120)[0]
    results = [tmp_path / "cells" / f"{number}.json" for number in range(len(fates))]
    assert [one.is_file() for one in results] == [fate == "good" for fate in fates]
    done = [json.loads(one.read_text())["process"] for one in results if one.is_file()]
    assert done[0] == done[1]
    assert len(set(done)) == 4
    assert "fails: FAILED, ValueError: no luck" in out
    assert "Traceback" in (tmp_path / "cells" / "2.txt").read_text()
    assert (tmp_path / "cells" / "6.txt").read_text().endswith("it was saved\n")


@pytest.mark.exhaustive
def test_whoever_ends_the_experiment_ends_its_processes(tmp_path: Path):
    leader, begun = started(tmp_path, "long"), tmp_path / "cells" / "0.json.begun"
    patience = time.monotonic() + 60
    while not (begun.is_file() and begun.read_text()) and time.monotonic() < patience:
        time.sleep(0.1)
    leader.send_signal(signal.SIGTERM)
    leader.communicate(timeout=30)
    assert leader.returncode == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(begun.read_text()), 0)
