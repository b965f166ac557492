"""One HTML file that says what the attention of a network did, and the images it was shown."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from affinear.lens.budget import check_size
from affinear.lens.watching import LayerReport, Watched

if TYPE_CHECKING:
    from PIL import Image

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
ROUNDING = 1e-3  # a row further than this from summing to one is so by design, not by rounding
NONE = "-"  # in a table, where a number does not apply
LOCAL = 1.1  # a neighbourhood that weighs less than so many uniform ones is nothing special
STEEP = 0.1  # a correlation nearer to zero than this says nothing

# Head, field of a report, and what it means, as the tables show them.
COLUMNS = (
    ("entropy", "entropy", "in nats"),
    ("entropy share", "entropy_share", "entropy over the log of the number of keys: 1 is uniform, 0 a single key"),
    ("effective keys", "effective_keys", "exp of the entropy"),
    ("largest weight", "largest_weight", "of a row"),
    ("negative share", "negative_share", "how many of the weights are negative"),
    ("negative mass", "negative_mass", "sum of |w| over the negative weights of a row"),
    ("absolute mass", "absolute_mass", "sum of |w| over a row"),
    ("row sum error", "row_sum_error", "the largest distance of a row's sum from one"),
    ("norm correlation", "norm_correlation", "rank correlation of a row's entropy and its query's norm"),
    ("3 x 3 weight", "neighbourhood", "weight of the places around the query"),
    ("3 x 3 uniform", "neighbourhood_uniform", "what a uniform row has there"),
    ("distance", "distance", "mean distance of query and key, in places"),
)

# Those of them that the table of layers has room for.
MAIN = tuple(
    column
    for column in COLUMNS
    if column[1] not in ("entropy", "negative_mass", "absolute_mass", "neighbourhood_uniform")
)

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"

STYLE = """
:root { color-scheme: light dark; --ink: #22262e; --pale: #6b7280; --line: #d9dce2; --page: #ffffff;
  --linear: #c2410c; --softmax: #2166ac; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ec; --pale: #9aa1ad; --line: #3a404b; --page: #15181d;
  --linear: #fb923c; --softmax: #7cb3ea; } }
body { color: var(--ink); background: var(--page); font: 16px/1.5 system-ui, sans-serif; max-width: 68rem;
  margin: 0 auto; padding: 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.2; } h2 { font-size: 1.2rem; margin-top: 2rem; } h3 { font-size: 1rem; }
.wide { overflow-x: auto; } section { min-width: 0; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 0 2rem; }
p.note { color: var(--pale); margin: 0 0 .5rem; font-size: .9rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 1rem; } dt { color: var(--pale); }
dd { margin: 0; } table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child, .text { text-align: left; } thead th { color: var(--pale); font-weight: 600; }
summary { cursor: pointer; padding: .2rem 0; } svg { display: block; width: 100%; height: auto; }
thead th { white-space: normal; vertical-align: bottom; } table.layers { width: 100%; }
table.layers th, table.layers td { padding: .2rem .35rem; } table.layers .text { white-space: normal; }
.maps { display: grid; grid-template-columns: repeat(auto-fill, minmax(6.5rem, 1fr)); gap: .5rem; }
.maps { margin: .5rem 0 1.5rem; }
.maps figure { margin: 0; } .maps img { display: block; width: 100%; }
figcaption { color: var(--pale); font-size: .75rem; line-height: 1.3; }
svg text { fill: var(--pale); font-size: 11px; } svg .axis { stroke: var(--line); }
.linear { fill: var(--linear); stroke: var(--linear); } .softmax { fill: var(--softmax); stroke: var(--softmax); }
svg circle { stroke: none; fill-opacity: .45; } svg .mean { stroke-width: 3; }
svg .reference { stroke: var(--ink); stroke-width: 1.5; stroke-dasharray: 3 2; }
.key { font-weight: 700; stroke: none; } b.linear { color: var(--linear); } b.softmax { color: var(--softmax); }
"""


@dataclass(frozen=True)
class Images:
    """Images of a folder, ready for a network.

    Attributes:
        pixels: (B, C, H, W), of the network's channels, normalised as the network wants it, float32 on the CPU.
        names: Of the files, within the folder.
        skipped: Names of files that could not be read, each with the reason.
    """

    pixels: Tensor
    names: tuple[str, ...]
    skipped: tuple[str, ...]


def html(watched: Watched, *, title: str, about: Mapping[str, str], maps: str = "") -> str:
    """One page, whole in itself, with a summary in words, figures and every number.

    It loads nothing, follows the reader's choice of light or dark, and is the same for the same numbers.

    Args:
        watched: What `watch` saw.
        title: Of the page.
        about: What else to say about the run, such as {"model": "mavit_tiny", "images": "16"}.
        maps: What `affinear.lens.maps.section` made, to be shown before the tables.

    Raises:
        ValueError: If no layer was seen at work.

    Example:
        >>> import timm, torch
        >>> import affinear.models
        >>> from affinear.lens.report import html
        >>> from affinear.lens.watching import watch
        >>> model = timm.create_model("inline_deit_tiny", depth=2, img_size=64).eval()
        >>> with watch(model, rows=8) as watched, torch.no_grad():
        ...     _ = model(torch.randn(2, 3, 64, 64))
        >>> page = html(watched, title="InLine at work", about={"images": "2, random"})
        >>> page.startswith("<!DOCTYPE html>"), "http" in page.replace("http-equiv", "")
        (True, False)
    """
    layers = watched.layers
    if not layers:
        raise ValueError(
            "watched: expected layers that were called, got none; call the network, as it is and not compiled, inside "
            "`with watch(model)`"
        )
    told = "".join(f"<li>{escape(sentence)}</li>" for sentence in summary(watched))
    known = "".join(f"<dt>{escape(str(key))}</dt><dd>{escape(str(value))}</dd>" for key, value in about.items())
    # The policy is a promise that the reader's browser keeps: nothing is loaded from anywhere.
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><h1>{escape(title)}</h1>\n"
        f"<dl>{known}</dl>\n<h2>In words</h2><ul>{told}</ul>\n{_figures(layers)}\n{maps}\n{_overview(layers)}\n"
        f"{_by_head(layers)}\n</body></html>\n"
    )


def summary(watched: Watched) -> list[str]:
    """What the numbers say, in sentences.

    Example:
        >>> from affinear.lens.report import summary
        >>> from affinear.lens.watching import Watched
        >>> summary(Watched({}, ("blocks.0.attn (StrangeAttention)",)))
        ['1 layer looks like attention but could not be read: blocks.0.attn (StrangeAttention).']
    """
    layers = watched.layers
    told = [*_kinds(layers), *_unsound(layers), *_negatives(layers), *_row_sums(layers), *_sharpness(layers)]
    told += [*_locality(layers), *_correlations(layers), *_biases(layers)]
    if watched.unread:
        many = f"{len(watched.unread)} layers look" if len(watched.unread) > 1 else "1 layer looks"
        told.append(f"{many} like attention but could not be read: {', '.join(watched.unread)}.")
    return told


def batch_of_images(folder: Path, model: nn.Module, limit: int, size: tuple[int, int] | None = None) -> Images:
    """Images of a folder and the folders in it, as the network wants them.

    Files are taken evenly from all of them, so that one class does not fill the batch. Grey, transparent, CMYK and
    palette images become RGB, as in training. What cannot be read, or is so large that PIL takes it for an attack, is
    skipped with the reason.

    Args:
        folder: With .jpg, .jpeg, .png or .webp files.
        model: A network that timm can make a transform for.
        limit: At most so many images.
        size: Height and width; those that the network was made for if None.

    Raises:
        ValueError: If there is no image that can be read.

    Example:
        >>> import tempfile, timm
        >>> from pathlib import Path
        >>> from PIL import Image
        >>> from affinear.lens.report import batch_of_images
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     Image.new("L", (300, 200)).save(Path(folder, "grey.png"))
        ...     batch_of_images(Path(folder), timm.create_model("resnet18"), 8).pixels.shape
        torch.Size([1, 3, 224, 224])
    """
    if limit < 1:
        raise ValueError(f"limit: expected at least one image, got {limit}")
    if not folder.is_dir():
        raise ValueError(f"folder: expected a folder of images, got {folder}, which is none")
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    transform = _transform(model, size)
    pixels: list[Tensor] = []
    names: list[str] = []
    skipped: list[str] = []
    for path in _spread(paths, limit):
        name = path.relative_to(folder).as_posix()
        try:
            image = _read(path)
        except Exception as error:  # whatever a broken file makes a decoder do
            skipped.append(f"{name}: {str(error) or type(error).__name__}")
            continue
        pixels.append(transform(image))
        names.append(name)
        if len(pixels) == limit:
            break
    if not pixels:
        found = f"; skipped {'; '.join(skipped[:3])}{' ...' if len(skipped) > 3 else ''}" if skipped else ""
        raise ValueError(
            f"folder: expected images that can be read ({', '.join(SUFFIXES)}), got none in {folder}{found}"
        )
    return Images(torch.stack(pixels), tuple(names), tuple(skipped))


def _transform(model: nn.Module, size: tuple[int, int] | None) -> Callable[[Image.Image], Tensor]:
    from timm.data import create_transform, resolve_data_config

    config: dict[str, Any] = resolve_data_config({}, model=model)
    fixed: Any = getattr(getattr(model, "patch_embed", None), "img_size", None)
    if isinstance(fixed, (tuple, list)):  # made for another size than the one it was published with
        config["input_size"] = (config["input_size"][0], *fixed)
    if size is not None:
        config["input_size"] = (config["input_size"][0], *size)
    ready: Any = create_transform(**config)
    return (lambda image: ready(image.convert("L"))) if config["input_size"][0] == 1 else ready


def _spread(paths: Sequence[Path], limit: int) -> Iterable[Path]:
    """All paths, first so many that lie evenly among them."""
    step = max(1, len(paths) // limit)
    return (path for start in range(step) for path in paths[start::step])


def _read(path: Path) -> Image.Image:
    """The file as RGB."""
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of large images and odd metadata; what PIL refuses it still refuses
        with Image.open(path) as image:
            check_size(*image.size)
            if image.mode.startswith("I;16"):
                return image.point(lambda value: value / 256).convert("L").convert("RGB")
            # By way of RGBA, as PIL asks for palettes whose colours are transparent.
            return (image.convert("RGBA") if "transparency" in image.info else image).convert("RGB")


def _mean(values: Tensor | None) -> float:
    return math.nan if values is None else values.mean().item()


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.1 or share == 0 else f"{100 * share:.2g} %"


def _plural(numbers: Sequence[int]) -> str:
    """Names of layers by number: "layer 3", "layers 3 to 6", "layers 1, 2 and 5"."""
    if len(numbers) == 1:
        return f"layer {numbers[0]}"
    if len(numbers) > 2 and list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"layers {numbers[0]} to {numbers[-1]}"
    return f"layers {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


def _kinds(layers: Sequence[LayerReport]) -> list[str]:
    """Which mechanism each run of layers has."""
    told: list[str] = []
    for name, group in groupby(enumerate(layers, 1), key=lambda entry: entry[1].mechanism):
        numbers = [number for number, _ in group]
        linear = ", linear" if layers[numbers[0] - 1].linear else ""
        verb = "is" if len(numbers) == 1 else "are"
        told.append(f"{_plural(numbers).capitalize()} {verb} {name}{linear}.")
    return told


def _unsound(layers: Sequence[LayerReport]) -> list[str]:
    bad = [number for number, layer in enumerate(layers, 1) if not layer.entropy.isfinite().all()]
    return [f"Weights of {_plural(bad)} are not finite: the numbers there mean nothing."] if bad else []


def _stage(name: str) -> int | None:
    """Number of the stage that a layer's name tells, from one."""
    found = re.match(r"(?:.*\.)?(?:stages|layers)[._](\d+)\.", name)
    return None if found is None else int(found[1]) + 1


def _negatives(layers: Sequence[LayerReport]) -> list[str]:
    linear = [(number, layer) for number, layer in enumerate(layers, 1) if layer.linear]
    if not linear:
        return []
    if all(layer.negative_share.max() == 0 for _, layer in linear):
        return ["No weight of a linear layer is negative."]
    told: list[str] = []
    for stage, group in groupby(linear, key=lambda entry: _stage(entry[1].name)):
        found = list(group)
        share = sum(_mean(layer.negative_share) for _, layer in found) / len(found)
        mass = sum(_mean(layer.negative_mass / layer.absolute_mass) for _, layer in found) / len(found)
        where = _plural([number for number, _ in found])
        where = where if stage is None else f"stage {stage} ({where})"
        told.append(f"{_percent(share)} of the weights in {where} are negative, with {_percent(mass)} of all |w|.")
    return told


def _row_sums(layers: Sequence[LayerReport]) -> list[str]:
    errors = [
        (layer.row_sum_error.max().item(), number, layer) for number, layer in enumerate(layers, 1) if layer.linear
    ]
    if not errors:
        return []
    far = [(error, number, layer) for error, number, layer in errors if not error <= ROUNDING]
    if not far:
        power = math.ceil(math.log10(max(1e-7, *(error for error, _, _ in errors))))
        return [f"No row of a linear layer is more than 1e{power} from summing to one."]
    worst, number, layer = max(far, key=lambda entry: entry[0])
    return [
        f"Rows of {_plural([number for _, number, _ in far])} do not all sum to one: in layer {number} "
        f"({layer.mechanism}) a row is {worst:.2g} away."
    ]


def _sharpness(layers: Sequence[LayerReport]) -> list[str]:
    known = [(_mean(layer.entropy_share), number, layer) for number, layer in enumerate(layers, 1)]
    known = [entry for entry in known if math.isfinite(entry[0])]
    if len(known) < 2:
        return []

    def told(entry: tuple[float, int, LayerReport]) -> str:
        keys = _number(_mean(entry[2].effective_keys))
        return f"layer {entry[1]}, with {100 * entry[0]:.3g} % of the entropy of a uniform row ({keys} effective keys)"

    sharp, flat = (choose(known, key=lambda entry: entry[0]) for choose in (min, max))
    return [f"Sharpest is {told(sharp)}; flattest is {told(flat)}."]


def _locality(layers: Sequence[LayerReport]) -> list[str]:
    known = [
        (_mean(layer.neighbourhood) / _mean(layer.neighbourhood_uniform), number)
        for number, layer in enumerate(layers, 1)
    ]
    known = [entry for entry in known if math.isfinite(entry[0])]
    if not known:
        return []
    most, number = max(known)
    if most < LOCAL:
        return ["No layer looks at the 3 x 3 places around a query much more than a uniform row does."]
    return [
        f"Layer {number} looks most at the 3 x 3 places around a query: {most:.2g} times what a uniform row has there."
    ]


def _correlations(layers: Sequence[LayerReport]) -> list[str]:
    known = [_mean(layer.norm_correlation) for layer in layers]
    known = [value for value in known if math.isfinite(value)]
    if not known:
        return []
    sharper, flatter = sum(value < -STEEP for value in known), sum(value > STEEP for value in known)
    return [
        f"A louder query looks more sharply in {sharper} of {len(known)} layers, less sharply in {flatter}, and "
        f"neither in {len(known) - sharper - flatter}."
    ]


def _biases(layers: Sequence[LayerReport]) -> list[str]:
    found = [number for number, layer in enumerate(layers, 1) if layer.biased]
    return [f"Scores of {_plural(found)} have a bias or a mask, which all numbers include."] if found else []


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "not finite"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _cell(values: Tensor | None, head: int | None = None) -> str:
    """A number as a table shows it; without a head the mean, of errors the largest."""
    if values is None:
        return f"<td>{NONE}</td>"
    return f"<td>{_number((values.mean() if head is None else values[head]).item())}</td>"


def _head_row(*first: str, columns: Sequence[tuple[str, str, str]] = COLUMNS) -> str:
    cells = "".join(f'<th class="text">{name}</th>' for name in first)
    cells += "".join(f'<th title="{escape(meaning)}">{escape(name)}</th>' for name, _, meaning in columns)
    return f"<thead><tr>{cells}</tr></thead>"


def _colour(layer: LayerReport) -> str:
    return "linear" if layer.linear else "softmax"


def _overview(layers: Sequence[LayerReport]) -> str:
    lines: list[str] = []
    for number, layer in enumerate(layers, 1):
        grid = NONE if layer.grid is None else f"{layer.grid[0]} x {layer.grid[1]}"
        worst = layer.row_sum_error.max()[None]  # of errors the largest, not the mean
        cells = "".join(_cell(worst if field == "row_sum_error" else getattr(layer, field)) for _, field, _ in MAIN)
        lines.append(
            f'<tr><td>{number}</td><td class="text">{escape(layer.name or "the layer itself")}</td>'
            f'<td class="text"><b class="{_colour(layer)}">{escape(layer.mechanism)}</b></td><td>{layer.heads}</td>'
            f"<td>{layer.keys}</td><td>{grid}</td>{cells}</tr>"
        )
    first = ("#", "layer", "mechanism", "heads", "keys", "grid")
    return (
        '<h2>Layers</h2><p class="note">Means over heads, images and rows; of errors the largest. Keys and grid are '
        "those of the map, or of one window. All numbers stand below, head by head.</p>"
        f'<div class="wide"><table class="layers">{_head_row(*first, columns=MAIN)}<tbody>{"".join(lines)}</tbody>'
        "</table></div>"
    )


def _by_head(layers: Sequence[LayerReport]) -> str:
    parts: list[str] = []
    for number, layer in enumerate(layers, 1):
        lines = "".join(
            f"<tr><td>{head + 1}</td>{''.join(_cell(getattr(layer, field), head) for _, field, _ in COLUMNS)}</tr>"
            for head in range(layer.heads)
        )
        parts.append(
            f"<details><summary>Layer {number}: {escape(layer.name)} ({escape(layer.mechanism)}), {layer.tokens} "
            f"tokens, {layer.rows} rows seen</summary>"
            f'<div class="wide"><table>{_head_row("head")}<tbody>{lines}</tbody></table></div></details>'
        )
    return f"<h2>Heads</h2>{''.join(parts)}"


def _figures(layers: Sequence[LayerReport]) -> str:
    """Every figure has a dot per head and a bar for their mean, layer by layer."""
    drawn = (
        (
            "Entropy",
            "As a share of the log of the number of keys: 1 is uniform, 0 a single key.",
            "entropy_share",
            None,
        ),
        ("Negative weights", "Share of the weights that are below zero.", "negative_share", None),
        (
            "Neighbourhood",
            "Weight of the 3 x 3 places around the query; dashed: what a uniform row has there.",
            "neighbourhood",
            "neighbourhood_uniform",
        ),
        ("Attention distance", "Mean distance of query and key, in places of the layer's own grid.", "distance", None),
        (
            "Entropy and query norm",
            "Rank correlation: below zero, louder queries look more sharply; dashed: none.",
            "norm_correlation",
            None,
        ),
    )
    key = (
        '<p class="note">A dot is a head, a bar the mean of a layer; '
        '<b class="linear">linear</b>, <b class="softmax">softmax</b>.</p>'
    )
    figures = "".join(f"<section>{_figure(layers, *figure)}</section>" for figure in drawn)
    return f'<h2>Figures</h2>{key}<div class="figures">{figures}</div>'


def _figure(layers: Sequence[LayerReport], heading: str, note: str, field: str, reference: str | None) -> str:
    found: list[list[float]] = [_finite(getattr(layer, field)) for layer in layers]
    marks = [_finite(getattr(layer, reference)) if reference else [] for layer in layers]
    if field == "norm_correlation":
        marks = [[0.0] for _ in layers]
    if not any(found):
        return f'<h3>{heading}</h3><p class="note">No layer has such a number.</p>'
    everything = [0.0, *(value for values in (*found, *marks) for value in values)]
    axis = _Axis.around(min(everything), max(everything), len(layers))
    columns = "".join(
        _column(axis, number, layer, values, mark)
        for number, (layer, values, mark) in enumerate(zip(layers, found, marks, strict=True), 1)
    )
    room = f'viewBox="0 0 {axis.width} {axis.height}" style="min-width: {axis.width // 2}px"'
    return (
        f'<h3>{heading}</h3><p class="note">{note}</p><div class="wide"><svg {room} '
        f'role="img" aria-label="{heading} of each layer">{axis.drawn()}{columns}</svg></div>'
    )


def _finite(values: Tensor | None) -> list[float]:
    return [] if values is None else [float(value) for value in values.tolist() if math.isfinite(value)]


@dataclass(frozen=True)
class _Axis:
    """Where values and layers lie in a figure.

    Attributes:
        ticks: Values with a line, the first at the bottom and the last at the top.
        layers: How many layers stand side by side.
    """

    ticks: tuple[float, ...]
    layers: int
    height: int = 240

    @staticmethod
    def around(low: float, high: float, layers: int) -> _Axis:
        """An axis of round ticks that holds these values."""
        high = high if high > low else low + 1
        rough = (high - low) / 4
        size = 10.0 ** math.floor(math.log10(rough))
        step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough * (1 - 1e-9))
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        return _Axis(tuple(step * i for i in range(first, max(last, first + 1) + 1)), layers)

    @property
    def width(self) -> int:
        """Of the figure; a phone scrolls it sideways."""
        return max(560, 60 + 26 * self.layers)

    def across(self, number: int) -> float:
        """Middle of a layer's column."""
        return 60 + (self.width - 70) * (number - 0.5) / self.layers

    def up(self, value: float) -> float:
        """Height of a value, from the top."""
        return 210 - 195 * (value - self.ticks[0]) / (self.ticks[-1] - self.ticks[0])

    def drawn(self) -> str:
        """Lines and their labels."""
        lines = (
            f'<line class="axis" x1="54" x2="{self.width - 6}" y1="{self.up(tick):.1f}" y2="{self.up(tick):.1f}"/>'
            f'<text x="48" y="{self.up(tick) + 4:.1f}" text-anchor="end">{tick:.4g}</text>'
            for tick in self.ticks
        )
        return "".join(lines)


def _column(axis: _Axis, number: int, layer: LayerReport, values: list[float], marks: list[float]) -> str:
    """One layer of a figure."""
    middle = axis.across(number)
    title = f"<title>{number}: {escape(layer.name)}, {escape(layer.mechanism)}"
    dots = "".join(f'<circle cx="{middle:.1f}" cy="{axis.up(value):.1f}" r="3.5"/>' for value in values)
    lines = ""
    if values:
        mean = sum(values) / len(values)
        title += f", {_number(mean)}"
        lines += _line("mean", middle, 7, axis.up(mean))
    if marks:
        lines += _line("reference", middle, 11, axis.up(sum(marks) / len(marks)))
    label = f'<text x="{middle:.1f}" y="228" text-anchor="middle">{number}</text>'
    return f'<g class="{_colour(layer)}">{title}</title>{dots}{lines}</g>{label}'


def _line(kind: str, middle: float, half: float, height: float) -> str:
    return (
        f'<line class="{kind}" x1="{middle - half:.1f}" x2="{middle + half:.1f}" y1="{height:.1f}" y2="{height:.1f}"/>'
    )
