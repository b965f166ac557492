"""The report for reading: rich tables, one per direction, and a summary of the bars."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from affinear.bench.bars import Verdict, verdicts
from affinear.bench.cases import DIRECTIONS
from affinear.bench.plan import TABLES
from affinear.bench.rows import OK, Report, Row

NOTHING = "-"
TITLES = {
    "non-causal": "Full attention",
    "causal": "Causal attention",
    "decode": "Decoding",
    "rotary": "Rotary positions",
    "mechanisms": "Mechanisms",
    "overhead": "Before any arithmetic",
    "crossover": "Time against tokens",
}


def tables(report: Report, name: str) -> Iterator[Table]:
    """One measured table, laid out for reading: one for each direction that it has.

    Args:
        report: What was measured.
        name: One of `affinear.bench.plan.TABLES`.

    Returns:
        Tables for rich to print.
    """
    bars = verdicts(report)
    placed = [(place, row) for place, row in enumerate(report.rows) if row.table == name]
    if name == "overhead" and placed:
        yield _overhead([row for _, row in placed])
        return
    directions = [d for d in (*DIRECTIONS, "one token") if any(row.direction == d for _, row in placed)]
    for direction in directions:
        chosen = [(place, row) for place, row in placed if row.direction == direction]
        yield _speeds(f"{TITLES[name]}, {direction}", chosen, bars, report)


def heading(report: Report) -> str:
    """Where the run takes place and what a copy reaches there, in a line."""
    machine = report.machine
    where = machine["gpu"] or machine["cpu"]
    versions = ", ".join(f"{name} {machine[name]}" for name in ("affinear", "torch", "triton") if machine.get(name))
    kind = f"{report.settings['mechanism']}, {report.settings['dtype']}"
    copied = "" if report.copy_gb_per_s is None else f"; a copy reads and writes {report.copy_gb_per_s:,.0f} GB/s"
    return f"{kind} on {where}, {versions}{copied}"


def legend() -> str:
    """What the columns mean."""
    return (
        "Times are medians. GB/s counts every tensor that has to be read or written once, % compares that with the "
        "copy; peak is memory beyond inputs and results, in % of those (decode: of the state)."
    )


def summary(report: Report) -> Iterator[Text]:
    """How many bars were met, which were missed, and which rows are wrong or failed."""
    bars = verdicts(report)
    missed = [bar for bar in bars if not bar.met]
    if bars:
        yield Text(f"Bars: {len(bars) - len(missed)} met, {len(missed)} missed.", style="bold")
    for bar in missed:
        yield Text(f"  missed: {_title(report.rows[bar.row])}: {bar.bar}, measured {bar.measured}", style="red")
    for row in report.rows:
        if row.status != OK:
            detail = f": {row.detail}" if row.detail else ""
            yield Text(f"  {row.reason}: {_title(row)}{detail}", style="yellow")
    for note in report.notes:
        yield Text(f"Note: {note}")
    if report.interrupted:
        absent = [name for name in TABLES if name in report.settings["tables"] and not _has(report, name)]
        yield Text(f"Interrupted after {len(report.rows)} rows; not begun: {', '.join(absent) or 'nothing'}.")


def _speeds(title: str, placed: Sequence[tuple[int, Row]], bars: Sequence[Verdict], report: Report) -> Table:
    grid = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    grid.add_column("B,H,N,D", style="bold", no_wrap=True)
    grid.add_column("", no_wrap=True)
    for header in ("graph ms", "call ms", "GB/s", "% of copy", "peak"):
        grid.add_column(header, justify="right", no_wrap=True)
    grid.add_column("bar")
    before: str | None = None
    for place, row in placed:
        group = _group(row)
        if before is not None and group != before:
            grid.add_section()
        grid.add_row(group if group != before else "", row.contender, *_numbers(row, report), _said(place, row, bars))
        before = group
    return grid


def _numbers(row: Row, report: Report) -> list[str]:
    if row.status != OK:
        return [""] * 5
    return [
        NOTHING if row.graph is None else milliseconds(row.graph.median),
        NOTHING if row.call is None else milliseconds(row.call.median),
        NOTHING if row.gb_per_s is None else _rate(row.gb_per_s),
        _shown(row.percent_of(report.copy_gb_per_s), "{:.1f}"),
        _shown(row.peak_percent, "{:.1f} %"),
    ]


def milliseconds(value: float) -> str:
    """A time with three digits that count.

    Examples:
        >>> milliseconds(0.0123), milliseconds(1.234), milliseconds(542.1)
        ('0.0123', '1.23', '542')
    """
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3 if value >= 0.1 else 4
    return f"{value:.{digits}f}"


def _overhead(rows: Sequence[Row]) -> Table:
    grid = Table(title=TITLES["overhead"], box=box.SIMPLE_HEAD, title_justify="left")
    grid.add_column("what", style="bold", no_wrap=True)
    grid.add_column("", no_wrap=True)
    for header in ("median µs", "quartiles µs", "slowest µs"):
        grid.add_column(header, justify="right", no_wrap=True)
    before = ""
    for row in rows:
        if before and row.direction != before:
            grid.add_section()
        what, before = "" if row.direction == before else row.direction, row.direction
        grid.add_row(what, row.contender, *_microseconds(row))
    return grid


def _microseconds(row: Row) -> list[str]:
    if row.call is None:
        return [row.reason or NOTHING, "", ""]
    low, middle, high, most = (1e3 * x for x in (row.call.lower, row.call.median, row.call.upper, row.call.slowest))
    return [f"{middle:,.1f}", f"{low:,.1f} to {high:,.1f}", f"{most:,.1f}"]


def _said(place: int, row: Row, bars: Sequence[Verdict]) -> Text:
    said = Text(row.reason, style="yellow")
    for bar in bars:
        if bar.row == place:
            said.append(", " if said else "")
            said.append(f"{bar.bar} {'met' if bar.met else 'missed'}", style="green" if bar.met else "red")
    return said


def _group(row: Row) -> str:
    extra = {"rotary": "rotary" if row.rotary else "none", "mechanisms": row.mechanism}.get(row.table)
    return f"{row.shape} {extra}" if extra else str(row.shape)


def _title(row: Row) -> str:
    return f"{row.table} {_group(row)} {row.direction} {row.contender}"


def _rate(gb_per_s: float) -> str:
    return f"{gb_per_s:,.0f}" if gb_per_s >= 100 else f"{gb_per_s:.3g}"


def _shown(value: float | None, form: str) -> str:
    return NOTHING if value is None else form.format(value)


def _has(report: Report, table: str) -> bool:
    return any(row.table == table for row in report.rows)
