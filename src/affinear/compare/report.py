"""One HTML file of a comparison: what it says, the table, learning curves, and what the attention looks at."""

from __future__ import annotations

import base64
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from html import escape
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from ..tasks.classify.data import Images
from ..tasks.classify.variants import ROTARY, variant
from ..train.records import EpochRecord
from .cells import SHOWN, Map, Outcome, chosen
from .findings import Conclusions, Summary, conclude, counted
from .screen import HEADINGS, LEGEND, row

if TYPE_CHECKING:
    from .experiment import Comparison, Results

THUMBNAIL = 96  # pixels of a test image in the report
ABOVE, BELOW = (217, 95, 2), (33, 102, 172)  # colours of weights, as in the lens
COLOURS = 8

STYLE = """
:root { color-scheme: light dark; --ink: #22262e; --pale: #6b7280; --line: #d9dce2; --page: #ffffff; --mark: #16a34a;
  --c0: #2166ac; --c1: #7c3aed; --c2: #6b7280; --c3: #0d9488; --c4: #ca8a04; --c5: #dc2626; --c6: #be185d;
  --c7: #4d7c0f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ec; --pale: #9aa1ad; --line: #3a404b; --page: #15181d;
  --mark: #4ade80; --c0: #7cb3ea; --c1: #c4a5ff; --c2: #b3bac6; --c3: #5eead4; --c4: #facc15; --c5: #f87171;
  --c6: #f9a8d4; --c7: #bef264; } }
body { color: var(--ink); background: var(--page); font: 16px/1.5 system-ui, sans-serif; max-width: 68rem;
  margin: 0 auto; padding: 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.2; } h2 { font-size: 1.2rem; margin-top: 2rem; } h3 { font-size: 1rem; }
.wide { overflow-x: auto; } p.note, figcaption { color: var(--pale); margin: 0 0 .5rem; font-size: .9rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 1rem; } dt { color: var(--pale); } dd { margin: 0; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; } thead th { color: var(--pale); font-weight: 600; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 0 2rem; }
.figures > section { min-width: 0; } svg { display: block; width: 100%; height: auto; max-width: 34rem; }
svg text { fill: var(--pale); font-size: 11px; } svg .axis { stroke: var(--line); }
svg path { fill: none; stroke-width: 1.8; } svg .dashed { stroke-dasharray: 5 3; } svg circle { stroke: none; }
ul.key { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .1rem 1rem; font-size: .85rem; }
ul.key svg { display: inline-block; width: 28px; height: 10px; vertical-align: middle; margin-right: .3rem; }
summary { cursor: pointer; padding: .2rem 0; } .decided { font-weight: 600; }
.cards { display: flex; flex-wrap: wrap; gap: .6rem 1rem; align-items: flex-end; } figure { margin: 0; }
.maps { display: flex; gap: 3px; }
.map { position: relative; width: 64px; height: 64px; border: 1px solid var(--line); }
.map img { width: 100%; height: 100%; display: block; image-rendering: pixelated; }
.map i { position: absolute; box-sizing: border-box; border: 2px solid var(--mark); }
"""


def html(results: Results) -> str:
    """One page, whole in itself, of what a comparison has so far.

    It loads nothing, follows the reader's choice of light or dark, and fits a phone.

    Args:
        results: Finished or not.
    """
    plan = results.comparison
    told = conclude(results.outcomes, plan.variants, len(plan.images.test))
    title = f"Attention compared on {plan.images.name}"
    # The policy is a promise that the reader's browser keeps: nothing is loaded from anywhere.
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        'img-src data:">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><h1>{escape(title)}</h1>\n"
        f"{_about(results)}\n{_words(told)}\n{_table(told.summaries)}\n"
        f"{_figures(told.summaries, results.outcomes, plan.recipe.epochs)}\n{_maps(plan.images, results)}\n"
        f"{_cells(plan, results.outcomes)}\n{_recipe(plan)}\n</body></html>\n"
    )


def _about(results: Results) -> str:
    plan = results.comparison
    total, done = len(plan.variants) * len(plan.seeds), len(results.outcomes)
    size = "x".join(map(str, plan.recipe.image_size)) + " pixels" if plan.recipe.image_size else "its own size"
    known = {
        "network": ", ".join([plan.model, *(f"{name}={value}" for name, value in plan.model_args.items())]),
        "images": f"{len(plan.images.train)} to learn from, {len(plan.images.test)} to be judged by, {size}",
        "training": f"{counted(plan.recipe.epochs, 'epoch')} in batches of {plan.recipe.batch_size}",
        "seeds": ", ".join(map(str, plan.seeds)),
        "cells": f"{done} of {total}" + ("" if done == total else ": not finished, the same command goes on"),
    }
    terms = "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in known.items())
    note = (
        "Only the attention differs: where networks have the same weights they begin with the same numbers, and all "
        "see the same batches in the same order."
    )
    return f'<dl>{terms}</dl><p class="note">{note}</p>'


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


