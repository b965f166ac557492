"""Cells in processes of their own: several at a time, each with its own memory, all stopped and saved together."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from ..plugins import load
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
    on_stop: Callable[[], None] = lambda: None,
) -> bool:
    """Work on cells, so many at a time.

    Args:
        cells: In the order in which they are begun.
        jobs: Processes at a time.
        on_start: Hears of every cell that is begun.
        on_epoch: Hears of every epoch.
        on_outcome: Hears of every cell that is through.
        seconds: After so many all is saved and stopped.
        on_stop: Hears that they are told to stop, which takes each a step.

    Returns:
        Whether all cells are through; False if Ctrl-C, SIGTERM or the time stopped them. Each has then saved what it
        did, if it had done a step.
    """
    waiting, running, began = list(cells), list[Worker](), time.monotonic()
    with _termination_as_interrupt():
        try:
            context = _context()
            while waiting or running:
                while waiting and len(running) < jobs:
                    on_start(waiting[0])
                    with _deaf_to_ctrl_c():  # until the process is among those that will be told to stop
                        running.append(_begin(context, waiting.pop(0)))
                _listen(running, on_epoch, on_outcome)
                running = [worker for worker in running if worker.outcome is None]
                if seconds is not None and time.monotonic() - began > seconds:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            on_stop()
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
    resource_tracker.ensure_running()  # by itself, as whoever starts it hears Ctrl-C again afterwards
    with _deaf_to_ctrl_c():
        forkserver.ensure_running()
    first = context.Process(target=_nothing)
    first.start()  # comes back when all is imported, which takes seconds, and in which Ctrl-C is heard
    first.join()
    return context


def _nothing() -> None:
    """What a process does that is only to be waited for."""


def end_fork_server() -> None:
    """End the process that cells are forked from, where this one is about to end too: by itself it takes seconds."""
    server: Any = getattr(forkserver, "_forkserver", None)
    pid = getattr(server, "_forkserver_pid", None)
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _begin(context: Any, cell: Cell) -> Worker:
    ours, theirs = context.Pipe(duplex=False)
    given = (cell, theirs, multiprocessing.get_start_method())
    process = context.Process(target=work, args=given, name=cell.title, daemon=False)
    process.start()
    theirs.close()
    return Worker(cell, process, ours)


def work(cell: Cell, pipe: Connection, method: str | None = None) -> None:
    """What the process of a cell does; whatever libraries print goes into a file of the cell.

    Args:
        cell: What to train.
        pipe: Where to tell of it.
        method: How processes that read samples are started, as `affinear train` would start them. A process of a fork
            server would start them by another server, which imports everything anew.
    """
    _quiet(cell.folder)
    multiprocessing.set_start_method(method, force=True)
    if cell.threads:
        torch.set_num_threads(cell.threads)
    try:
        load(cell.plugins)
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
    """Ask every process to save and end; who does not within a minute, or before another Ctrl-C, is ended."""
    for worker in running:
        if worker.process.is_alive():
            worker.process.terminate()
    until = time.monotonic() + PATIENCE
    try:
        for worker in running:
            worker.pipe.close()
            worker.process.join(max(0.0, until - time.monotonic()))
    except KeyboardInterrupt:
        pass
    for worker in running:
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
