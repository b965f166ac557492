"""How the papers' figures look: one drawing function for each set of numbers of `affinear.lens.papers`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter

from affinear.lens.figures import INK, PALE, POSITIVE, STYLE

if TYPE_CHECKING:
    from affinear.lens.papers import Confusion, Distributions, Locality, Norms, Ranks, Ratios, Rows, SignsBySize

# Told apart by people who confuse red and green, and in grey: after Okabe and Ito, with the style's own orange.
MECHANISM_COLOURS: Mapping[str, str] = MappingProxyType(
    {
        "softmax": INK,
        "linear": "#0072b2",
        "relu": "#3aa0dc",
        "inline": "#00875f",
        "nala": "#a9478f",
        "mala": POSITIVE,
        "mala_released": "#c98a00",
    }
)
LABELS: Mapping[str, str] = MappingProxyType(
    {
        "softmax": "softmax",
        "linear": "linear",
        "relu": "linear (ReLU)",
        "inline": "InLine",
        "nala": "NaLa",
        "mala": "MALA",
        "mala_released": "MALA as released",
    }
)
WIDTH = 7.6  # inches, as the other charts
GUIDE: dict[str, Any] = {"color": INK, "linewidth": 0.6, "linestyle": (0, (4, 4)), "alpha": 0.6}
SMALL = 7.5
BESIDE: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": SMALL}


def norms_figure(numbers: Norms) -> Figure:
    """Entropy against query norm above and key norm below, one column for each mechanism."""
    title = "Who looks more sharply as the norm grows?"
    note = (
        f"{len(numbers.query_norm)} random queries and as many keys. Entropy in nats, of |w| / Σ|w|; dashed: that of a "
        "uniform row or column.\nρ: Spearman's rank correlation of entropy and norm. "
        "span: largest less smallest entropy."
    )
    with rc_context(STYLE):
        figure = _page(4.7, title, note, left=0.65, bottom=1.1, wspace=0.08, hspace=0.45)
        grid = figure.subplots(2, len(numbers.panels), sharey=True)
        for column, panel in enumerate(numbers.panels):
            colour = MECHANISM_COLOURS[panel.mechanism]
            for place, norm, entropy, correlation in (
                (grid[0, column], numbers.query_norm, panel.row_entropy, panel.query_correlation),
                (grid[1, column], numbers.key_norm, panel.column_entropy, panel.key_correlation),
            ):
                place.scatter(norm, entropy, s=5, color=colour, alpha=0.45, linewidths=0, rasterized=True)
                place.axhline(math.log(len(norm)), **GUIDE)
                words = f"ρ = {_minus(correlation)}\nspan {max(entropy) - min(entropy):.3f}"
                place.text(0.06, 0.06, words, transform=place.transAxes, fontsize=SMALL, linespacing=1.4)
                place.set_xscale("log")
                place.set_xlim(0.16, 20)
                _ticks(place, x=(0.5, 2, 8), y=(2, 4, 6))
            grid[0, column].set_title(LABELS[panel.mechanism], color=colour, fontsize=10, fontweight="bold")
        grid[0, 0].set_ylabel("entropy of the row")
        grid[1, 0].set_ylabel("entropy of the column")
        grid[0, 2].set_xlabel("norm of the query")
        grid[1, 2].set_xlabel("norm of the key")
        grid[0, 0].set_ylim(1, 6.1)
    return figure


def ratios_figure(numbers: Ratios) -> Figure:
    """The ratio of two weights against the size of the query's features, poles marked."""
    note = (
        "Weight of one key over that of another, for one query whose features are multiplied.\n"
        "Vertical axis linear from −1 to 1, logarithmic beyond. Dashed: where the weight of the other key is zero."
    )
    with rc_context(STYLE):
        figure = _page(
            4.0, "The ratio of two weights as the query grows", note, left=0.65, right=0.8, top=0.55, bottom=1.05
        )
        panel = figure.subplots()
        panel.set_yscale("symlog", linthresh=1.0, linscale=0.6)
        panel.set_ylim(-1000, 1000)
        panel.set_xlim(0, numbers.factors[-1])
        panel.axhline(0, color=INK, linewidth=0.6)
        for curve in numbers.curves:
            colour = MECHANISM_COLOURS[curve.mechanism]
            for before in (True, False):
                points = [
                    (factor, ratio)
                    for factor, ratio in zip(numbers.factors, curve.ratio, strict=True)
                    if (factor < curve.pole) == before
                ]
                if points:
                    panel.plot(*zip(*points, strict=True), color=colour, linewidth=1.6)
            if math.isfinite(curve.pole):
                panel.axvline(curve.pole, color=colour, linewidth=0.8, linestyle=(0, (4, 3)))
                said = f"{LABELS[curve.mechanism]}'s pole: × {curve.pole:.2f} "
                panel.text(curve.pole, -500, said, color=colour, fontsize=SMALL, ha="right", va="center")
        ends = [(curve.ratio[-1], LABELS[curve.mechanism], curve.mechanism) for curve in numbers.curves]
        _end_labels(panel, ends, gap=0.05)
        panel.set_xlabel("factor on the features of the query")
        panel.set_ylabel("ratio of the two weights")
        _ticks(panel, x=range(0, 11, 2), y=(-100, -10, -1, 0, 1, 10, 100))
    return figure


