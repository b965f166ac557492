"""How far a large photo is: a line that moves on a terminal, a line now and then anywhere else."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from ...train.progress import spoken

SOON = 1.0  # seconds before anything is said
PAUSE, LONG_PAUSE = 0.2, 10.0  # seconds between two lines, on a terminal and elsewhere


class Telling:
    """Says how far a photo is, and how long it still takes.

    Args:
        name: Of the photo.
        stream: Where to; standard error unless told.
    """

    def __init__(self, name: str, stream: TextIO | None = None) -> None:
        self.name, self.stream = name, stream or sys.stderr
        self.began = self.last = time.monotonic()
        self.shown = 0

    def __call__(self, share: float) -> None:
        """So much is done."""
        now, moving = time.monotonic(), self.stream.isatty()
        wait = SOON if not self.shown else PAUSE if moving else LONG_PAUSE
        if now - self.last < wait or share <= 0:
            return
        left = (now - self.began) * (1 - share) / share
        line = f"{self.name}: {share:.0%}, {spoken(left)} left"
        if moving:
            print(f"\r{line:<{self.shown}}", end="", file=self.stream, flush=True)
        else:
            print(line, file=self.stream, flush=True)
        self.last, self.shown = now, max(self.shown, len(line))

    def end(self) -> None:
        """Take the line that moves away."""
        if self.shown and self.stream.isatty():
            print(f"\r{'':<{self.shown}}\r", end="", file=self.stream, flush=True)
