"""An experiment in cells, several processes at a time on one machine, within a given time; the same command goes on.

A process does one cell after the other, so that what is imported, and the GPU's context, is there for all of them.
"""

from __future__ import annotations

import gc
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Cell:
    """One training.

    Attributes:
        title: For people.
        folder: Where its run is.
        arguments: Of the script, for whoever does it.
    """

    title: str
    folder: Path
    arguments: tuple[str, ...]

    @property
    def result(self) -> Path:
        """The file that is there when it is done."""
        return self.folder / "result.json"

    def read(self) -> dict[str, Any] | None:
        """What came out, if it is done."""
        return json.loads(self.result.read_text()) if self.result.is_file() else None


def work_off(
    script: str,
    cells: Sequence[Cell],
    parallel: int,
    minutes: float,
    finished: Callable[[Cell], str],
    mps: Path | None = None,
) -> None:
    """Run cells, so many at a time, until all are done or the time is over; what is not done can go on later.

    Args:
        script: The file that, called with --serve, does cells: see `serve`.
        cells: In the order in which they are done.
        parallel: How many at a time.
        minutes: How long.
        finished: Told of every cell that has ended; gives a line for people.
        mps: Folder for NVIDIA's MPS, which lets processes use a GPU at the same time; None for turns.
    """
    waiting = [one for one in cells if not one.result.is_file()]
    control = None if mps is None else _begin_sharing(mps)
    began, workers = time.monotonic(), [_Worker(script) for _ in range(min(parallel, len(waiting)))]
    try:
        while (waiting or any(one.cell for one in workers)) and time.monotonic() - began < 60 * minutes:
            for place, worker in enumerate(workers):
                if worker.cell is None and waiting:
                    if worker.is_over:
                        worker.close()
                        workers[place] = worker = _Worker(script)
                    worker.give(waiting.pop(0))
            for worker in _heard(workers):
                one = worker.take()
                said = finished(one) if one.result.is_file() else f"failed; {one.folder}.txt says why"
                print(f"{time.monotonic() - began:4.0f} s  {one.title}: {said}", flush=True)
    finally:
        _stop(workers)
        if control is not None:
            subprocess.run([control], input=b"quit\n", check=False)


class _Worker:
    """A process that does one cell after the other.

    Attributes:
        process: The script with --serve.
        cell: What it does now; None for nothing.
        is_over: Whether it has ended, as it does when a cell failed.
    """

    def __init__(self, script: str) -> None:
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        command, pipe = [sys.executable, script, "--serve"], subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env={**os.environ, **threads})
        self.cell: Cell | None = None
        self.is_over = False

    def give(self, one: Cell) -> None:
        """Have it do a cell."""
        one.folder.parent.mkdir(parents=True, exist_ok=True)
        self.cell = one
        assert self.process.stdin is not None
        line = json.dumps({"arguments": one.arguments, "log": f"{one.folder}.txt"})
        try:
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:  # it died before; `take` will see
            self.is_over = True

    def take(self) -> Cell:
        """The cell that it has ended, one way or the other."""
        assert self.cell is not None
        assert self.process.stdout is not None
        self.is_over = os.read(self.process.stdout.fileno(), 1) == b""
        one, self.cell = self.cell, None
        return one

    def close(self) -> None:
        """Wait for its end, which has been asked for, and close what it was told through."""
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # what it was last told it never read
                pipe.close()


def _heard(workers: Sequence[_Worker]) -> list[_Worker]:
    """Those that have ended their cell, after a moment."""
    pipes = {one.process.stdout: one for one in workers if one.cell is not None and one.process.stdout is not None}
    return [pipes[pipe] for pipe in select.select(list(pipes), [], [], 0.2)[0]]


def _stop(workers: Sequence[_Worker]) -> None:
    for one in workers:
        one.process.send_signal(signal.SIGTERM)  # a run saves itself
    for one in workers:
        one.close()


def serve(do: Callable[[Sequence[str]], None]) -> int:
    """Do cells as `work_off` asks for them, until it asks no more, or one fails; what is said goes into their files.

    Args:
        do: Does the cell of some arguments.
    """
    answers = os.dup(1)
    for line in sys.stdin:
        told = json.loads(line)
        with open(told["log"], "ab") as log:
            for stream in (1, 2):
                os.dup2(log.fileno(), stream)
        try:
            do(told["arguments"])
        except Exception:  # a GPU may be unusable after it: another process goes on
            traceback.print_exc()
            return 1
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        sys.stdout.flush()
        os.write(answers, b".")
    return 0


def _begin_sharing(folder: Path) -> str | None:
    control = shutil.which("nvidia-cuda-mps-control")
    if control is not None:
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"):
            os.environ[name] = str(folder.resolve())
        subprocess.run([control, "-d"], check=True)
    return control


def machine() -> dict[str, Any]:
    """What it ran on."""
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "torch": torch.__version__,
        "cores": os.cpu_count(),
    }


def keep(path: Path, content: Any) -> None:
    """Write JSON at once or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(content, indent=1, default=str))
    beside.replace(path)


def wait(device: torch.device) -> None:
    """Until the GPU is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