def _table(summaries: Sequence[Summary]) -> str:
    head = "".join(f"<th>{escape(_one_line(name))}</th>" for name in HEADINGS)
    lines = "".join(
        f'<tr title="{escape(_what(summary.variant))}">'
        + "".join(f"<td>{escape(cell)}</td>" for cell in row(summary))
        + "</tr>"
        for summary in summaries
    )
    return (
        f'<h2>The table</h2><p class="note">{escape(LEGEND)} Several cells share the machine, so images/s tells the '
        "variants apart and is no record.</p>"
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'
        f"<details><summary>What each variant is</summary>"
        f"{_list(f'{summary.variant}: {_what(summary.variant)}' for summary in summaries)}</details>"
    )


def _one_line(heading: str) -> str:
    return heading.replace("-\n", "").replace("\n/", "/").replace("\n", " ")


def _what(name: str) -> str:
    try:
        return variant(name).about
    except ValueError:
        return "the network as it is"


def _figures(summaries: Sequence[Summary], outcomes: Sequence[Outcome], epochs: int) -> str:
    names = [summary.variant for summary in summaries]
    key = "".join(
        f'<li><svg viewBox="0 0 28 10" aria-hidden="true"><path d="M0 5H28" {_stroke(name, names)}/></svg>'
        f"{escape(name)}</li>"
        for name in names
    )
    drawn = (
        ("Test images told right", "In percent by epoch, mean over seeds.", _accuracy),
        ("Training loss", "By epoch, mean over seeds.", _loss),
    )
    curves = "".join(
        f'<section><h3>{heading}</h3><p class="note">{note}</p>'
        f"{_curves(names, outcomes, epochs, value, heading)}</section>"
        for heading, note, value in drawn
    )
    return f'<h2>Learning</h2><ul class="key">{key}</ul><div class="figures">{curves}</div>{_dots(summaries)}'


def _accuracy(record: EpochRecord) -> float | None:
    return None if record.top1 is None else 100 * record.top1


def _loss(record: EpochRecord) -> float | None:
    return record.train_loss


def _stroke(name: str, names: Sequence[str]) -> str:
    """Colour by what stands before "+rotary", dashes where positions turn."""
    bases = list(dict.fromkeys(one.removesuffix(ROTARY) for one in names))
    colour = bases.index(name.removesuffix(ROTARY)) % COLOURS
    dashed = ' class="dashed"' if name.endswith(ROTARY) else ""
    return f'style="stroke: var(--c{colour})"{dashed}'


def _curves(
    names: Sequence[str],
    outcomes: Sequence[Outcome],
    epochs: int,
    value: Callable[[EpochRecord], float | None],
    heading: str,
) -> str:
    lines = {name: _mean_curve([outcome for outcome in outcomes if outcome.variant == name], value) for name in names}
    # What happens in the first quarter would press the rest together; lines that begin below are cut off.
    late = [y for line in lines.values() for x, y in line if x >= epochs / 4]
    if not late:
        return '<p class="note">No epoch is over yet.</p>'
    low, high = min(late), max(late)
    margin = 0.05 * (high - low) or 0.5
    low, high = low - margin, high + margin

    def point(x: float, y: float) -> str:
        across = 44 + 300 * (x - 1) / max(epochs - 1, 1)
        return f"{across:.1f} {200 - 185 * (y - low) / (high - low):.1f}"

    paths = "".join(
        f'<path d="M{"L".join(point(x, y) for x, y in line)}" {_stroke(name, names)}><title>{escape(name)}: '
        f"{line[-1][1]:.4g}</title></path>"
        for name, line in lines.items()
        if line
    )
    ticks = "".join(_tick(value, 200 - 185 * (value - low) / (high - low)) for value in round_values(low, high))
    foot = f'<text x="44" y="216">1</text><text x="344" y="216" text-anchor="end">{epochs}</text>'
    foot += '<text x="194" y="216" text-anchor="middle">epoch</text>'
    plot = f"plot-{value.__name__.strip('_')}"
    frame = f'<clipPath id="{plot}"><rect x="44" y="10" width="301" height="192"/></clipPath>'
    return (
        f'<svg viewBox="0 0 352 222" role="img" aria-label="{escape(heading)}">{frame}{ticks}'
        f'<g clip-path="url(#{plot})">{paths}</g>{foot}</svg>'
    )


