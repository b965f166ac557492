"""An experiment in cells, several processes at a time on one machine, within a given time; the same command goes on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
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
        arguments: Of the script, for the process that does it.
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
        script: The file that is called with a cell's arguments.
        cells: In the order in which they are done.
        parallel: How many at a time.
        minutes: How long.
        finished: Told of every cell that has ended; gives a line for people.
        mps: Folder for NVIDIA's MPS, which lets processes use a GPU at the same time; None for turns.
    """
    waiting = [one for one in cells if not one.result.is_file()]
    began, running = time.monotonic(), dict[Cell, subprocess.Popen[bytes]]()
    control = None if mps is None else _begin_sharing(mps)
    try:
        while (waiting or running) and time.monotonic() - began < 60 * minutes:
            while waiting and len(running) < parallel:
                one = waiting.pop(0)
                running[one] = _start(script, one)
            time.sleep(0.2)
            for one, process in list(running.items()):
                if process.poll() is not None:
                    del running[one]
                    said = finished(one) if one.result.is_file() else f"failed; {one.folder}.txt says why"
                    print(f"{time.monotonic() - began:4.0f} s  {one.title}: {said}", flush=True)
    finally:
        _stop(running)
        if control is not None:
            subprocess.run([control], input=b"quit\n", check=False)


def _start(script: str, one: Cell) -> subprocess.Popen[bytes]:
    """A process that does one cell; what it says goes into a file beside its folder."""
    one.folder.parent.mkdir(parents=True, exist_ok=True)
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with open(f"{one.folder}.txt", "ab") as log:
        return subprocess.Popen(
            [sys.executable, script, *one.arguments],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **threads},
        )


def _stop(running: Mapping[Cell, subprocess.Popen[bytes]]) -> None:
    for process in running.values():
        process.send_signal(signal.SIGTERM)  # the run saves itself
    for process in running.values():
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()


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