def confusion_figure(numbers: Confusion) -> Figure:
    """InLine's vectors and their rows above, and how many random queries collide below."""
    note = (
        "Above: the vectors of InLine's Figure 1; lines run from the shortest query (pale) to the longest. Below: "
        f"pairs of {numbers.pairs} whose rows\ndiffer by no more than the tolerance times 1/N in any weight; "
        f"{numbers.on_one_ray} pairs lie on one ray."
    )
    with rc_context(STYLE):
        figure = _page(5.7, "Different queries, one row", note, left=0.65, right=1.1, bottom=1.15)
        upper, lower = figure.add_gridspec(2, 1, height_ratios=(1, 1.1), hspace=0.36)
        left, right = upper.subgridspec(1, 2, width_ratios=(1.1, 3.4), wspace=0.24)
        _vectors(figure.add_subplot(left), numbers)
        places = right.subgridspec(1, len(numbers.examples), wspace=0.12)
        panels: Any = places.subplots(sharey=True)
        for panel, rows in zip(panels, numbers.examples, strict=True):
            _rows(panel, rows)
        panels[0].set_ylabel("weight")
        _collision_counts(figure.add_subplot(lower), numbers)
    return figure


def locality_figure(numbers: Locality) -> Figure:
    """Mass in the 3 x 3 window, without rotary positions (ring) and with them (dot)."""
    note = (
        f"Mean over the {numbers.side**2} queries of a {numbers.side} × {numbers.side} grid whose features vary "
        "smoothly; queries and keys are equal.\n"
        "Ring: without rotary positions; dot: with them. Numbers are multiples of what a uniform row has there."
    )
    with rc_context(STYLE):
        figure = _page(3.4, "How much lies around the query?", note, left=0.9, right=0.3, top=0.55, bottom=1.1)
        panel = figure.subplots()
        heights = range(len(numbers.places), 0, -1)
        for height, place in zip(heights, numbers.places, strict=True):
            colour = MECHANISM_COLOURS[place.mechanism]
            panel.plot((place.plain, place.rotary), (height, height), color=colour, linewidth=1.2, zorder=1)
            # The ring is wider than the dot: where both lie on one place, both are seen.
            panel.scatter(place.plain, height, s=60, facecolor="white", edgecolor=colour, linewidth=1.4, zorder=2)
            panel.scatter(place.rotary, height, s=22, color=colour, linewidth=0, zorder=3)
            low, high = sorted((place.plain, place.rotary))
            for x, side, shift in ((low, "right", -8), (high, "left", 8)):
                words = f"{x / numbers.uniform:.1f} ×"
                panel.annotate(words, (x, height), (shift, 0), ha=side, **BESIDE)
        panel.axvline(numbers.uniform, **GUIDE)
        panel.text(numbers.uniform, 0.45, f" uniform {numbers.uniform:.3f}", fontsize=SMALL, va="bottom")
        panel.set_xscale("log")
        panel.set_xlim(0.035, 0.8)
        panel.set_ylim(0.4, len(numbers.places) + 0.6)
        panel.set_xlabel("sum of the weights in the 3 × 3 window")
        _ticks(panel, x=(0.05, 0.1, 0.2, 0.5))
        panel.set_yticks(list(heights), [LABELS[place.mechanism] for place in numbers.places], fontsize=9)
        for label, place in zip(panel.get_yticklabels(), numbers.places, strict=True):
            label.set_color(MECHANISM_COLOURS[place.mechanism])
            label.set_fontweight("bold")
        panel.spines["left"].set_visible(False)
    return figure