def round_values(low: float, high: float) -> list[float]:
    """Round numbers between two others, three to seven of them.

    Example:
        >>> round_values(70.2, 99.1)
        [75.0, 80.0, 85.0, 90.0, 95.0]
    """
    rough = (high - low) / 6
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough * (1 - 1e-9))
    return [step * number for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _tick(value: float, height: float) -> str:
    return (
        f'<line class="axis" x1="44" x2="344" y1="{height:.1f}" y2="{height:.1f}"/>'
        f'<text x="39" y="{height + 4:.1f}" text-anchor="end">{value:.4g}</text>'
    )


def _mean_curve(outcomes: Sequence[Outcome], value: Callable[[EpochRecord], float | None]) -> list[tuple[int, float]]:
    by_epoch: dict[int, list[float]] = {}
    for outcome in outcomes:
        for record in outcome.curve:
            found = value(record)
            if found is not None and math.isfinite(found):
                by_epoch.setdefault(record.epoch, []).append(found)
    return [(epoch, statistics.fmean(values)) for epoch, values in sorted(by_epoch.items())]


def _dots(summaries: Sequence[Summary]) -> str:
    """A dot for each seed and a bar for their mean, variant by variant."""
    names = [summary.variant for summary in summaries]
    every = [value for summary in summaries for value in summary.top1.values()]
    if not every:
        return ""
    low, high = min(every), max(every)
    margin = 0.08 * (high - low) or 0.5
    low, high = low - margin, high + margin

    def across(value: float) -> float:
        return 150 + 220 * (value - low) / (high - low)

    lines: list[str] = []
    for number, summary in enumerate(summaries):
        height = 16 + 20 * number
        style = _stroke(summary.variant, names)
        fill = style.split('"')[1].replace("stroke", "fill")
        dots = "".join(
            f'<circle cx="{across(value):.1f}" cy="{height}" r="4" fill-opacity=".55" style="{fill}">'
            f"<title>seed {seed}: {value:.2f} %</title></circle>"
            for seed, value in summary.top1.items()
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
        '<h3>Every seed</h3><p class="note">Test images told right after the last epoch, in percent: a dot is a seed, '
        "a bar their mean. Where dots of two variants mix, seeds decide more than the attention does.</p>"
        f'<svg viewBox="0 0 384 {bottom + 8}" role="img" aria-label="Accuracy of every seed">'
        f"{''.join(lines)}{foot}</svg>"
    )


def _maps(images: Images, results: Results) -> str:
    plan = results.comparison
    seed = plan.seeds[0]
    by_name = {outcome.variant: outcome.attention.maps for outcome in results.outcomes if outcome.seed == seed}
    sections: list[str] = []
    for number, image in chosen(images.test, SHOWN):
        these = {name: [one for one in by_name.get(name, ()) if one.image == number] for name in plan.variants}
        every = [one for maps in these.values() for one in maps]
        if every:
            sections.append(_of_image(image, images.class_names[images.test[number][1]], these, every))
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
        f'<figure><div class="map" style="width: 96px; height: 96px"><img alt="test image" src="{_png(small)}">'
        f"{_mark(first)}</div><figcaption>{escape(label)}</figcaption></figure>"
    ]
    for name, maps in these.items():
        drawn = "".join(
            f'<div class="map"><img alt="weights" title="{escape(one.layer)}: up to {max(one.weights):.3g} times a '
            f'uniform weight" src="{_png(_picture(one, most))}">{_mark(one)}</div>'
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


def _png(image: Image.Image) -> str:
    held = BytesIO()
    image.save(held, "PNG")
    return "data:image/png;base64," + base64.b64encode(held.getvalue()).decode()


def _cells(plan: Comparison, outcomes: Sequence[Outcome]) -> str:
    done = {(outcome.variant, outcome.seed): outcome for outcome in outcomes}
    head = "".join(f"<th>seed {seed}</th>" for seed in plan.seeds)
    lines = "".join(
        f"<tr><td>{escape(name)}</td>{''.join(_cell(done.get((name, seed))) for seed in plan.seeds)}</tr>"
        for name in plan.variants
    )
    return (
        "<details><summary>Every cell</summary>"
        f'<div class="wide"><table><thead><tr><th>variant</th>{head}</tr></thead><tbody>{lines}</tbody></table></div>'
        "</details>"
    )


def _cell(outcome: Outcome | None) -> str:
    if outcome is None:
        return "<td>-</td>"
    if outcome.error:
        return f'<td title="{escape(outcome.error)}">failed</td>'
    return f"<td>{100 * outcome.top1:.2f} %, {outcome.seconds:.0f} s</td>"


def _recipe(plan: Comparison) -> str:
    settings = {name: value for name, value in asdict(plan.recipe).items() if name != "seed"}
    terms = "".join(f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in settings.items())
    return f"<details><summary>The recipe</summary><dl>{terms}</dl></details>"
