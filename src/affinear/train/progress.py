"""How a run shows that it is alive: one line that moves on a terminal, a line per epoch anywhere else."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any, TextIO

from .records import Record
from .task import Measure


@dataclass(frozen=True)
class Outline:
    """What a run is, as far as those who listen to it need to know.

    Attributes:
        title: For people.
        steps: Of the whole run.
        done: Of them, before it goes on.
        epochs: Of the whole run; the last may be cut short.
        unit: What training is counted in, such as "images".
        measures: The numbers of a score that people are shown.
        by_steps: Whether evaluations come after so many steps, and not after epochs.
    """

    title: str
    steps: int
    done: int
    epochs: int
    unit: str = "images"
    measures: tuple[Measure, ...] = ()
    by_steps: bool = False


class Progress:
    """Listens to a run. This one is silent; others override what they care about."""

    def begin(self, run: Outline) -> None:
        """A run begins, or goes on."""

    def step(self, step: int, loss: float, amount: float) -> None:
        """A step is done, on so many units, such as images; steps are counted from 1."""

    def testing(self) -> None:
        """The test set is being looked at."""

    def stretch(self, record: Record) -> None:
        """An epoch, or the steps between two evaluations, are over."""

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
        self._run = Outline("", 0, 0, 0)
        self._began = 0.0

    def begin(self, run: Outline) -> None:
        """Say what begins."""
        self._run, self._began = run, time.monotonic()
        self.say(f"{run.title}: {run.steps} steps" + (f", {run.done} of them done" if run.done else ""))

    def stretch(self, record: Record) -> None:
        """Say how it went."""
        run = self._run
        left = (time.monotonic() - self._began) / max(1, record.step - run.done) * (run.steps - record.step)
        self.say(f"{described(record, run)}, {spoken(left)} left")

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
        self._run = Outline("", 0, 0, 0)
        self._amount = self._shown = 0.0

    def begin(self, run: Outline) -> None:
        """Show the bar."""
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self._run, self._amount, self._shown = run, 0.0, time.monotonic()
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
        self._task = self._bar.add_task(run.title, total=run.steps, completed=run.done, told="")
        self._bar.start()

    def step(self, step: int, loss: float, amount: float) -> None:
        """Move the bar, a few times a second."""
        self._amount += amount
        now = time.monotonic()
        if now - self._shown < self.PAUSE or self._bar is None:
            return
        rate = self._amount / (now - self._shown)
        self._bar.update(self._task, completed=step, told=f"loss {loss:.3f}  {rate:,.0f} {self._run.unit}/s")
        self._amount, self._shown = 0.0, now

    def testing(self) -> None:
        """Say so in the bar."""
        if self._bar is not None:
            self._bar.update(self._task, told="testing ...")

    def stretch(self, record: Record) -> None:
        """Write how it went above the bar."""
        self.say(described(record, self._run))
        self._amount, self._shown = 0.0, time.monotonic()

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


def described(record: Record, run: Outline) -> str:
    """A stretch of a run in one line.

    Examples:
        >>> shown = Measure("loss", "test loss", False, ".3f"), Measure("top1", "top-1")
        >>> run = Outline("a", 30, 0, 3, measures=shown)
        >>> described(Record(2, 20, 1.5, 1e-3, 4.0, 320.0, {"loss": 1.25, "top1": 0.625}, {"top1": 0.75}), run)
        'epoch 2 of 3: loss 1.500, test loss 1.250, top-1 62.5 %, averaged top-1 75.0 %, 320 images/s, lr 1.0e-03'
    """
    parts = [f"loss {record.train_loss:.3f}"]
    for measure in run.measures:
        if record.test is not None and measure.name in record.test:
            parts.append(f"{measure.title} {measure.shown(record.test[measure.name])}")
    for measure in run.measures:
        if record.averaged is not None and measure.name in record.averaged and not measure.name.endswith("loss"):
            parts.append(f"averaged {measure.title} {measure.shown(record.averaged[measure.name])}")
    parts += [f"{pace(record.per_second)} {run.unit}/s", f"lr {record.lr:.1e}"]
    where = f"step {record.step} of {run.steps}" if run.by_steps else f"epoch {record.epoch} of {run.epochs}"
    return f"{where}: " + ", ".join(parts)


def pace(per_second: float) -> str:
    """How many a second, with a digit more where there are few: one in five seconds is not none.

    Examples:
        >>> pace(1234.5), pace(6.25), pace(0.217)
        ('1,234', '6.2', '0.22')
    """
    return f"{per_second:,.0f}" if per_second >= 10 else f"{per_second:.2g}"


def epochs(count: int) -> str:
    """So many passes.

    Examples:
        >>> epochs(1), epochs(1200)
        ('1 epoch', '1,200 epochs')
    """
    return f"{count:,} epoch{'' if count == 1 else 's'}"


def spoken(seconds: float) -> str:
    """A time as people say it.

    Examples:
        >>> spoken(50), spoken(600), spoken(9000)
        ('50 s', '10 min', '2.5 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