def signs_figure(numbers: SignsBySize) -> Figure:
    """Negative share, mass and row sums against the size of the features; dotted lines are without rotary positions."""
    note = (
        f"Queries and keys normal, {numbers.keys} of each, width {numbers.width}. Solid: with rotary positions; "
        "dotted: without. InLine's two lines coincide.\nThe band on the right spans the least and the largest row sum."
    )
    with rc_context(STYLE):
        title = "What lies below zero, and what rows sum to"
        figure = _page(3.8, title, note, left=0.6, right=0.2, bottom=1.1, wspace=0.36)
        share, mass, total = figure.subplots(1, 3)
        for curve in numbers.curves:
            look: dict[str, Any] = {"color": MECHANISM_COLOURS[curve.mechanism], "linewidth": 1.5}
            look["linestyle"] = "-" if curve.rotary else (0, (1, 1.2))
            share.plot(numbers.sizes, curve.negative_share, **look)
            mass.plot(numbers.sizes, curve.absolute_mass, **look)
            if curve.rotary and curve.mechanism != "inline":
                total.plot(numbers.sizes, curve.row_sum, **look)
                total.fill_between(
                    numbers.sizes, curve.lowest_sum, curve.highest_sum, color=look["color"], alpha=0.18, linewidth=0
                )
        _name_signs(share, mass, total, numbers)
        for panel, words in ((share, "share of negative weights"), (mass, "Σ|w|, mean"), (total, "row sum")):
            panel.set_title(words, fontsize=9, loc="left")
            panel.set_xscale("log")
            panel.set_xlabel("size of the features")
            _ticks(panel, x=(0.05, 0.2, 1, 4))
        share.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        share.set_ylim(-0.03, 1.06)
        mass.set_yscale("log")
        mass.axhline(1, **GUIDE)
        _ticks(mass, x=(0.05, 0.2, 1, 4), y=(1, 2, 5, 10))
        total.axhline(0, color=INK, linewidth=0.5)
    return figure


def distributions_figure(numbers: Distributions) -> Figure:
    """Sorted weights on the left, and on the right how many queries have a largest weight at least so large."""
    keys = len(numbers.scores[0].mean_sorted)
    note = (
        f"Weights over {keys} keys as multiples of the uniform weight 1/{keys} (dashed). Left: rows sorted from the "
        "largest weight, mean over queries;\nlinear up to 1, logarithmic beyond. Right: the largest weight of each row."
    )
    with rc_context(STYLE):
        figure = _page(3.8, "Over-local, over-smooth, and between", note, left=0.6, right=0.25, bottom=1.1, wspace=0.5)
        rows, largest = figure.subplots(1, 2)
        for score in numbers.scores:
            colour = MECHANISM_COLOURS[score.mechanism]
            rows.plot(range(1, keys + 1), score.mean_sorted, color=colour, linewidth=1.6)
            peaks = [keys * weight for weight in score.largest]
            above = [1 - step / len(peaks) for step in range(len(peaks))]
            largest.plot(peaks, above, color=colour, linewidth=1.6, drawstyle="steps-pre")
        _finish_rows(rows, keys)
        _finish_largest(largest, numbers)
        ends = [(score.mean_sorted[-1], LABELS[score.mechanism], score.mechanism) for score in numbers.scores]
        _end_labels(rows, ends, gap=0.06)
    return figure


def ranks_figure(numbers: Ranks) -> Figure:
    """Rank of the weight matrix on the left, effective rank on the right, against the number of tokens."""
    note = (
        f"Normal queries and keys, heads of width d = {numbers.width}. Left: singular values that are not zero. "
        "Right: exp of the entropy of the singular values."
    )
    with rc_context(STYLE):
        title = "How many different rows can be mixed?"
        figure = _page(3.6, title, note, left=0.45, right=0.75, bottom=0.9, wspace=0.52)
        for panel, exact in zip(figure.subplots(1, 2), (True, False), strict=True):
            panel.set_xscale("log", base=2)
            panel.set_yscale("log", base=2)
            panel.set_xlim(numbers.lengths[0], numbers.lengths[-1])
            panel.set_ylim(1.2, 1.15 * numbers.lengths[-1])
            panel.plot(numbers.lengths, numbers.lengths, **GUIDE)
            for curve in numbers.curves:
                ranks: Sequence[float] = curve.exact if exact else curve.effective
                # Dashes, where another line may lie below.
                dashes = (0, (4, 2)) if exact and curve.mechanism == "mala" else "-"
                colour = MECHANISM_COLOURS[curve.mechanism]
                panel.plot(numbers.lengths, ranks, color=colour, linewidth=1.6, linestyle=dashes)
            ends = [
                (float(curve.exact[-1] if exact else curve.effective[-1]), LABELS[curve.mechanism], curve.mechanism)
                for curve in numbers.curves
            ]
            if exact:
                bounds = {"linear": ": d", "inline": ": d + 1", "mala": ": d + 1", "nala": ": 2d", "softmax": ": N"}
                ends = [(rank, label + bounds[name], name) for rank, label, name in ends]
            _end_labels(panel, ends, gap=0.06)
            panel.set_title("rank" if exact else "effective rank", fontsize=9, loc="left")
            panel.set_xlabel("tokens N")
            ticks = [2**power for power in range(2, 9)]
            _ticks(panel, x=ticks, y=[2, *ticks])
    return figure


