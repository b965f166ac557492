"""Pictures of attention rows, all in one style; this module needs matplotlib, the numbers behind it do not."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.colors import LinearSegmentedColormap, SymLogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from torch import Tensor

from affinear.lens.rows import Loudness

INK, PALE, NEGATIVE, POSITIVE = "#22262e", "#9aa1ad", "#2166ac", "#c2410c"

# Zero is the pale middle: a weight below it is blue, one above it orange, and the further away the deeper.
SIGNED = LinearSegmentedColormap.from_list("affinear", ["#0b3c75", NEGATIVE, "#e6e8ec", POSITIVE, "#7a2405"])

STYLE: dict[Any, Any] = {
    "figure.facecolor": "white",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": PALE,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": PALE,
    "ytick.color": PALE,
    "ytick.labelsize": 7,
    "xtick.labelsize": 7,
    "svg.hashsalt": "affinear",
}


def loudness_figure(curves: Sequence[Loudness]) -> Figure:
    """Draw one line of panels per mechanism and one column per factor: the weights of one query, sorted.

    Heights are multiples of the uniform weight 1/N, linear up to one and logarithmic beyond, so that a flat row and a
    spike share one axis. Bars below zero are blue.

    Args:
        curves: Each with the same F factors, and with weights (F, 1, 1, 1, N).

    Returns:
        The figure, not yet saved.

    Examples:
        >>> from affinear.lens import loudness
        >>> key, query = torch.eye(4).reshape(1, 4, 1, 4), torch.ones(1, 1, 1, 4)
        >>> figure = loudness_figure([loudness(query, key, (1.0, 4.0), "mala")])
        >>> len(figure.axes)
        2
    """
    factors, keys = curves[0].factors, curves[0].weights.shape[-1]
    rows = [keys * curve.weights.reshape(len(factors), keys).sort(descending=True).values for curve in curves]
    extent = max(row.abs().max().item() for row in rows)
    with rc_context(STYLE):
        figure, panels = _grid([curve.mechanism for curve in curves], len(factors))
        for line, curve, row in zip(panels, curves, rows, strict=True):
            for step, panel in enumerate(line):
                _draw_row(panel, row[step], extent)
                _annotate(panel, curve, step)
        for panel, label in zip(panels[0], curves[0].labels, strict=True):
            panel.set_title(f"query {label}", fontsize=10, pad=8)
        _scale_axes(panels[0, 0], keys, min(row.min().item() for row in rows), extent)
        _caption(figure, keys)
    return figure


def render(figure: Figure, suffix: str) -> bytes:
    """Return the figure as the bytes of a file; the same figure gives the same bytes.

    Args:
        figure: What to draw.
        suffix: "png", "svg" or "pdf".

    Returns:
        The file's content.

    Examples:
        >>> render(Figure(), "png")[1:4]
        b'PNG'
    """
    # A date would make every run's file differ from the last.
    metadata = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[suffix]
    content = io.BytesIO()
    with rc_context(STYLE):
        figure.savefig(content, format=suffix, dpi=160, metadata=metadata)
    return content.getvalue()


def _grid(names: Sequence[str], columns: int) -> tuple[Figure, Any]:
    # Margins in inches, so that any number of panels leaves room for the names, the title and the note.
    margin = 0.75 + 0.09 * max(map(len, names))
    width, height = margin + 2.1 * columns + 0.15, 0.8 * len(names) + 1.2
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    figure.subplots_adjust(
        left=margin / width,
        right=1 - 0.15 / width,
        bottom=0.45 / height,
        top=1 - 0.75 / height,
        wspace=0.06,
        hspace=0.22,
    )
    panels = figure.subplots(len(names), columns, sharex=True, sharey=True, squeeze=False)
    for panel, name in zip(panels[:, 0], names, strict=True):
        box = panel.get_position()
        figure.text(0.2 / width, (box.y0 + box.y1) / 2, name, va="center", fontsize=10, fontweight="bold")
    return figure, panels


def _draw_row(panel: Axes, multiples: Tensor, extent: float) -> None:
    heights = multiples.double()
    shade = SymLogNorm(linthresh=1.0, vmin=-extent, vmax=extent)
    colours = SIGNED(shade(heights.numpy()))
    # One collection draws faster than a patch per key; without antialiasing neighbours meet without a seam.
    panel.add_collection(
        PolyCollection([*_bars(heights).numpy()], facecolors=colours, linewidths=0, antialiaseds=False)
    )
    panel.axhline(0, color=INK, linewidth=0.6)
    panel.axhline(1, color=INK, linewidth=0.5, linestyle=(0, (4, 4)), alpha=0.6)
    panel.spines[["left", "bottom"]].set_visible(False)
    panel.tick_params(length=0)


def _bars(heights: Tensor) -> Tensor:
    left = torch.arange(heights.numel(), dtype=heights.dtype)
    corners = [(left, 0 * left), (left, heights), (left + 1, heights), (left + 1, 0 * left)]
    return torch.stack([torch.stack(corner, -1) for corner in corners], -2)


def _annotate(panel: Axes, curve: Loudness, step: int) -> None:
    largest = curve.numbers.largest_weight[step].item()
    negative = curve.numbers.negative_mass[step].item()
    corner: dict[str, Any] = {"transform": panel.transAxes, "fontsize": 7.5}
    panel.text(1.0, 0.98, f"largest {largest:.3f}", ha="right", va="top", color=INK, **corner)
    if negative >= 0.005:
        panel.text(0.0, 0.04, f"negative {negative:.2f}", va="bottom", color=NEGATIVE, **corner)


def _scale_axes(panel: Axes, keys: int, lowest: float, extent: float) -> None:
    # The axes are shared: what is set on one panel holds for all.
    panel.set_yscale("symlog", linthresh=1.0)
    panel.set_ylim(min(-1.0, 1.6 * lowest), 1.6 * extent)
    panel.set_yticks([tick for tick in (-10, 0, 1, 10, 100) if lowest <= tick <= extent])
    panel.yaxis.set_major_formatter("{x:g}")
    panel.yaxis.set_minor_locator(NullLocator())
    panel.set_xlim(-0.5, keys + 0.5)
    panel.set_xticks([])


def _caption(figure: Figure, keys: int) -> None:
    note = (
        f"Weights over {keys} keys, sorted, as multiples of the uniform weight 1/{keys} (dashed); "
        "linear up to 1, logarithmic beyond; blue is below zero."
    )
    width, height = figure.get_size_inches()
    figure.text(0.2 / width, 1 - 0.15 / height, "One query, made louder", va="top", fontsize=14, fontweight="bold")
    figure.text(0.2 / width, 0.15 / height, note, va="bottom", fontsize=8)
