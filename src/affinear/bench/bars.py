"""The bars: what the operator has to reach, and whether a run's rows reach it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from affinear.bench.cases import FORWARD, TRAINING, Shape
from affinear.bench.contenders import FLA, SDPA, TRITON
from affinear.bench.plan import LONG, STAGE_1, STAGE_2, STAGE_3
from affinear.bench.rows import Report, Row

COPY_PERCENT = {FORWARD: 75.0, TRAINING: 65.0}
# Milliseconds as a graph. Unlike all other bars they hold for one card only.
CARD = "H200"
CARD_MS: dict[Shape, dict[str, float]] = {
    STAGE_1: {FORWARD: 0.065, TRAINING: 0.22},
    STAGE_2: {FORWARD: 0.045, TRAINING: 0.16},
}
ROTARY_RATIO, NALA_RATIO, DECODE_RATIO = 1.25, 1.6, 1.5
PEAK_PERCENT = 10.0


@dataclass(frozen=True)
class Verdict:
    """One bar and how one row fared.

    Attributes:
        row: Place of the row in the report.
        bar: What was to be reached.
        measured: What was.
        met: Whether that suffices.
    """

    row: int
    bar: str
    measured: str
    met: bool


Judgement = tuple[str, str, bool]


def verdicts(report: Report) -> list[Verdict]:
    """Hold every row that has a bar to it; a row without a time misses its bar.

    Only the Triton backend has bars, so there are none on a CPU.

    Args:
        report: Rows and the copy bandwidth they are compared with.

    Returns:
        In the order of the rows.
    """
    found: list[Verdict] = []
    for place, row in enumerate(report.rows):
        if row.contender.startswith(TRITON):
            found += [Verdict(place, *judged) for bar in _BARS for judged in bar(row, report)]
    return found


def _bandwidth(row: Row, report: Report) -> Iterator[Judgement]:
    if _standard(row) and row.table == "non-causal" and row.shape in LONG:
        wanted, reached = COPY_PERCENT[row.direction], row.percent_of(report.copy_gb_per_s)
        said = row.reason if reached is None else f"{reached:.0f} %"
        yield f"≥ {wanted:.0f} % of copy", said, reached is not None and reached >= wanted


def _card_time(row: Row, report: Report) -> Iterator[Judgement]:
    on_card = CARD in str(report.machine.get("gpu"))
    if on_card and _standard(row) and row.table == "non-causal" and row.shape in CARD_MS:
        wanted, reached = CARD_MS[row.shape][row.direction], row.graph and row.graph.median
        said = row.reason or "no graph" if reached is None else f"{reached:.3f} ms"
        yield f"≤ {wanted:g} ms", said, reached is not None and reached <= wanted


def _softmax(row: Row, report: Report) -> Iterator[Judgement]:
    if _standard(row) and row.table == "non-causal" and row.shape == STAGE_3:
        rival = _other(report, row, contender=SDPA)
        yield from _at_most(1.0, "SDPA", row, rival)


def _scan(row: Row, report: Report) -> Iterator[Judgement]:
    if row.table == "causal":
        rival = _other(report, row, contender=FLA)
        yield from _at_most(1.0, "fla", row, rival)


def _rotary(row: Row, report: Report) -> Iterator[Judgement]:
    if row.table == "rotary" and row.rotary:
        yield from _at_most(ROTARY_RATIO, "none", row, _other(report, row, rotary=False))


def _nala(row: Row, report: Report) -> Iterator[Judgement]:
    if row.table == "mechanisms" and row.mechanism == "nala" and row.shape == STAGE_1:
        yield from _at_most(NALA_RATIO, "mala", row, _other(report, row, mechanism="mala"))


def _decoding(row: Row, report: Report) -> Iterator[Judgement]:
    if row.table == "decode" and report.copy_gb_per_s:
        floor = row.traffic / report.copy_gb_per_s / 1e6
        reached = None if row.ms is None or not floor else row.ms / floor
        said = row.reason if reached is None else f"{reached:.2f} x"
        yield f"≤ {DECODE_RATIO:g} x state", said, reached is not None and reached <= DECODE_RATIO


def _memory(row: Row, report: Report) -> Iterator[Judgement]:
    if row.table in ("non-causal", "causal") and row.peak_percent is not None:
        yield f"peak ≤ {PEAK_PERCENT:.0f} %", f"{row.peak_percent:.1f} %", row.peak_percent <= PEAK_PERCENT


_BARS: tuple[Callable[[Row, Report], Iterator[Judgement]], ...] = (
    _bandwidth,
    _card_time,
    _softmax,
    _scan,
    _rotary,
    _nala,
    _decoding,
    _memory,
)


def _standard(row: Row) -> bool:
    # What the bars over shapes were set for.
    return row.mechanism == "mala" and row.dtype in ("bfloat16", "float16")


def _at_most(ratio: float, whom: str, row: Row, rival: Row | None) -> Iterator[Judgement]:
    # Without the rival's time there is nothing to hold the row to.
    if rival is None or rival.ms is None:
        return
    reached = None if row.ms is None else row.ms / rival.ms
    said = row.reason if reached is None else f"{reached:.2f} x"
    yield f"≤ {ratio:g} x {whom}", said, reached is not None and reached <= ratio


def _other(report: Report, row: Row, **changed: object) -> Row | None:
    """The row that differs from this one in what is named and in nothing else that identifies a row."""
    names = ("table", "contender", "direction", "shape", "dtype", "mechanism", "causal", "rotary")
    wanted = {name: getattr(row, name) for name in names} | changed
    return next((one for one in report.rows if all(getattr(one, name) == wanted[name] for name in names)), None)
