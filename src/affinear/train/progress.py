"""How a run shows that it is alive: one line that moves on a terminal, a line per epoch anywhere else."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

from .records import EpochRecord


class Progress:
    """Listens to a run. This one is silent; others override what they care about."""

    def begin(self, title: str, steps: int, done: int, epochs: int) -> None:
        """A run of so many steps begins, or goes on after `done` of them."""

    def step(self, step: int, loss: float, images: int) -> None:
        """A step is done, on so many images; steps are counted from 1."""

    def testing(self) -> None:
        """The test images are being looked at."""

    def epoch(self, record: EpochRecord) -> None:
        """An epoch is over."""

    def say(self, sentence: str) -> None:
        """Something the user should know."""

    def end(self) -> None:
        """The run is over, or was stopped."""


class Lines(Progress):
    """A line per epoch, without control characters, for files and pipes.

    Args:
        stream: Where to; standard error unless told.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._epochs = self._steps = self._done = 0
        self._began = 0.0

    def begin(self, title: str, steps: int, done: int, epochs: int) -> None:
        """Say what begins."""
        self._epochs, self._steps, self._done, self._began = epochs, steps, done, time.monotonic()
        self.say(f"{title}: {steps} steps" + (f", {done} of them done" if done else ""))

    def epoch(self, record: EpochRecord) -> None:
        """Say how it went."""
        left = (time.monotonic() - self._began) / max(1, record.step - self._done) * (self._steps - record.step)
        self.say(f"{described(record, self._epochs)}, {spoken(left)} left")

    def say(self, sentence: str) -> None:
        """Write the sentence on a line of its own."""
        print(sentence, file=self._stream or sys.stderr, flush=True)


class Live(Progress):
    """A bar with loss, images per second and time left, and a line for each epoch above it.

    Args:
        console: A rich console on a terminal.
    """

    PAUSE = 0.1  # seconds between changes of the bar, which nobody could read faster

    def __init__(self, console: Any) -> None:
        self._console = console
        self._bar: Any = None
        self._task: Any = None
        self._epochs = self._images = 0
        self._shown = 0.0

    def begin(self, title: str, steps: int, done: int, epochs: int) -> None:
        """Show the bar."""
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self._epochs, self._images, self._shown = epochs, 0, time.monotonic()
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[told]}"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task(title, total=steps, completed=done, told="")
        self._bar.start()

    def step(self, step: int, loss: float, images: int) -> None:
        """Move the bar, a few times a second."""
        self._images += images
        now = time.monotonic()
        if now - self._shown < self.PAUSE or self._bar is None:
            return
        rate = self._images / (now - self._shown)
        self._bar.update(self._task, completed=step, told=f"loss {loss:.3f}  {rate:,.0f} images/s")
        self._images, self._shown = 0, now

    def testing(self) -> None:
        """Say so in the bar."""
        if self._bar is not None:
            self._bar.update(self._task, told="testing ...")

    def epoch(self, record: EpochRecord) -> None:
        """Write how it went above the bar."""
        self.say(described(record, self._epochs))
        self._images, self._shown = 0, time.monotonic()

    def say(self, sentence: str) -> None:
        """Write the sentence above the bar."""
        self._console.print(sentence, highlight=False, markup=False, soft_wrap=True)

    def end(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def for_people() -> Progress:
    """The moving line where standard error is a terminal, lines per epoch where it is not."""
    if not sys.stderr.isatty():
        return Lines()
    from rich.console import Console

    return Live(Console(stderr=True))


def described(record: EpochRecord, epochs: int) -> str:
    """An epoch in one line.

    Examples:
        >>> described(EpochRecord(2, 20, 1.5, 1e-3, 4.0, 320.0, 1.25, 0.625, 0.875), 3)
        'epoch 2 of 3: loss 1.500, test loss 1.250, top-1 62.5 %, top-5 87.5 %, 320 images/s, lr 1.0e-03'
    """
    parts = [f"loss {record.train_loss:.3f}"]
    if record.test_loss is not None and record.top1 is not None and record.top5 is not None:
        parts += [f"test loss {record.test_loss:.3f}", f"top-1 {record.top1:.1%}", f"top-5 {record.top5:.1%}"]
    if record.ema_top1 is not None:
        parts.append(f"averaged {record.ema_top1:.1%}")
    parts += [f"{record.images_per_second:,.0f} images/s", f"lr {record.lr:.1e}"]
    return f"epoch {record.epoch} of {epochs}: " + ", ".join(parts).replace("%", " %")


def spoken(seconds: float) -> str:
    """A time as people say it.

    Examples:
        >>> spoken(50), spoken(600), spoken(9000)
        ('50 s', '10 min', '2.5 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
