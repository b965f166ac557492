"""The crossover chart: time against tokens on logarithmic axes; this module needs matplotlib."""

from __future__ import annotations

from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from affinear.bench.cases import FORWARD, TRAINING
from affinear.bench.contenders import SDPA, TORCH, TRITON
from affinear.bench.crossover import TABLE, line, meeting_point
from affinear.bench.rows import Report
from affinear.lens.figures import INK, NEGATIVE, PALE, POSITIVE, STYLE  # the style only: one look for all figures

COLOURS = {TRITON: POSITIVE, TORCH: PALE, SDPA: NEGATIVE}
DASHES = {FORWARD: "-", TRAINING: (0, (3, 2))}
DOTS: dict[str, Any] = {"linewidth": 1.6, "marker": "o", "markersize": 2.6}
WIDTH, HEIGHT = 7.6, 4.8


def crossover_figure(report: Report) -> Figure:
    """Draw every line of the crossover table, and the length from which on this library is the faster.

    Args:
        report: With rows of the crossover table.

    Returns:
        The figure, not yet saved.
    """
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, HEIGHT))
        FigureCanvasAgg(figure)
        figure.subplots_adjust(left=0.85 / WIDTH, right=1 - 0.2 / WIDTH, bottom=0.95 / HEIGHT, top=1 - 0.6 / HEIGHT)
        panel = figure.subplots()
        for name, colour in COLOURS.items():
            for direction, dashes in DASHES.items():
                points = line(report.rows, name, direction)
                if points:
                    label = f"{name}, {direction}"
                    panel.plot(*zip(*points, strict=True), color=colour, linestyle=dashes, label=label, **DOTS)
        _scale_axes(panel, report)
        _mark_crossing(panel, report)
        _caption(figure, report)
    return figure


def _scale_axes(panel: Axes, report: Report) -> None:
    lengths = sorted({row.shape.tokens for row in report.rows if row.table == TABLE})
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.xaxis.set_major_locator(FixedLocator(lengths))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_minor_locator(NullLocator())
    panel.set_xticks(lengths, [_tokens(length) for length in lengths])
    panel.yaxis.set_major_formatter("{x:g}")
    panel.tick_params(length=0, labelcolor=INK)
    panel.grid(color=PALE, alpha=0.25, linewidth=0.5)
    panel.set_xlabel("tokens")
    panel.set_ylabel("milliseconds")
    panel.legend(fontsize=8, loc="upper left", facecolor="white", edgecolor="none", framealpha=1)


def _mark_crossing(panel: Axes, report: Report) -> None:
    fastest = TRITON if line(report.rows, TRITON, FORWARD) else TORCH
    found = meeting_point(line(report.rows, fastest, FORWARD), line(report.rows, SDPA, FORWARD))
    if found is None:
        return
    panel.axvline(found, color=INK, linewidth=0.5, linestyle=(0, (4, 4)), alpha=0.6)
    said = f" forward: even at {found:,.0f} tokens"
    panel.text(found, 0.02, said, transform=panel.get_xaxis_transform(), fontsize=7.5, va="bottom")


def _caption(figure: Figure, report: Report) -> None:
    row = next(row for row in report.rows if row.table == TABLE)
    where = report.machine["gpu"] or report.machine["cpu"]
    how = "as replayed graphs, calls over 20 ms as plain calls" if report.on_gpu else "as plain calls"
    first = f"{where}. Batch {row.shape.batch}, {row.shape.heads} heads of {row.shape.width}, {row.dtype}, not causal."
    second = f"{row.mechanism} beside softmax (SDPA); medians, {how}."
    left = 0.2 / WIDTH
    figure.text(left, 1 - 0.15 / HEIGHT, "Time against tokens", va="top", fontsize=14, fontweight="bold")
    figure.text(left, 0.15 / HEIGHT, f"{first}\n{second}", va="bottom", fontsize=8)


def _tokens(length: int) -> str:
    if length >= 2**20 and length % 2**20 == 0:
        return f"{length // 2**20}M"
    return f"{length // 1024}k" if length >= 1024 and length % 1024 == 0 else str(length)
