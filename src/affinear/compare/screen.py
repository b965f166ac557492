"""How a comparison shows that it is alive, and the table that it ends with."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..train.progress import pace as per_second
from ..train.progress import spoken
from ..train.records import Record
from ..train.task import Measure, Task
from .cells import Cell, Outcome
from .findings import Summary, counted, digits_of

if TYPE_CHECKING:
    from rich.console import Console

NONE = "-"
STOPPING = "Stopping: each network finishes its step and saves; Ctrl-C again ends them at once."


def looked_into(summaries: Sequence[Summary]) -> bool:
    """Whether anything is known of what the attention of trained networks does; not every task tells."""
    seen = ((one.norm_correlation, one.negative_share, one.row_sum_error) for one in summaries)
    return any(number is not None for numbers in seen for number in numbers)


def headings(task: Task[Any, Any], whole: bool = False, attention: bool = True) -> tuple[str, ...]:
    """Of the columns, in two lines each, so that the table fits a terminal of 80 columns.

    Of whole networks attention is not what differs: multiply-adds stand in its place. Without `attention` nothing does.
    """
    metric = f"{task.metric.title}\n{'%' if task.metric.scale == 100 else ''}"
    size, cost = (metric, "spread", "para-\nmeters"), (_pace(task), "memory\nMB")
    if whole:
        return ("network", *size, "GMACs", *cost)
    seen = ("entropy\n/norm", "below\nzero %", "row sum\nerror") if attention else ()
    return ("variant", *size, *cost, *seen)


def _pace(task: Task[Any, Any]) -> str:
    return "ms\n/step" if task.pace == "steps" else f"{task.unit}\n/s"


def _pace_told(task: Task[Any, Any]) -> str:
    return "ms/step: one training step" if task.pace == "steps" else f"{task.unit}/s: training"


class Screen:
    """Listens to a comparison and keeps count. This one is silent; others show what they hear."""

    def __init__(self) -> None:
        self.done: dict[tuple[str, int], Outcome] = {}
        self.at: dict[tuple[str, int], Record] = {}
        self.running: set[tuple[str, int]] = set()
        self.variants: Sequence[str] = ()
        self.seeds: Sequence[int] = ()
        self.epochs = self.before = 0
        self.began = 0.0
        self.metric, self.by_steps = Measure("value", "value"), False

    def begin(
        self,
        variants: Sequence[str],
        seeds: Sequence[int],
        epochs: int,
        found: Sequence[Outcome],
        metric: Measure,
        by_steps: bool = False,
    ) -> None:
        """A comparison of so many epochs, or steps, each begins, of which these cells are through."""
        self.variants, self.seeds, self.epochs, self.before = variants, seeds, epochs, len(found)
        self.done = {(outcome.variant, outcome.seed): outcome for outcome in found}
        self.began, self.metric, self.by_steps = time.monotonic(), metric, by_steps

    def started(self, cell: Cell) -> None:
        """A cell is begun."""
        self.running.add((cell.variant, cell.seed))

    def epoch(self, cell: Cell, record: Record) -> None:
        """An epoch of a cell is over."""
        self.at[cell.variant, cell.seed] = record

    def finished(self, outcome: Outcome) -> None:
        """A cell is through."""
        self.running.discard((outcome.variant, outcome.seed))
        self.done[outcome.variant, outcome.seed] = outcome

    def stopping(self) -> None:
        """Somebody asked to stop, and every cell finishes its step."""

    def end(self) -> None:
        """The comparison is over, or was stopped."""

    def where(self, record: Record) -> int:
        """How far a cell is, in what the comparison counts."""
        return record.step if self.by_steps else record.epoch

    def progress(self) -> str:
        """How far it is and how long it will still take, if all cells are alike."""
        total = len(self.variants) * len(self.seeds)
        parts = sum(self.where(self.at[key]) / self.epochs for key in self.running if key in self.at)
        worked, left = len(self.done) - self.before + parts, total - len(self.done) - parts
        told = f"{len(self.done)} of {total} cells"
        elapsed = time.monotonic() - self.began
        if worked < 0.2 or not left:
            return f"{told}, {spoken(elapsed)} so far"
        return f"{told}, about {spoken(elapsed / worked * left)} left"


class Lines(Screen):
    """A line for each cell that is through, for files and pipes."""

    def begin(
        self,
        variants: Sequence[str],
        seeds: Sequence[int],
        epochs: int,
        found: Sequence[Outcome],
        metric: Measure,
        by_steps: bool = False,
    ) -> None:
        """Say what begins."""
        super().begin(variants, seeds, epochs, found, metric, by_steps)
        known = f"; {counted(len(found), 'cell')} from before" if found else ""
        sizes = (
            counted(len(variants), "variant"),
            counted(len(seeds), "seed"),
            counted(epochs, "step" if by_steps else "epoch"),
        )
        self.say(f"{', '.join(sizes)} each{known}")

    def finished(self, outcome: Outcome) -> None:
        """Say how it went."""
        super().finished(outcome)
        self.say(f"{self.progress()}: {outcome.variant}, seed {outcome.seed}: {result(outcome, self.metric)}")

    def stopping(self) -> None:
        """Say what there is to wait for."""
        self.say(STOPPING)

    def say(self, sentence: str) -> None:
        """Write a line."""
        print(sentence, file=sys.stderr, flush=True)  # noqa: T201


class Live(Screen):
    """A table that fills up, with the time left below it.

    Args:
        console: On a terminal.
    """

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console
        self.live: Any = None

    def begin(
        self,
        variants: Sequence[str],
        seeds: Sequence[int],
        epochs: int,
        found: Sequence[Outcome],
        metric: Measure,
        by_steps: bool = False,
    ) -> None:
        """Show the table."""
        from rich.live import Live as Region

        super().begin(variants, seeds, epochs, found, metric, by_steps)
        # Asked for again and again, so that the time goes on while nothing is heard.
        self.live = Region(console=self.console, get_renderable=self.drawn, refresh_per_second=2, transient=True)
        self.live.start()

    def end(self) -> None:
        """Take the table away."""
        if self.live is not None:
            self.live.stop()
            self.live = None

    def stopping(self) -> None:
        """Say what there is to wait for."""
        self.console.print(STOPPING, markup=False)

    def drawn(self) -> Group:
        """The table as it stands, and how long it will still take."""
        return Group(self.table(), Text(self.progress(), style="dim"))

    def table(self) -> Table:
        """A row for each variant, a column for each seed."""
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("variant", no_wrap=True)
        for seed in self.seeds:
            table.add_column(f"seed {seed}", no_wrap=True, min_width=16)
        for name in self.variants:
            table.add_row(name, *(self._state(name, seed) for seed in self.seeds))
        return table

    def _state(self, name: str, seed: int) -> str:
        key = name, seed
        if key in self.done:
            return "failed" if self.done[key].error else self.metric.shown(self.done[key].value)
        if key not in self.running:
            return ""
        if key not in self.at:
            return "starting"
        record = self.at[key]
        known = "" if record.test is None else f", {self.metric.shown(record.test[self.metric.name])}"
        return f"{'step' if self.by_steps else 'epoch'} {self.where(record)}/{self.epochs}{known}"


def for_people() -> Screen:
    """The table that fills up where standard error is a terminal, lines where it is not."""
    if not sys.stderr.isatty():
        return Lines()
    from rich.console import Console

    return Live(Console(stderr=True))


def result(outcome: Outcome, metric: Measure) -> str:
    """A cell in a few words."""
    if outcome.error:
        return f"failed: {outcome.error}"
    return f"{metric.shown(outcome.value)} after {spoken(outcome.seconds)}"


def table(summaries: Sequence[Summary], task: Task[Any, Any], whole: bool = False) -> Table:
    """The table for a terminal, of variants of one network or of whole networks."""
    out = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    columns = headings(task, whole, looked_into(summaries))
    for number, heading in enumerate(columns):
        out.add_column(heading, justify="right" if number else "left", no_wrap=True)
    for summary in summaries:
        out.add_row(*row(summary, task, whole)[: len(columns)])
    return out


def row(summary: Summary, task: Task[Any, Any], whole: bool = False) -> tuple[str, ...]:
    """A variant, or a whole network, as the tables show it, column by column."""
    metric = task.metric
    form = f".{digits_of(metric)}f"
    mean = _number(summary.mean, form) if summary.mean is not None else "failed" if summary.errors else NONE
    memory = None if summary.step_memory is None else summary.step_memory / 1e6
    share = None if summary.negative_share is None else 100 * summary.negative_share
    size = summary.variant, mean, _number(summary.spread, form), _count(summary.parameters)
    pace = NONE if summary.per_second is None else per_second(summary.per_second)
    if task.pace == "steps":
        pace = _number(None if summary.step_seconds is None else 1000 * summary.step_seconds, ".1f")
    cost = pace, _number(memory, ",.1f")
    if whole:
        return *size, _number(None if summary.macs is None else summary.macs / 1e9, ".3f"), *cost
    return (
        *size,
        *cost,
        _number(summary.norm_correlation, "+.2f"),
        _number(share, ".1f"),
        _number(summary.row_sum_error, ".1e"),
    )


def _count(value: int | None) -> str:
    if value is None:
        return NONE
    return f"{value / 1e6:.2f}M" if value >= 1e6 else f"{value / 1e3:.1f}k"


def _number(value: float | None, form: str) -> str:
    return NONE if value is None else format(value, form)


def legend(task: Task[Any, Any], whole: bool = False, attention: bool = True) -> str:
    """What the columns are, those of attention included if there are some."""
    told = (
        f"{task.metric.title}: mean over seeds, on the test set after the last step; spread: standard deviation over "
        f"seeds. {_pace_told(task)}, the fastest epoch. memory: what the tensors of one training step take at "
        "most. "
    )
    if whole:
        return f"{told}GMACs: multiply-adds for one sample as it is trained on, in billions."
    if not attention:
        return told.strip()
    return (
        f"{told}entropy/norm: rank correlation of a row's entropy and its query's norm, below zero if louder queries "
        "look more sharply. below zero: share of the weights. row sum error: the largest distance of a row's sum from "
        "one."
    )