def _page(
    height: float,
    title: str,
    note: str,
    *,
    left: float,
    bottom: float,
    right: float = 0.2,
    top: float = 0.75,
    **gaps: float,
) -> Figure:
    # Margins in inches: whatever the height, title and note have the room they need.
    figure = Figure(figsize=(WIDTH, height))
    FigureCanvasAgg(figure)
    figure.subplots_adjust(left / WIDTH, bottom / height, 1 - right / WIDTH, 1 - top / height, **gaps)
    figure.text(0.2 / WIDTH, 1 - 0.15 / height, title, va="top", fontsize=14, fontweight="bold")
    figure.text(0.2 / WIDTH, 0.15 / height, note, va="bottom", fontsize=SMALL, linespacing=1.4)
    return figure


def _ticks(panel: Axes, x: Sequence[float], y: Sequence[float] = ()) -> None:
    panel.tick_params(length=0, labelcolor=INK)
    for axis, places in ((panel.xaxis, x), (panel.yaxis, y)):
        if places:
            axis.set_major_locator(FixedLocator(list(places)))
            axis.set_major_formatter(lambda value, _: f"{value:g}".replace("-", "−"))
            axis.set_minor_locator(NullLocator())


def _end_labels(panel: Axes, ends: Sequence[tuple[float, str, str]], gap: float) -> None:
    """Names to the right of where lines end, pushed apart by at least `gap` of the panel's height."""
    low, high = panel.get_ylim()
    scale = panel.yaxis.get_transform().transform
    first, last = (float(scale([limit])[0]) for limit in (low, high))
    spots = sorted(((float(scale([y])[0]) - first) / (last - first), label, name) for y, label, name in ends)
    shifted = [spot for spot, _, _ in spots]
    for _ in range(50):  # few labels: pushing neighbours apart settles quickly
        for i in range(len(shifted) - 1):
            overlap = gap - (shifted[i + 1] - shifted[i])
            if overlap > 0:
                shifted[i], shifted[i + 1] = max(0.0, shifted[i] - overlap / 2), shifted[i + 1] + overlap / 2
    for height, (_, label, name) in zip(shifted, spots, strict=True):
        colour = MECHANISM_COLOURS[name]
        panel.text(1.02, height, label, color=colour, fontsize=8.5, va="center", transform=panel.transAxes)


def _name(panel: Axes, spot: tuple[float, float], words: str, colour: str, shift: tuple[float, float]) -> None:
    panel.annotate(words, spot, shift, textcoords="offset points", color=colour, fontsize=8.5, va="center")


def _vectors(panel: Axes, numbers: Confusion) -> None:
    for step, (x, y) in enumerate(numbers.keys):
        panel.scatter(x, y, s=22, color=PALE, linewidths=0)
        panel.annotate(f"k{'₁₂₃₄'[step]}", (x, y), (5, 3), textcoords="offset points", fontsize=8)
    for step, (x, y) in enumerate(numbers.queries):
        panel.scatter(x, y, s=22, marker="D", color=INK, alpha=_shade(step, numbers.queries), linewidths=0)
    x, y = numbers.queries[-1]
    panel.plot((0, x), (0, y), color=INK, linewidth=0.6, zorder=0)
    panel.annotate("queries", (x, y), (7, 0), **BESIDE)
    panel.set_xlim(0, 2.35)
    panel.set_ylim(0, 2.35)
    panel.set_title("vectors", fontsize=9, fontweight="bold")
    _ticks(panel, x=(0, 1, 2), y=(0, 1, 2))


