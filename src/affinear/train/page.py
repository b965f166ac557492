"""A page of a report: one HTML file, whole in itself, with curves and pictures."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape as escape
from io import BytesIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image

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
p.headline { font-size: 2.4rem; line-height: 1.1; margin: .6rem 0 0; font-variant-numeric: tabular-nums; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 1rem; } dt { color: var(--pale); } dd { margin: 0; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; } thead th { color: var(--pale); font-weight: 600; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 0 2rem; }
.figures > section { min-width: 0; } svg { display: block; width: 100%; height: auto; max-width: 34rem; }
svg text { fill: var(--pale); font-size: 11px; } svg .axis { stroke: var(--line); }
svg path { fill: none; stroke-width: 1.8; stroke-linecap: round; }
svg .dashed { stroke-dasharray: 5 3; } svg circle { stroke: none; }
ul.key { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .1rem 1rem; font-size: .85rem; }
ul.key svg { display: inline-block; width: 28px; height: 10px; vertical-align: middle; margin-right: .3rem; }
summary { cursor: pointer; padding: .2rem 0; } .decided { font-weight: 600; }
.cards { display: flex; flex-wrap: wrap; gap: .6rem 1rem; align-items: flex-end; } figure { margin: 0; }
figure img { display: block; max-width: 100%; }
.maps { display: flex; gap: 3px; }
.map { position: relative; width: 64px; height: 64px; border: 1px solid var(--line); }
.map img { width: 100%; height: 100%; display: block; image-rendering: pixelated; }
.map i { position: absolute; box-sizing: border-box; border: 2px solid var(--mark); }
"""


@dataclass(frozen=True)
class Section:
    """A part of a report.

    Attributes:
        title: Its heading.
        html: What it shows; `figure`, `png`, `table` and `cards` make parts of it, all other text has to be escaped.
        note: A sentence below the heading that says what is seen.
    """

    title: str
    html: str
    note: str = ""


@dataclass(frozen=True)
class Line:
    """A curve of a chart.

    Attributes:
        name: For the key.
        points: Pairs of x and y, x rising.
        colour: From 0; wraps around.
        dashed: Whether it is drawn in dashes.
    """

    name: str
    points: Sequence[tuple[float, float]]
    colour: int = 0
    dashed: bool = False

    @property
    def stroke(self) -> str:
        """Its colour and dashes, as attributes."""
        dashes = ' class="dashed"' if self.dashed else ""
        return f'style="stroke: var(--c{self.colour % COLOURS})"{dashes}'


def document(title: str, body: str) -> str:
    """A whole page. It loads nothing, follows the reader's choice of light or dark, and fits a phone."""
    # The policy is a promise that the reader's browser keeps: nothing is loaded from anywhere.
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        'img-src data:; media-src data:">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><h1>{escape(title)}</h1>\n"
        f"{body}\n</body></html>\n"
    )


def section(shown: Section) -> str:
    """A section as HTML."""
    note = f'<p class="note">{escape(shown.note)}</p>' if shown.note else ""
    return f"<h2>{escape(shown.title)}</h2>{note}{shown.html}"


def terms(known: Mapping[str, object]) -> str:
    """Names and what they stand for.

    Examples:
        >>> terms({"network": "mavit_tiny"})
        '<dl><dt>network</dt><dd>mavit_tiny</dd></dl>'
    """
    rows = "".join(f"<dt>{escape(key)}</dt><dd>{escape(str(value))}</dd>" for key, value in known.items())
    return f"<dl>{rows}</dl>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of texts."""
    titles = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{titles}</tr></thead><tbody>{lines}</tbody></table></div>'


def cards(figures: Sequence[str]) -> str:
    """Figures side by side, as many as there is room for."""
    return f'<div class="cards">{"".join(figures)}</div>'


def figure(picture: str, caption: str, alt: str = "", width: int | None = None) -> str:
    """A picture with words below it.

    Args:
        picture: What `png` gave.
        caption: The words.
        alt: What the picture shows, for those who do not see it; the caption if empty.
        width: In pixels of the page; the picture's own if None.
    """
    wide = "" if width is None else f' style="width: {width}px"'
    shown = f'<img alt="{escape(alt or caption)}"{wide} src="{picture}">'
    return f"<figure{wide}>{shown}<figcaption>{escape(caption)}</figcaption></figure>"


def png(image: Image.Image) -> str:
    """A picture as the address of an `img`."""
    held = BytesIO()
    image.save(held, "PNG")
    return "data:image/png;base64," + base64.b64encode(held.getvalue()).decode()


def key(lines: Sequence[Line]) -> str:
    """Which line is which."""
    items = "".join(
        f'<li><svg viewBox="0 0 28 10" aria-hidden="true"><path d="M0 5H28" {line.stroke}/></svg>'
        f"{escape(line.name)}</li>"
        for line in lines
    )
    return f'<ul class="key">{items}</ul>'


def chart(lines: Sequence[Line], title: str, across: str, last: float, first: float = 1) -> str:
    """Curves over epochs or steps.

    Args:
        lines: What to draw.
        title: For those who do not see it.
        across: What x counts.
        last: The largest x.
        first: The smallest x.
    """
    # What happens in the first quarter would press the rest together; lines that begin below are cut off.
    late = [y for line in lines for x, y in line.points if x >= last / 4 and math.isfinite(y)]
    if not late:
        return '<p class="note">Nothing was measured yet.</p>'
    low, high = min(late), max(late)
    margin = 0.05 * (high - low) or abs(high) * 0.05 or 0.5
    low, high = low - margin, high + margin

    def point(x: float, y: float) -> str:
        return f"{44 + 300 * (x - first) / max(last - first, 1e-9):.1f} {200 - 185 * (y - low) / (high - low):.1f}"

    def path(line: Line) -> str:
        known = [point(x, y) for x, y in line.points if math.isfinite(y)]
        return "M" + "L".join(known) + ("h0" if len(known) == 1 else "")  # a dot, as the ends of lines are round

    paths = "".join(
        f'<path d="{path(line)}" {line.stroke}><title>{escape(line.name)}: {line.points[-1][1]:.4g}</title></path>'
        for line in lines
        if line.points
    )
    ticks = "".join(_tick(value, 200 - 185 * (value - low) / (high - low)) for value in round_values(low, high))
    foot = f'<text x="44" y="216">{first:,.0f}</text><text x="344" y="216" text-anchor="end">{last:,.0f}</text>'
    foot += f'<text x="194" y="216" text-anchor="middle">{escape(across)}</text>'
    name = "plot-" + "".join(sign if sign.isalnum() else "-" for sign in title.lower())
    frame = f'<clipPath id="{name}"><rect x="44" y="10" width="301" height="192"/></clipPath>'
    return (
        f'<svg viewBox="0 0 352 222" role="img" aria-label="{escape(title)}">{frame}{ticks}'
        f'<g clip-path="url(#{name})">{paths}</g>{foot}</svg>'
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
        f'<text x="39" y="{height + 4:.1f}" text-anchor="end">{_short(value)}</text>'
    )


def _short(value: float) -> str:
    """A number in the six signs that fit beside a chart."""
    told = (f"{value:.4g}", f"{value:.6g}", f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e"))
    return next((text for text in told if len(text) <= 6), told[-1])
