"""How many steps all cells of an experiment are trained for, so that they end in time: what the slowest can do."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

WARM, TIMED = 8, 25  # steps that build kernels, and steps that are timed
PATIENCE = 90.0  # seconds that a cell waits for the others of the first round
DECIDED, RATE = "steps.json", ".rate"


@dataclass(frozen=True)
class Pace:
    """What there is time for.

    Attributes:
        folder: Where cells leave how fast they are, and what was decided.
        crowd: Cells at a time.
        rounds: How many come one after the other.
        until: When all have to be done, in seconds since 1970.
        judging: Seconds that a cell needs beside its steps.
        margin: Share of the time that is planned for.
        fewest: Steps that a cell has at least, whatever the time.
    """

    folder: Path
    crowd: int
    rounds: int
    until: float
    judging: float
    margin: float = 0.85
    fewest: int = 100

    def steps(self, name: str, most: int, seconds_of_a_step: Callable[[], float]) -> int:
        """Steps of every cell, the same number for all: found out once, by the first round together.

        Args:
            name: Of the cell that asks.
            most: Steps at most.
            seconds_of_a_step: Measures it, with all that runs beside it.
        """
        decided = self.folder / DECIDED
        if not decided.is_file():
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / f"{name}{RATE}").write_text(str(seconds_of_a_step()))
            self._decide(most)
        return json.loads(decided.read_text())

    def _decide(self, most: int) -> None:
        decided, patience = self.folder / DECIDED, time.monotonic() + PATIENCE
        while len(self._rates()) < self.crowd and time.monotonic() < patience and not decided.is_file():
            time.sleep(0.2)
        left = self.margin * (self.until - time.time()) / self.rounds - self.judging
        steps = min(most, max(self.fewest, int(left / max(self._rates()) / 50) * 50))
        beside = decided.with_suffix(f".{os.getpid()}")
        beside.write_text(json.dumps(steps))
        with contextlib.suppress(FileExistsError):  # somebody was quicker
            os.link(beside, decided)
        beside.unlink()

    def _rates(self) -> list[float]:
        told = [file.read_text() for file in self.folder.glob(f"*{RATE}")]
        return [float(text) for text in told if text]


def timed(step: Callable[[], object], finish: Callable[[], object]) -> float:
    """Seconds of a step, after some that build kernels.

    Args:
        step: Does one.
        finish: Waits until all are done.
    """
    for _ in range(WARM):
        step()
    finish()
    begun = time.monotonic()
    for _ in range(TIMED):
        step()
    finish()
    return (time.monotonic() - begun) / TIMED
