"""An experiment in cells, shared out among processes that do one after the other, within a given time.

A process imports, opens data and has the GPU's context once for all its cells. Results are files; the same command goes
on with those that are not there.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from affinear.train import Interrupted
from running.ending import orderly
from running.files import write
from running.sharing import sharing

SERVE = "--serve"
GRACE = 25.0  # seconds that a process has for saving itself


@dataclass(frozen=True)
class Cell:
    """One training.

    Attributes:
        title: For people.
        result: The file that is there when it is done.
        log: What is said meanwhile, of all tries.
        arguments: For whoever does it.
    """

    title: str
    result: Path
    log: Path
    arguments: tuple[str, ...]

    @classmethod
    def in_folder(cls, title: str, folder: Path, arguments: Sequence[str]) -> Cell:
        """One that has a folder, with its result there and its log beside it."""
        return cls(title, folder / "result.json", folder.with_name(f"{folder.name}.txt"), tuple(arguments))

    @classmethod
    def in_files(cls, name: str, folder: Path, arguments: Sequence[str]) -> Cell:
        """One that has two files in a folder of all, and is asked for by its name, behind the arguments."""
        return cls(name, folder / f"{name}.json", folder / f"{name}.log", (*arguments, name))

    @property
    def is_done(self) -> bool:
        """Whether the result is there."""
        return self.result.is_file()

    @property
    def failure(self) -> Path:
        """The file beside the result that says why there is none."""
        return self.result.with_name(f"{self.result.name}.failed")

    def read(self) -> dict[str, Any] | None:
        """What came out, if it is done."""
        return json.loads(self.result.read_text(encoding="utf-8")) if self.is_done else None

    def last_line(self) -> str:
        """What was said last."""
        lines = self.log.read_text(errors="replace").strip().splitlines() if self.log.is_file() else []
        return lines[-1][:300] if lines else "nothing was said"


def results(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """What came out of those that are done."""
    return [found for one in cells if (found := one.read()) is not None]


@dataclass(frozen=True)
class How:
    """How cells are worked off.

    Attributes:
        parallel: How many at a time.
        minutes: How long. Nothing new is begun after that.
        stop: Whether what is running then is asked to stop by SIGTERM, as a run of the engine saves itself and goes on
            later; or else ends in its own time.
        fresh: Whether every cell has a process of its own, as one that compiles should: what was compiled for one
            network is in the way of the next.
        threads: Of a process.
        mps: Folder for NVIDIA's MPS; None to do without.
    """

    parallel: int
    minutes: float
    stop: bool = True
    fresh: bool = False
    threads: int = 1
    mps: Path | None = None


def work_off(script: str, cells: Sequence[Cell], how: How, told: Callable[[Cell], str]) -> list[Cell]:
    """Do all cells that are not done, in their order, and tell of each; give those that are left.

    Args:
        script: The file that, called with `SERVE` alone, does cells: see `serve`.
        cells: All of them.
        how: At what pace, and for how long.
        told: A line about a cell that is done.
    """
    waiting = [one for one in cells if not one.is_done]
    print(f"{len(waiting)} of {len(cells)} cells are left, {how.parallel} at a time", flush=True)
    for one in waiting:
        one.failure.unlink(missing_ok=True)
    until, tally = time.monotonic() + 60 * how.minutes, _Tally(len(waiting), told)
    with sharing(how.mps), orderly(), _crew(script, min(how.parallel, len(waiting)), how) as crew:
        while True:
            late = time.monotonic() >= until
            if (late and how.stop) or not (crew.busy or (waiting and not late)):
                break
            while waiting and not late and crew.has_room:
                crew.give(waiting.pop(0))
            for one, failed in crew.heard():
                tally.tell(one, failed)
    for one in crew.stopped:
        tally.tell(one, failed=False)
    return [one for one in cells if not one.is_done]


class _Tally:
    """Says what has ended, how fast it goes, and how long it takes at that rate."""

    def __init__(self, total: int, told: Callable[[Cell], str]) -> None:
        self.total, self.told, self.ended, self.began = total, told, 0, time.monotonic()

    def tell(self, one: Cell, failed: bool) -> None:
        """A line about a cell that has ended, or was stopped."""
        if one.is_done:
            said = self.told(one)
        elif failed:
            write(one.failure, one.last_line() + "\n")
            said = f"FAILED, {one.last_line()}; {one.log} says more"
        else:
            said = f"not done, {one.last_line()}"
        self.ended += one.is_done or failed
        passed = time.monotonic() - self.began
        left = f"{passed / self.ended * (self.total - self.ended):.0f} s to go" if self.ended else "so far"
        print(f"{self.ended}/{self.total}, {passed:.0f} s, {left}: {one.title}: {said}", flush=True)


class _Crew:
    """Processes, at most so many, each with a cell or waiting for one.

    Attributes:
        stopped: What was being done when all were stopped.
    """

    def __init__(self, script: str, most: int, how: How) -> None:
        self.script, self.most, self.how = script, most, how
        self.workers: list[_Worker] = []
        self.stopped: list[Cell] = []

    @property
    def busy(self) -> bool:
        """Whether something is being done."""
        return any(one.cell for one in self.workers)

    @property
    def has_room(self) -> bool:
        """Whether one more could be done at the same time."""
        return sum(one.cell is not None for one in self.workers) < self.most

    def give(self, cell: Cell) -> None:
        """Have somebody do a cell."""
        idle = next((one for one in self.workers if one.cell is None), None)
        if idle is None:
            idle = _Worker(self.script, self.how.threads)
            self.workers.append(idle)
        idle.give(cell)

    def heard(self) -> list[tuple[Cell, bool]]:
        """What has ended after a moment, and whether it failed; a process that has ended, too, is let go."""
        pipes = {one.answers: one for one in self.workers if one.cell is not None}
        ready = {pipes[pipe] for pipe in select.select(list(pipes), [], [], 0.2)[0]}
        ended: list[tuple[Cell, bool]] = []
        for worker in [one for one in self.workers if one in ready or (one.cell and one.process.poll() is not None)]:
            cell, is_over = worker.take()
            ended.append((cell, is_over))
            if is_over or self.how.fresh:
                self.workers.remove(worker)
                worker.close()
        return ended

    def stop(self) -> None:
        """Ask all to stop, and wait until they have: see `ending` for why nobody is killed before it had time to."""
        self.stopped = [one.cell for one in self.workers if one.cell is not None]
        for one in self.workers:
            one.process.send_signal(signal.SIGTERM)
        until = time.monotonic() + GRACE
        for one in self.workers:
            one.close(until - time.monotonic())


@contextmanager
def _crew(script: str, most: int, how: How) -> Generator[_Crew, None, None]:
    crew = _Crew(script, most, how)
    try:
        yield crew
    finally:
        crew.stop()


class _Worker:
    """A process that does one cell after the other.

    Attributes:
        process: The script with `SERVE`.
        answers: Where it says that it has done a cell.
        cell: What it does now; None for nothing.
    """

    def __init__(self, script: str, threads: int) -> None:
        count = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
        environment = {**os.environ, **count, "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
        command, pipe = [sys.executable, script, SERVE], subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.questions, self.answers = self.process.stdin, self.process.stdout
        self.cell: Cell | None = None

    def give(self, cell: Cell) -> None:
        """Have it do a cell."""
        cell.log.parent.mkdir(parents=True, exist_ok=True)
        self.cell = cell
        line = json.dumps({"arguments": cell.arguments, "log": str(cell.log)})
        with suppress(BrokenPipeError):  # it has died: `take` will see
            self.questions.write(line.encode() + b"\n")
            self.questions.flush()

    def take(self) -> tuple[Cell, bool]:
        """The cell that has ended, and whether the process has, too, as it does when a cell fails."""
        assert self.cell is not None
        readable = select.select([self.answers], [], [], 0)[0]
        is_over = not readable or os.read(self.answers.fileno(), 1) == b""
        cell, self.cell = self.cell, None
        return cell, is_over

    def close(self, patience: float = GRACE) -> None:
        """Ask it no more, and wait for its end, so many seconds."""
        with suppress(BrokenPipeError):  # what it was last told it never read
            self.questions.close()
        try:
            self.process.wait(timeout=max(0.0, patience))
        except subprocess.TimeoutExpired:  # it does not listen, and the GPU is needed
            self.process.kill()
            self.process.wait()
        self.answers.close()


def is_worker() -> bool:
    """Whether this process was started by `work_off`, and is to `serve`."""
    return sys.argv[1:] == [SERVE]


def serve(do: Callable[[Sequence[str]], None]) -> int:
    """Do cells as `work_off` asks for them, until it asks no more, or one fails; what is said goes into their logs.

    Args:
        do: Does the cell of some arguments. If it ends without a result, the cell goes on another time.
    """
    with orderly():
        return _served(do)


def _served(do: Callable[[Sequence[str]], None]) -> int:
    answers = os.dup(1)
    for line in sys.stdin:
        asked = json.loads(line)
        with open(asked["log"], "ab") as log:
            for stream in (1, 2):
                os.dup2(log.fileno(), stream)
        try:
            do(asked["arguments"])
        except Interrupted as error:
            print(error, flush=True)
            return 0
        except Exception:  # a GPU may be unusable after it: another process goes on
            traceback.print_exc()
            return 1
        tidy()
        os.write(answers, b".")
    return 0


def tidy() -> None:
    """Give the room of a cell back; its memory does not count for the next."""
    sys.stdout.flush()
    gc.collect()  # a network holds itself in circles
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