def _rows(panel: Axes, found: Rows) -> None:
    colour = MECHANISM_COLOURS[found.mechanism]
    places = range(1, len(found.rows[0]) + 1)
    for step, row in enumerate(found.rows):
        shade = _shade(step, found.rows)
        panel.plot(places, row, color=colour, alpha=shade, linewidth=1.3, marker="o", markersize=3)
    # At the outer keys, where labels cross no line.
    for place in (places[0], places[-1]):
        first, last = found.rows[0][place - 1], found.rows[-1][place - 1]
        up = 7 if last >= first else -7
        panel.annotate(f"{last:.2f}", (place, last), (0, up), ha="center", **BESIDE)
        if found.moved > 0.01:
            panel.annotate(f"{first:.2f}", (place, first), (0, -up), ha="center", **BESIDE)
    panel.set_xlim(0.5, len(places) + 0.5)
    panel.set_ylim(0, 0.52)
    panel.set_title(LABELS[found.mechanism], color=colour, fontsize=9, fontweight="bold")
    panel.set_xticks(list(places), [f"k{'₁₂₃₄'[place - 1]}" for place in places], fontsize=8)
    panel.tick_params(length=0, labelcolor=INK)


def _shade(step: int, steps: Sequence[Any]) -> float:
    return 0.3 + 0.7 * step / (len(steps) - 1)


def _collision_counts(panel: Axes, numbers: Confusion) -> None:
    panel.set_xscale("log")
    panel.set_yscale("symlog", linthresh=1.0, linscale=0.5)
    panel.set_xlim(numbers.tolerances[0], numbers.tolerances[-1])
    panel.set_ylim(-0.3, 2000)
    for count in numbers.counts:
        colour = MECHANISM_COLOURS[count.mechanism]
        panel.plot(numbers.tolerances, count.pairs, color=colour, linewidth=1.6, marker="o", markersize=3)
    ends = [(float(count.pairs[-1]), LABELS[count.mechanism], count.mechanism) for count in numbers.counts]
    _end_labels(panel, ends, gap=0.085)
    panel.set_xlabel("tolerance, in multiples of the uniform weight 1/N")
    panel.set_ylabel("pairs with one row")
    _ticks(panel, x=(), y=(0, 1, 10, 100, 1000))
    panel.xaxis.set_minor_locator(NullLocator())


def _name_signs(share: Axes, mass: Axes, total: Axes, numbers: SignsBySize) -> None:
    released, mala, inline = numbers.of("mala_released", True), numbers.of("mala", True), numbers.of("inline", False)
    gold, orange, green = (MECHANISM_COLOURS[name] for name in ("mala_released", "mala", "inline"))
    sizes = numbers.sizes
    _name(share, (sizes[0], released.negative_share[0]), LABELS["mala_released"], gold, (0, -16))
    _name(share, (sizes[1], mala.negative_share[1]), "MALA", orange, (-8, 10))
    _name(share, (sizes[3], inline.negative_share[3]), "InLine", green, (4, -10))
    _name(mass, (sizes[0], released.absolute_mass[0]), "as released", gold, (0, 8))
    _name(mass, (sizes[2], mala.absolute_mass[2]), "MALA", orange, (-28, 7))
    _name(mass, (sizes[3], inline.absolute_mass[3]), "InLine", green, (8, -3))
    _name(total, (sizes[0], released.row_sum[0]), LABELS["mala_released"], gold, (0, -34))
    _name(total, (sizes[0], 1.0), "MALA, centred: 1", orange, (0, 8))
    total.set_ylim(1.08 * min(released.lowest_sum), 3.5)


def _finish_rows(panel: Axes, keys: int) -> None:
    panel.set_yscale("symlog", linthresh=1.0)
    panel.set_xscale("log")
    panel.set_xlim(1, keys)
    panel.axhline(1, **GUIDE)
    panel.axhline(0, color=INK, linewidth=0.6)
    panel.set_ylim(-2, 60)
    panel.set_title("a row, sorted", fontsize=9, loc="left")
    panel.set_xlabel("rank of the key")
    panel.set_ylabel("weight × N")
    _ticks(panel, x=(1, 10, 100), y=(-1, 0, 1, 10, 100))


def _finish_largest(panel: Axes, numbers: Distributions) -> None:
    keys = len(numbers.scores[0].mean_sorted)
    for score in numbers.scores:
        late = keys * score.largest[int(0.8 * len(score.largest))]
        words = f"{LABELS[score.mechanism]}\nmean {score.p_max * keys:.1f}"
        _name(panel, (late, 0.2), words, MECHANISM_COLOURS[score.mechanism], (6, 4))
    panel.set_xscale("log")
    panel.set_xlim(0.9, 110)
    panel.set_ylim(0, 1.02)
    panel.axvline(1, **GUIDE)
    panel.set_title("largest weight of a row", fontsize=9, loc="left")
    panel.set_xlabel("largest weight × N, at least")
    panel.set_ylabel("share of the queries")
    _ticks(panel, x=(1, 2, 5, 10, 20, 50, 100))
    panel.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _minus(number: float) -> str:
    return f"{number:.2f}".replace("-", "−")
