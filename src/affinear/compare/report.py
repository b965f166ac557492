"""One HTML file of a comparison: what it says, the table, learning curves, and what the attention looks at."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from affinear.lens.glance import Map

from ..tasks.classify.variants import ROTARY
from ..train import page
from ..train.page import Line, png, round_values
from ..train.records import Record
from ..train.task import Measure, Task
from .cells import Outcome
from .findings import Conclusions, Summary, conclude, counted
from .screen import headings, legend, looked_into, result, row

if TYPE_CHECKING:
    from .experiment import Comparison, Results

THUMBNAIL = 96  # pixels of a test image in the report
ABOVE, BELOW = (217, 95, 2), (33, 102, 172)  # colours of weights, as in the lens


def html(results: Results) -> str:
    """One page, whole in itself, of what a comparison has so far.

    Args:
        results: Finished or not.
    """
    plan = results.comparison
    told = conclude(results.outcomes, plan.variants, plan.task, plan.opened.sizes[1])
    parts = [
        _about(results),
        _words(told),
        _table(told.summaries, plan),
        _figures(told.summaries, results.outcomes, plan),
        _maps(results),
        _cells(plan, results.outcomes),
        _recipe(plan),
    ]
    what = "Networks" if plan.whole else "Attention"
    return page.document(f"{what} compared on {plan.opened.name}", "\n".join(parts))


def _about(results: Results) -> str:
    plan = results.comparison
    total, done = len(plan.variants) * len(plan.seeds), len(results.outcomes)
    train, test = plan.opened.sizes
    length = counted(plan.recipe.epochs, "epoch") if plan.recipe.steps is None else f"{plan.recipe.steps:,} steps"
    size = plan.setup.fields().get("image_size")
    shown = "" if size is None else f", {'x'.join(map(str, size))} pixels"
    known = {
        "task": plan.task.about,
        "networks" if plan.whole else "network": ", ".join(
            [*plan.networks, *(f"{name}={value}" for name, value in plan.model_args.items())]
        ),
        "data": f"{train} {plan.task.samples} to learn from, {test} to be judged by{shown}",
        "training": f"{length} in batches of {plan.recipe.batch_size}",
        "seeds": ", ".join(map(str, plan.seeds)),
        "cells": f"{done} of {total}" + ("" if done == total else ": not finished, the same command goes on"),
    }
    note = (
        "Networks as they are, each with the weights that it draws for itself. All are trained by one recipe, and see "
        "the same batches in the same order."
        if plan.whole
        else "Only the attention differs: where networks have the same weights they begin with the same numbers, and "
        "all see the same batches in the same order."
    )
    return f'{page.terms(known)}<p class="note">{note}</p>'


def _words(told: Conclusions) -> str:
    decided = [finding for finding in told.findings if finding.decided]
    open_ones = [finding for finding in told.findings if not finding.decided]
    known = _list((finding.sentence for finding in decided), "decided") or "<p>No difference is decided.</p>"
    left = _list(finding.sentence for finding in open_ones)
    return (
        f"<h2>What can be concluded</h2>{known}<h2>What cannot be concluded</h2>{_list(told.limits)}"
        f"<details{'' if len(open_ones) > 6 else ' open'}><summary>{len(open_ones)} differences that are not decided"
        f"</summary>{left}</details>"
    )


def _list(sentences: Iterable[str], kind: str = "") -> str:
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f'<ul class="{kind}">{items}</ul>' if items else ""


def _table(summaries: Sequence[Summary], plan: Comparison) -> str:
    task, whole = plan.task, plan.whole
    seen = looked_into(summaries)
    columns = headings(task, whole, seen)
    head = "".join(f"<th>{escape(_one_line(name))}</th>" for name in columns)
    lines = "".join(
        f'<tr title="{escape(_what(task, summary.variant))}">'
        + "".join(f"<td>{escape(cell)}</td>" for cell in row(summary, task, whole)[: len(columns)])
        + "</tr>"
        for summary in summaries
    )
    return (
        f'<h2>The table</h2><p class="note">{escape(legend(task, whole, seen))} Several cells share the machine, so '
        f"{'ms/step' if task.pace == 'steps' else f'{task.unit}/s'} tells the variants apart and is no record.</p>"
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'
        f"<details><summary>What each variant is</summary>"
        f"{_list(f'{summary.variant}: {_what(task, summary.variant)}' for summary in summaries)}</details>"
    )


def _one_line(heading: str) -> str:
    return heading.replace("-\n", "").replace("\n/", "/").replace("\n", " ")


def _what(task: Task[Any, Any], name: str) -> str:
    try:
        return task.variant_about(name)
    except ValueError:
        return name


def _figures(summaries: Sequence[Summary], outcomes: Sequence[Outcome], plan: Comparison) -> str:
    metric, names = plan.task.metric, [summary.variant for summary in summaries]
    key = page.key([_line(name, names) for name in names])
    percent = "In percent by" if metric.scale == 100 else "By"

    def value(record: Record) -> float | None:
        return None if record.test is None else metric.scale * record.test[metric.name]

    def loss(record: Record) -> float | None:
        return record.train_loss

    across = "epoch" if plan.recipe.eval_steps is None else "step"
    drawn = (
        (f"{metric.title} on the test set", f"{percent} {across}, mean over seeds.", value),
        ("Training loss", f"By {across}, mean over seeds.", loss),
    )
    curves = "".join(
        f'<section><h3>{escape(heading)}</h3><p class="note">{note}</p>'
        f"{_curves(names, outcomes, across, wanted, heading)}</section>"
        for heading, note, wanted in drawn
    )
    return f'<h2>Learning</h2>{key}<div class="figures">{curves}</div>{_dots(summaries, metric)}'


def _line(name: str, names: Sequence[str], points: Sequence[tuple[float, float]] = ()) -> Line:
    """Colour by what stands before "+rotary", dashes where positions turn."""
    bases = list(dict.fromkeys(one.removesuffix(ROTARY) for one in names))
    return Line(name, points, bases.index(name.removesuffix(ROTARY)), name.endswith(ROTARY))


def _curves(
    names: Sequence[str],
    outcomes: Sequence[Outcome],
    across: str,
    value: Callable[[Record], float | None],
    heading: str,
) -> str:
    by_steps = across == "step"
    lines = [
        _line(name, names, _mean_curve([one for one in outcomes if one.variant == name], value, by_steps))
        for name in names
    ]
    every = [x for line in lines for x, _ in line.points]
    if not every:
        return '<p class="note">No epoch is over yet.</p>'
    return page.chart(lines, heading, across, max(every), min(every))


def _mean_curve(
    outcomes: Sequence[Outcome], value: Callable[[Record], float | None], by_steps: bool
) -> list[tuple[float, float]]:
    found: dict[int, list[float]] = {}
    for outcome in outcomes:
        for record in outcome.curve:
            known = value(record)
            if known is not None and math.isfinite(known):
                found.setdefault(record.step if by_steps else record.epoch, []).append(known)
    return [(where, statistics.fmean(values)) for where, values in sorted(found.items())]


def _dots(summaries: Sequence[Summary], metric: Measure) -> str:
    """A dot for each seed and a bar for their mean, variant by variant."""
    names = [summary.variant for summary in summaries]
    every = [value for summary in summaries for value in summary.values.values()]
    if not every:
        return ""
    low, high = min(every), max(every)
    margin = 0.08 * (high - low) or 0.5
    low, high = low - margin, high + margin

    def across(value: float) -> float:
        return 150 + 220 * (value - low) / (high - low)

    percent = " %" if metric.scale == 100 else ""
    lines: list[str] = []
    for number, summary in enumerate(summaries):
        height = 16 + 20 * number
        style = _line(summary.variant, names).stroke
        fill = style.split('"')[1].replace("stroke", "fill")
        dots = "".join(
            f'<circle cx="{across(value):.1f}" cy="{height}" r="4" fill-opacity=".55" style="{fill}">'
            f"<title>seed {seed}: {value:.4g}{percent}</title></circle>"
            for seed, value in summary.values.items()
        )
        mean = "" if summary.mean is None else f'<path d="M{across(summary.mean):.1f} {height - 7}v14" {style}/>'
        lines.append(
            f'<line class="axis" x1="150" x2="370" y1="{height}" y2="{height}"/><text x="144" y="{height + 4}" '
            f'text-anchor="end">{escape(summary.variant)}</text>{dots}{mean}'
        )
    bottom = 20 * len(summaries) + 20
    foot = "".join(
        f'<text x="{across(value):.1f}" y="{bottom}" text-anchor="middle">{value:.4g}</text>'
        for value in round_values(low, high)
    )
    return (
        '<h3>Every seed</h3><p class="note">'
        f"{escape(metric.title)} after the last step{', in percent' if percent else ''}: a dot is a seed, a bar their "
        "mean. Where dots of two variants mix, seeds decide more than the attention does.</p>"
        f'<svg viewBox="0 0 384 {bottom + 8}" role="img" aria-label="Every seed">'
        f"{''.join(lines)}{foot}</svg>"
    )


def _maps(results: Results) -> str:
    plan = results.comparison
    seed = plan.seeds[0]
    by_name = {outcome.variant: outcome.attention.maps for outcome in results.outcomes if outcome.seed == seed}
    sections: list[str] = []
    for number in sorted({one.image for maps in by_name.values() for one in maps}):
        these = {name: [one for one in by_name.get(name, ()) if one.image == number] for name in plan.variants}
        shown = plan.task.picture(plan.opened, number)
        if shown is not None:
            sections.append(_of_image(*shown, these, [one for maps in these.values() for one in maps]))
    if not sections:
        return ""
    return (
        '<h2>What one patch looks at</h2><p class="note">The marked patch is the one that differs most from the mean '
        "of its image. The maps are its weights in the first, the middle and the last layer, mean over heads, of the "
        f"networks with seed {seed}. Orange is above zero, blue below; colours grow with the square root of the "
        f"weight, up to what one weight in a hundred of an image's maps exceeds.</p>{''.join(sections)}"
    )


def _of_image(image: Image.Image, label: str, these: dict[str, list[Map]], every: Sequence[Map]) -> str:
    most = float(np.quantile([abs(value) for one in every for value in one.weights], 0.99)) or 1.0
    small = image.copy()
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    first = every[0]
    cards = [
        f'<figure><div class="map" style="width: 96px; height: 96px"><img alt="test image" src="{png(small)}">'
        f"{_mark(first)}</div><figcaption>{escape(label)}</figcaption></figure>"
    ]
    for name, maps in these.items():
        drawn = "".join(
            f'<div class="map"><img alt="weights" title="{escape(one.layer)}: up to {max(one.weights):.3g} times a '
            f'uniform weight" src="{png(_picture(one, most))}">{_mark(one)}</div>'
            for one in maps
        )
        if drawn:
            cards.append(f'<figure><div class="maps">{drawn}</div><figcaption>{escape(name)}</figcaption></figure>')
    return f'<h3>Test image {first.image}</h3><div class="cards">{"".join(cards)}</div>'


def _picture(drawn: Map, most: float) -> Image.Image:
    """Weights as pixels: colour by sign, opacity by size, so that light and dark pages both show through."""
    weights = np.array(drawn.weights).reshape(drawn.grid)
    pixels = np.empty((*drawn.grid, 4), np.uint8)
    pixels[..., :3] = np.where(weights[..., None] >= 0, ABOVE, BELOW)
    pixels[..., 3] = np.rint(255 * np.sqrt(np.clip(np.abs(weights) / most, 0, 1)))
    return Image.fromarray(pixels)


def _mark(drawn: Map) -> str:
    rows, columns = drawn.grid
    top, left = divmod(drawn.query, columns)
    place = (100 * left / columns, 100 * top / rows, 100 / columns, 100 / rows)
    return '<i style="left: {:.2f}%; top: {:.2f}%; width: {:.2f}%; height: {:.2f}%"></i>'.format(*place)


def _cells(plan: Comparison, outcomes: Sequence[Outcome]) -> str:
    done = {(outcome.variant, outcome.seed): outcome for outcome in outcomes}
    head = "".join(f"<th>seed {seed}</th>" for seed in plan.seeds)
    lines = "".join(
        f"<tr><td>{escape(name)}</td>"
        + "".join(_cell(done.get((name, seed)), plan.task.metric) for seed in plan.seeds)
        + "</tr>"
        for name in plan.variants
    )
    return (
        "<details><summary>Every cell</summary>"
        f'<div class="wide"><table><thead><tr><th>variant</th>{head}</tr></thead><tbody>{lines}</tbody></table></div>'
        "</details>"
    )


def _cell(outcome: Outcome | None, metric: Measure) -> str:
    if outcome is None:
        return "<td>-</td>"
    if outcome.error:
        return f'<td title="{escape(outcome.error)}">failed</td>'
    return f"<td>{escape(result(outcome, metric))}</td>"


def _recipe(plan: Comparison) -> str:
    settings = {name: value for name, value in plan.setup.fields().items() if name != "seed"}
    return f"<details><summary>The recipe</summary>{page.terms(settings)}</details>"
