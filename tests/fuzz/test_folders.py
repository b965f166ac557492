"""Run folders, damaged, killed and fought over: the same bytes again, or a sentence; never others in silence."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzzing import Tally, changed, damaged, for_a_while

from affinear.compare.cells import Outcome
from affinear.train import checkpoint, folder
from affinear.train.before import upgraded
from affinear.train.checkpoint import Position, Snapshot
from affinear.train.faults import OtherRun, RunError
from affinear.train.ownership import owned
from affinear.train.records import Record, read_log

RECORD = Record(1, 3, 2.0, 1e-3, 1.5, 100.0, {"loss": 2.1, "top1": 0.5})
RUN: dict[str, Any] = {"model": "a", "data": "b", "facts": {"class_names": ["a"]}, "recipe": {"lr": 0.1, "seed": 1}}
TWO_OWNERS = 1  # how a process ends that was not alone


def snapshot_of(step: int) -> Snapshot:
    tensors = {f"layer.{n}": torch.full((7, n + 1), float(step)) for n in range(5)}
    rest = {"optimizer": {"state": {0: {"step": torch.tensor(float(step))}}, "param_groups": []}, "scaler": None}
    return Snapshot(Position(step, (RECORD,), 0.5, 1), tensors, tensors, rest)


def is_of(taken: Snapshot, step: int) -> bool:
    """Whether all of a snapshot is what was saved after this step."""
    wanted = snapshot_of(step)
    return (
        taken.position == wanted.position
        and all(torch.equal(taken.weights[name], tensor) for name, tensor in wanted.weights.items())
        and taken.average is not None
        and all(torch.equal(taken.average[name], tensor) for name, tensor in wanted.weights.items())
        and taken.rest["optimizer"]["state"][0]["step"] == step
    )


def test_damaged_checkpoints(tally: Tally, draw: random.Random, tmp_path: Path):
    (tmp_path / "a").mkdir()
    whole = checkpoint.save(tmp_path / "a", snapshot_of(5))
    for number in for_a_while():
        place = tmp_path / "b" / whole.name
        shutil.copytree(whole, place)
        victim = draw.choice(sorted(place.iterdir()))
        kind = draw.randrange(4)
        if kind == 0:
            victim.unlink()
        elif kind == 1 and victim.suffix == ".json":
            victim.write_text(json.dumps(changed(draw, json.loads(victim.read_text()))))
        elif kind == 2:
            other = draw.choice(sorted(place.iterdir()))
            victim.write_bytes(other.read_bytes())
        else:
            victim.write_bytes(damaged(draw, victim.read_bytes()))
        found, taken = tally.attempt(f"{victim.name} {number}", lambda place=place: checkpoint.load(place), RunError)
        if found and not is_of(taken, 5):
            tally.bytes_lost.append(f"{victim.name}: another state came back in silence")
        shutil.rmtree(tmp_path / "b")
    tally.check()


def test_damaged_descriptions(tally: Tally, draw: random.Random, tmp_path: Path):
    outcome = json.loads(json.dumps(asdict(Outcome("mala", 0, value=0.5, curve=(RECORD,)))))
    for _ in for_a_while(4):
        text = json.dumps(changed(draw, RUN))
        (tmp_path / folder.RUN).write_bytes(damaged(draw, text.encode()) if draw.random() < 0.5 else text.encode())
        tally.attempt(f"run.json {text}", lambda: folder.differences(upgraded(folder.read(tmp_path)), RUN), OtherRun)
        told = json.dumps(changed(draw, outcome))
        (tmp_path / "cell.json").write_text(told)
        tally.attempt(f"cell.json {told}", lambda: Outcome.read(tmp_path / "cell.json"))
        (tmp_path / "log.jsonl").write_bytes(damaged(draw, b'{"kind": "step", "step": 3, "loss": 1}\n' * 5))
        tally.attempt("log.jsonl", lambda: read_log(tmp_path))
    tally.check()


@pytest.mark.filterwarnings("ignore")  # Python's about forks beside threads
def test_kills_lose_nothing(tally: Tally, draw: random.Random, tmp_path: Path):
    checkpoint.save(tmp_path, snapshot_of(1))
    step = 1
    for number in for_a_while():
        child = os.fork()
        if child == 0:
            for later in range(step + 1, step + 1000):
                checkpoint.save(tmp_path, snapshot_of(later))
            os._exit(0)
        time.sleep(draw.uniform(0, 0.08))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found = checkpoint.latest(tmp_path)
        if found is None:
            tally.bytes_lost.append(f"kill {number}: no checkpoint is left")
            break
        loaded, taken = tally.attempt(f"kill {number}", lambda found=found: checkpoint.load(found))
        if loaded and not (taken.position.step >= step and is_of(taken, taken.position.step)):
            tally.bytes_lost.append(f"kill {number}: step {taken.position.step} is not what was saved")
        step = taken.position.step if loaded else step
    tally.check()


@pytest.mark.filterwarnings("ignore")
def test_a_folder_never_has_two_owners(tally: Tally, draw: random.Random, tmp_path: Path):
    place, alone = tmp_path / "run", tmp_path / "alone"
    for number in for_a_while(5, least=3):
        children = [_contender(place, alone) for _ in range(3)]
        tally.tries += 1
        if draw.random() < 0.3:
            time.sleep(draw.uniform(0, 0.02))
            os.kill(children[0], signal.SIGKILL)
        for child in children:
            status = os.waitpid(child, 0)[1]
            if os.WIFEXITED(status) and os.WEXITSTATUS(status) == TWO_OWNERS:
                tally.bytes_lost.append(f"round {number}: two owners at once")
        tally.failures += [f"round {number}: {path.read_text()}" for path in tmp_path.glob("*.txt")]
        shutil.rmtree(alone, ignore_errors=True)
    tally.check()


def _lives(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _contender(place: Path, alone: Path) -> int:
    """A process that asks for the folder again and again, tells if it ever is not alone in it, and what goes wrong."""
    child = os.fork()
    if child:
        return child
    code = 0
    for _ in range(20):
        try:
            with owned(place):
                mine = alone / str(os.getpid())
                alone.mkdir(exist_ok=True)
                mine.touch()
                others = [path for path in alone.iterdir() if path != mine and _lives(path.name)]
                code |= TWO_OWNERS if any(path.exists() for path in others) else 0
                mine.unlink()
        except OtherRun:
            continue
        except BaseException:
            place.with_name(f"{os.getpid()}.txt").write_text(traceback.format_exc())
    os._exit(code)
