"""An experiment in cells, shared out among processes that take one after the other, within a given time.

A process imports, opens data and builds kernels once, and then does cell after cell: the next one that nobody has
claimed. Results are files; the same command goes on with those that are not there.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
GRACE = 25  # seconds that a process has for saving itself


def lead(
    command: Sequence[str],
    results: Mapping[str, Path],
    parallel: int,
    until: float,
    told: Callable[[str], str],
    *,
    stop: bool,
) -> list[str]:
    """Start processes, tell of every result as it comes, and give the names of what is not done.

    Args:
        command: Of a process that goes through `claimed`.
        results: The file of each cell, by name.
        parallel: How many processes.
        until: Seconds of `time.time` after which nothing new is begun.
        told: A line about a cell that is done.
        stop: Whether what is running then is asked to stop, as a run of the engine can go on later.
    """
    left = [name for name, path in results.items() if not path.is_file()]
    for name in left:
        for mark in (".claim", ".failed"):
            marked(results[name], mark).unlink(missing_ok=True)
    began, total = time.time(), len(left)
    folder = next(iter(results.values())).parent if results else Path()
    processes = [_start(command, folder / f"worker-{number}.log") for number in range(min(parallel, len(left)))]
    print(f"{total} of {len(results)} cells are left, {len(processes)} at a time", flush=True)
    try:
        while left and any(process.poll() is None for process in processes):
            if stop and time.time() > until:
                break
            time.sleep(0.3)
            left = _tell(left, results, began, total, told)
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in processes:
            try:
                process.wait(timeout=GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
    _tell(left, results, began, total, told)
    return [name for name, path in results.items() if not path.is_file()]


def claimed(results: Mapping[str, Path], until: float) -> Iterator[str]:
    """The names of cells for this process to do, each claimed by it alone, until the time is over."""
    for name, path in results.items():
        if time.time() > until:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            continue
        try:
            marked(path, ".claim").open("x").close()
        except FileExistsError:
            continue
        yield name


def attempt(do: Callable[[], object], result: Path) -> None:
    """Do a cell; what goes wrong with it is written down, and the next one has its turn."""
    try:
        do()
    except Exception as error:
        traceback.print_exc()
        marked(result, ".failed").write_text(f"{type(error).__name__}: {error}")


def marked(result: Path, mark: str) -> Path:
    """The file that says something about a cell beside its result."""
    return result.with_name(result.name + mark)


def _tell(
    left: list[str], results: Mapping[str, Path], began: float, total: int, told: Callable[[str], str]
) -> list[str]:
    """Tell what is new, and give what is neither done nor failed."""
    still: list[str] = []
    for name in left:
        failed = marked(results[name], ".failed")
        if not results[name].is_file() and not failed.is_file():
            still.append(name)
    for name in (one for one in left if one not in still):
        failed = marked(results[name], ".failed")
        line = told(name) if results[name].is_file() else f"{name}: FAILED, {failed.read_text()[:300]}"
        passed, done = time.time() - began, total - len(still)
        print(f"{done}/{total}, {passed:4.0f} s, {passed / done * len(still):4.0f} s to go: {line}", flush=True)
    return still


def _start(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as said:
        return subprocess.Popen(
            [sys.executable, *command], stdout=said, stderr=subprocess.STDOUT, env={**os.environ, **THREADS}
        )
