"""Cells in processes of their own: several at a time, each with its own memory, all stopped and saved together."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from ..train.faults import Interrupted
from ..train.records import Record
from .cells import Cell, Outcome, run_cell

MESSAGES = "messages.txt"
PATIENCE = 60.0  # seconds in which a cell that is told to stop may finish its step and save
# Imported once, by the process that all others are forked from.
WARM = (
    "affinear.compare.cells",
    "affinear.tasks.classify",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "sklearn.datasets",
    "torch.utils.tensorboard",
)

OnEpoch = Callable[[Cell, Record], None]
OnOutcome = Callable[[Outcome], None]


@dataclass
class Worker:
    """A process that works on a cell, and the end of the pipe where it tells of it."""

    cell: Cell
    process: BaseProcess
    pipe: Connection
    outcome: Outcome | None = None


def run_cells(
    cells: Iterable[Cell],
    jobs: int,
    on_start: Callable[[Cell], None],
    on_epoch: OnEpoch,
    on_outcome: OnOutcome,
    seconds: float | None = None,
) -> bool:
    """Work on cells, so many at a time.

    Args:
        cells: In the order in which they are begun.
        jobs: Processes at a time.
        on_start: Hears of every cell that is begun.
        on_epoch: Hears of every epoch.
        on_outcome: Hears of every cell that is through.
        seconds: After so many all is saved and stopped.

    Returns:
        Whether all cells are through; False if Ctrl-C, SIGTERM or the time stopped them, each saved.
    """
    waiting, running, began = list(cells), list[Worker](), time.monotonic()
    context = _context()
    with _termination_as_interrupt():
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    on_start(waiting[0])
                    running.append(_begin(context, waiting.pop(0)))
                _listen(running, on_epoch, on_outcome)
                running = [worker for worker in running if worker.outcome is None]
                if seconds is not None and time.monotonic() - began > seconds:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            _stop(running)
            return False
    return True


def _context() -> Any:
    # Forked from a process that has imported everything a cell begins at once; but a GPU does not survive a fork.
    methods = multiprocessing.get_all_start_methods()
    if torch.cuda.is_available() or "forkserver" not in methods:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(WARM))
    return context


def _begin(context: Any, cell: Cell) -> Worker:
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(cell, theirs), name=cell.title, daemon=False)
    with _deaf_to_ctrl_c():
        process.start()
    theirs.close()
    return Worker(cell, process, ours)


def work(cell: Cell, pipe: Connection) -> None:
    """What the process of a cell does; whatever libraries print goes into a file of the cell."""
    _quiet(cell.folder)
    if cell.threads:
        torch.set_num_threads(cell.threads)
    try:
        pipe.send(run_cell(cell, pipe.send))
    except (Interrupted, KeyboardInterrupt):
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(1)  # nobody is left to listen; the last epoch is saved


def _quiet(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    file = os.open(folder / MESSAGES, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def _listen(running: list[Worker], on_epoch: OnEpoch, on_outcome: OnOutcome) -> None:
    """Take what the workers tell within a second."""
    ready = set(wait([worker.pipe for worker in running], timeout=1.0))
    for worker in running:
        if worker.pipe not in ready:
            continue
        try:
            told = worker.pipe.recv()
        except EOFError:
            worker.process.join()
            code = worker.process.exitcode
            if code == 130:
                raise KeyboardInterrupt from None  # the terminal's Ctrl-C reached it before us
            said = f"its process ended with code {code}" + ("; perhaps memory ran out" if code == -9 else "")
            told = Outcome(worker.cell.variant, worker.cell.seed, error=f"{said}; see {worker.cell.folder / MESSAGES}")
        if isinstance(told, Outcome):
            worker.process.join()
            worker.outcome = told
            on_outcome(told)
        else:
            on_epoch(worker.cell, told)


def _stop(running: list[Worker]) -> None:
    """Ask every process to save and end; who does not within a minute is ended."""
    for worker in running:
        if worker.process.is_alive():
            worker.process.terminate()
    until = time.monotonic() + PATIENCE
    for worker in running:
        worker.pipe.close()
        worker.process.join(max(0.0, until - time.monotonic()))
        if worker.process.is_alive():
            worker.process.kill()


@contextmanager
def _deaf_to_ctrl_c() -> Generator[None]:
    """Processes that begin here never hear Ctrl-C: this one does, and tells them. Nor does the one they fork from."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _termination_as_interrupt() -> Generator[None]:
    """Take SIGTERM like Ctrl-C, where signals can be heard at all."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
