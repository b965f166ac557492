"""What networks took: one row per network, size, direction and way; in JSON, in tables, and against the bars."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from affinear.bench.models_plan import COMPILED, DIRECTIONS, GRAPHED, INFERENCE, TRAINING, Images
from affinear.bench.report import NOTHING, milliseconds
from affinear.bench.timing import Times

FORMAT = 1
MB = 1e6

# Images per second that a network has to reach, compiled and in bfloat16: 1.3 times those of the released MAViT-T at
# 224 pixels (7,871 and 2,881), 1.5 times at 512 x 2048 (85 and 31). They hold for one card only.
CARD, CARD_DTYPE = "H200", "bfloat16"
BARS: dict[tuple[str, Images, str, str], float] = {
    (name, images, direction, way): bar
    for way in (COMPILED, GRAPHED)
    for name, images, direction, bar in (
        ("mavit_tiny", Images(224, 224, 128), INFERENCE, 10200.0),
        ("mavit_tiny", Images(224, 224, 128), TRAINING, 3750.0),
        ("mavit_tiny_linear", Images(512, 2048, 4), INFERENCE, 127.5),
        ("mavit_tiny_linear", Images(512, 2048, 4), TRAINING, 46.5),
    )
}


@dataclass(frozen=True)
class ModelRow:
    """One network at one work.

    Attributes:
        model: Its name.
        baseline: The network it is compared with; None for one that is compared with nobody.
        images: What it is fed.
        direction: Inference or training.
        way: Eager, compiled or graphed.
        error: Why there are no times, in a sentence; empty where there are.
        parameters: How many numbers it learns, None where it could not be made.
        first_call_s: Seconds of the first step, with all that is compiled and tuned in it.
        peak: Bytes held at the worst moment of a step, weights and images included; None where not measured.
        step: Milliseconds of one step.
    """

    model: str
    baseline: str | None
    images: Images
    direction: str
    way: str
    error: str = ""
    parameters: int | None = None
    first_call_s: float | None = None
    peak: int | None = None
    step: Times | None = None

    @property
    def images_per_s(self) -> float | None:
        """At the median step.

        Examples:
            >>> from affinear.bench.timing import collect
            >>> ModelRow("a", None, Images(8, 8, 4), "inference", "eager", step=collect([2.0])).images_per_s
            2000.0
        """
        return None if self.step is None else self._rate(self.step.median)

    @property
    def spread(self) -> tuple[float, float] | None:
        """Images per second at the slower and at the faster quartile."""
        return None if self.step is None else (self._rate(self.step.upper), self._rate(self.step.lower))

    @property
    def peak_mb(self) -> float | None:
        """The peak in millions of bytes."""
        return None if self.peak is None else self.peak / MB

    def _rate(self, ms: float) -> float:
        return 1e3 * self.images.batch / ms


@dataclass
class ModelReport:
    """A run: where, with what, and every row so far.

    Attributes:
        machine: Names and versions.
        versions: Of the packages that decide about speed.
        settings: What was asked for.
        rows: In the order measured.
        interrupted: Whether the run was stopped before its end.
        seconds: How long it took.
    """

    machine: dict[str, Any]
    versions: dict[str, str]
    settings: dict[str, Any]
    rows: list[ModelRow] = field(default_factory=list["ModelRow"])
    interrupted: bool = False
    seconds: float = 0.0

    def ratio(self, row: ModelRow) -> float | None:
        """How many times as many images per second as the baseline at the same work; None where either has no time."""
        rivals = (one for one in self.rows if one.model == row.baseline and _work(one) == _work(row))
        rival = next(rivals, None)
        if rival is None or rival.images_per_s is None or row.images_per_s is None:
            return None
        return row.images_per_s / rival.images_per_s

    @staticmethod
    def from_json(text: str | bytes) -> ModelReport:
        """Read what `as_json` wrote."""
        content = json.loads(text)
        if content.get("format") != FORMAT:
            raise ValueError(
                f"format: expected {FORMAT}, got {content.get('format')!r}; read it with the version that wrote it"
            )
        fields = {name: content[name] for name in ModelReport.__dataclass_fields__}
        fields |= {"rows": [_row(row) for row in content["rows"]]}
        return ModelReport(**fields)


@dataclass(frozen=True)
class ModelVerdict:
    """One bar and how one row fared.

    Attributes:
        row: Place of the row in the report.
        bar: Images per second that were to be reached.
        measured: Images per second that were; None for a row that failed.

    Examples:
        >>> ModelVerdict(0, 1000.0, 900.0).said
        'at least 1,000 images/s: missed by 10.0 %, measured 900'
    """

    row: int
    bar: float
    measured: float | None

    @property
    def met(self) -> bool:
        """Whether that suffices; a row without a time misses its bar."""
        return self.measured is not None and self.measured >= self.bar

    @property
    def percent(self) -> float | None:
        """By how much the bar was exceeded, or missed where negative, in percent of the bar."""
        return None if self.measured is None else 100 * (self.measured / self.bar - 1)

    @property
    def said(self) -> str:
        """The verdict in words."""
        wanted = f"at least {self.bar:,.0f} images/s"
        if self.measured is None:
            return f"{wanted}: missed, it could not be measured"
        return f"{wanted}: {self.outcome}, measured {self.measured:,.0f}"

    @property
    def outcome(self) -> str:
        """The verdict in a few words."""
        met = "met" if self.met else "missed"
        return met if self.percent is None else f"{met} by {abs(self.percent):.1f} %"


def verdicts(report: ModelReport) -> list[ModelVerdict]:
    """Hold every row that has a bar to it.

    Args:
        report: Of the card and the dtype that the bars were set for; any other has none.

    Returns:
        In the order of the rows.
    """
    if CARD not in str(report.machine.get("gpu")) or report.settings.get("dtype") != CARD_DTYPE:
        return []
    bars = [BARS.get((row.model, *_work(row))) for row in report.rows]
    rows = enumerate(zip(bars, report.rows, strict=True))
    return [ModelVerdict(place, bar, row.images_per_s) for place, (bar, row) in rows if bar is not None]


def as_json(report: ModelReport) -> bytes:
    """The report with its verdicts and with what follows from the rows, as the bytes of a file."""
    content: dict[str, Any] = {"format": FORMAT, **asdict(report)}
    content["rows"] = [{**asdict(row), **_derived(report, row)} for row in report.rows]
    content["bars"] = [{**asdict(one), "met": one.met, "percent": one.percent} for one in verdicts(report)]
    return (json.dumps(content, indent=1) + "\n").encode()


def heading(report: ModelReport) -> str:
    """Where the run takes place and with what, in a line."""
    where = report.machine["gpu"] or report.machine["cpu"]
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    layout = "channels last" if report.settings["channels_last"] else "channels first"
    return f"{report.settings['dtype']}, {layout}, on {where}, {versions}"


def legend() -> str:
    """What the columns mean."""
    return (
        "Images/s and ms are of the median step, quartiles in images/s; a training step is forward, loss, backward and "
        "AdamW. Peak is memory with weights and images, first call is with compiling, ratio is to the softmax baseline "
        "between the same lines."
    )


def table(report: ModelReport, images: Images | None = None, direction: str | None = None) -> list[Table]:
    """What was measured, laid out for reading: a table for every size and direction.

    Args:
        report: Rows so far.
        images: Only this size; None is all.
        direction: Only this direction; None is both.

    Returns:
        Tables for rich to print.
    """
    sizes = list(dict.fromkeys(row.images for row in report.rows)) if images is None else [images]
    directions = DIRECTIONS if direction is None else (direction,)
    judged = {one.row: one for one in verdicts(report)}
    grids: list[Table] = []
    for size in sizes:
        for which in directions:
            places = [i for i, row in enumerate(report.rows) if (row.images, row.direction) == (size, which)]
            if places:
                grids.append(_grid(f"{which.capitalize()}, {size}", report, places, judged))
    return grids


def summary(report: ModelReport) -> Iterator[Text]:
    """How every bar fared, which rows failed and why, and whether the run was cut short."""
    for verdict in verdicts(report):
        name = _title(report.rows[verdict.row])
        yield Text(f"{name}: {verdict.said}", style="green" if verdict.met else "red")
    for row in report.rows:
        if row.error:
            yield Text(f"{_title(row)}: {row.error}", style="yellow")
    if report.interrupted:
        yield Text(f"Interrupted after {len(report.rows)} rows.")


def _grid(title: str, report: ModelReport, places: Sequence[int], judged: Mapping[int, ModelVerdict]) -> Table:
    grid = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    grid.add_column("network", style="bold", no_wrap=True)
    grid.add_column("", no_wrap=True)
    for header in ("images/s", "quartiles", "ms", "peak MB", "params", "first call", "ratio"):
        grid.add_column(header, justify="right", no_wrap=True)
    grid.add_column("")
    before: tuple[str, str] | None = None
    for place in places:
        row = report.rows[place]
        group = row.way, row.baseline or row.model
        if before is not None and group != before:
            grid.add_section()
        before = group
        grid.add_row(row.model, row.way, *_numbers(row, report.ratio(row)), _said(row, judged.get(place)))
    return grid


def _numbers(row: ModelRow, ratio: float | None) -> list[str]:
    if row.step is None or row.images_per_s is None or row.spread is None:
        return [""] * 7
    return [
        _rate(row.images_per_s),
        " to ".join(_rate(end) for end in row.spread),
        milliseconds(row.step.median),
        _shown(row.peak_mb, "{:,.0f}"),
        _shown(row.parameters and row.parameters / 1e6, "{:.1f} M"),
        _shown(row.first_call_s, "{:.1f} s"),
        _shown(ratio, "{:.2f} x"),
    ]


def _said(row: ModelRow, verdict: ModelVerdict | None) -> Text:
    said = Text(row.error, style="yellow")
    if verdict is not None:
        said.append(f"{' ' if row.error else ''}bar {verdict.outcome}", style="green" if verdict.met else "red")
    return said


def _title(row: ModelRow) -> str:
    return f"{row.model}, {row.direction}, {row.way}, {row.images}"


def _work(row: ModelRow) -> tuple[Images, str, str]:
    return row.images, row.direction, row.way


def _rate(images_per_s: float) -> str:
    return f"{images_per_s:,.0f}" if images_per_s >= 100 else milliseconds(images_per_s)


def _shown(value: float | None, form: str) -> str:
    return NOTHING if value is None else form.format(value)


def _derived(report: ModelReport, row: ModelRow) -> dict[str, Any]:
    slower, faster = row.spread or (None, None)
    return {
        "images_per_s": row.images_per_s,
        "images_per_s_lower": slower,
        "images_per_s_upper": faster,
        "ms": None if row.step is None else row.step.median,
        "peak_mb": row.peak_mb,
        "ratio": report.ratio(row),
    }


def _row(content: Mapping[str, Any]) -> ModelRow:
    fields = {name: content[name] for name in ModelRow.__dataclass_fields__}
    step = None if content["step"] is None else Times(**content["step"])
    fields |= {"images": Images(**content["images"]), "step": step}
    return ModelRow(**fields)
