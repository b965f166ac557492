"""The report of a run: one HTML file with what was trained, how it went, and what the task shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from affinear.lens.files import place

from . import page
from .checkpoint import Position, why
from .curves import over, where
from .faults import SaveError
from .folder import REPORT
from .page import Line, Section
from .progress import Outline, epochs, pace, spoken
from .task import Measure, Task

__all__ = ["Section", "html", "write"]


def write(
    output: Path,
    task: Task[Any, Any],
    about: Mapping[str, Any],
    run: Outline,
    position: Position,
    shown: Sequence[Section],
) -> Path:
    """Write `report.html` into the folder of a run.

    Raises:
        SaveError: If it could not be written.
    """
    path = output / REPORT
    try:
        return place(html(task, about, run, position, shown).encode(), path, force=True).path
    except OSError as error:
        raise SaveError(f"The report could not be saved to {path}: {why(error)}.") from None


def html(
    task: Task[Any, Any], about: Mapping[str, Any], run: Outline, position: Position, shown: Sequence[Section]
) -> str:
    """One page, whole in itself, of a run.

    Args:
        task: What was trained.
        about: What the run is.
        run: Its length.
        position: What was measured.
        shown: What the task shows of the trained network.
    """
    parts = [_headline(task, run, position), _facts(task, about, run, position), _curves(task.metric, run, position)]
    parts += [page.section(one) for one in shown]
    parts += [_records(task, run, position), _settings(about)]
    return page.document(f"{about['model']} on {about['data']}", "\n".join(parts))


def _headline(task: Task[Any, Any], run: Outline, position: Position) -> str:
    last = position.records[-1].test or {}
    numbers = [f"{one.title} {one.shown(last[one.name])}" for one in task.measures if one.name in last]
    value = task.metric.shown(last[task.metric.name]) if task.metric.name in last else "-"
    best = "" if position.best is None else f"; best {task.metric.shown(position.best)}"
    when = f"after step {position.best_step:,}" if run.by_steps else f"in epoch {position.best_epoch}"
    note = f"{', '.join(numbers)} after the last step{best}, {when}"
    return f'<p class="headline">{value}</p><p class="note">{page.escape(note)}</p>'


def _facts(task: Task[Any, Any], about: Mapping[str, Any], run: Outline, position: Position) -> str:
    records, recipe = position.records, about["recipe"]
    seconds = sum(record.seconds for record in records)
    rate = sorted(record.per_second for record in records)[len(records) // 2]
    known = {
        "task": f"{task.name}: {task.about}",
        "network": ", ".join([about["model"], *(f"{name}={value}" for name, value in about["model_args"].items())]),
        "data": f"{about['train_samples']:,} to learn from, {about['test_samples']:,} to be judged by",
        "training": f"{run.steps:,} steps, {epochs(run.epochs)}, in batches of {recipe['batch_size']}",
        "time": f"{spoken(seconds)} of training, {pace(rate)} {task.unit}/s",
    }
    return page.terms(known)


def _curves(metric: Measure, run: Outline, position: Position) -> str:
    by_steps, records = run.by_steps, position.records
    across, last = ("step", run.steps) if by_steps else ("epoch", run.epochs)
    first = where(records[0], by_steps)
    losses = [
        Line("training", [(where(record, by_steps), record.train_loss) for record in records], 0),
        Line("test", over(records, "loss", by_steps), 5),
    ]
    scores = [
        Line(metric.title, over(records, metric.name, by_steps, metric.scale), 0),
        Line("averaged weights", over(records, metric.name, by_steps, metric.scale, averaged=True), 3, dashed=True),
    ]
    rates = [Line("learning rate", [(where(record, by_steps), record.lr) for record in records], 4)]
    percent = ", in percent" if metric.scale == 100 else ""
    drawn = ((f"{metric.title} on the test set{percent}", scores), ("Loss", losses), ("Learning rate", rates))
    figures = "".join(_figure(title, lines, across, last, first) for title, lines in drawn)
    return f'<h2>Learning</h2><div class="figures">{figures}</div>'


def _figure(title: str, lines: Sequence[Line], across: str, last: float, first: float) -> str:
    known = [line for line in lines if line.points]
    names = page.key(known) if len(known) > 1 else ""
    return f"<section><h3>{page.escape(title)}</h3>{names}{page.chart(known, title, across, last, first)}</section>"


def _records(task: Task[Any, Any], run: Outline, position: Position) -> str:
    head = ["step" if run.by_steps else "epoch", "loss", *(one.title for one in task.measures), f"{task.unit}/s", "lr"]
    rows = [
        [
            str(where(record, run.by_steps)),
            f"{record.train_loss:.4f}",
            *(_shown(one, record.test) for one in task.measures),
            pace(record.per_second),
            f"{record.lr:.2e}",
        ]
        for record in position.records
    ]
    return f"<details><summary>Every number</summary>{page.table(head, rows)}</details>"


def _shown(measure: Measure, test: Mapping[str, float] | None) -> str:
    return measure.shown(test[measure.name]) if test is not None and measure.name in test else "-"


def _settings(about: Mapping[str, Any]) -> str:
    known = {**about["recipe"], **about["settings"]}
    return f"<details><summary>The recipe</summary>{page.terms(known)}</details>"
