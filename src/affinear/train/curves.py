"""The learning curves of a run as one picture."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .records import Record
from .task import Measure

NAME = "curves.png"


def can_draw() -> bool:
    """Whether matplotlib is here; the report has the curves in any case."""
    try:
        return find_spec("matplotlib") is not None
    except ValueError:  # somebody took it away on purpose
        return False


def draw(output: Path, records: Sequence[Record], metric: Measure, by_steps: bool) -> Path:
    """Draw losses, the metric and the learning rate over epochs, or steps, into `curves.png`.

    Args:
        output: Folder of the run.
        records: What was measured.
        metric: Which number of the score is drawn.
        by_steps: Whether over steps.

    Raises:
        SaveError: If the picture could not be written.
    """
    from io import BytesIO

    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6))
    figure.subplots_adjust(left=0.05, right=0.98, bottom=0.14, top=0.9)
    losses, scores, rates = figure.subplots(1, 3)
    wheres = [where(record, by_steps) for record in records]
    losses.plot(wheres, [record.train_loss for record in records], marker=".", label="training")
    _plot(losses, over(records, "loss", by_steps), "test")
    _plot(scores, over(records, metric.name, by_steps, metric.scale), metric.title)
    _plot(scores, over(records, metric.name, by_steps, metric.scale, averaged=True), "averaged weights")
    rates.plot(wheres, [record.lr for record in records], marker=".")
    title = metric.title + (", %" if metric.scale == 100 else "")
    for axes, name in ((losses, "loss"), (scores, title), (rates, "learning rate")):
        axes.set(title=name, xlabel="step" if by_steps else "epoch")
        axes.grid(alpha=0.3)
    losses.legend()
    scores.legend()
    drawn = BytesIO()
    figure.savefig(drawn, format="png", dpi=120)
    return _keep(drawn.getvalue(), output / NAME)


def where(record: Record, by_steps: bool) -> int:
    """Where in the run a record stands."""
    return record.step if by_steps else record.epoch


def over(
    records: Sequence[Record], name: str, by_steps: bool, scale: float = 1.0, averaged: bool = False
) -> list[tuple[float, float]]:
    """A number of the score over epochs or steps, where it is known."""
    told = ((record, record.averaged if averaged else record.test) for record in records)
    return [(where(record, by_steps), scale * test[name]) for record, test in told if test is not None and name in test]


def _plot(axes: Any, points: list[tuple[float, float]], label: str) -> None:
    if points:
        axes.plot(*zip(*points, strict=True), marker=".", label=label)


def _keep(content: bytes, path: Path) -> Path:
    from affinear.lens.files import place

    from .checkpoint import why
    from .faults import SaveError

    try:
        return place(content, path, force=True).path
    except OSError as error:
        raise SaveError(f"{path.name} could not be saved to {path}: {why(error)}.") from None
