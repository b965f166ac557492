"""A whole run: the copy bandwidth, then table after table, each row kept as soon as it is measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from affinear.bench import machine, tables
from affinear.bench.bars import verdicts
from affinear.bench.cases import Shape
from affinear.bench.contenders import missing_packages
from affinear.bench.measure import Clock
from affinear.bench.plan import TABLES, Plan, cpu_plan, gpu_plan, quick, with_shapes
from affinear.bench.rows import Report
from affinear.ops import mechanisms

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
COPY = "copy bandwidth"
SECONDS, QUICK_SECONDS = 0.4, 0.04


def prepare(
    shapes: Sequence[str] = (),
    causal: bool = False,
    mechanism: str = "mala",
    dtype: str | None = None,
    hurry: bool = False,
    only: str | None = None,
    seconds: float | None = None,
) -> Plan:
    """Turn what a user asks for into a plan.

    Args:
        shapes: Each B,H,N,D; none are the default ones.
        causal: Whether those shapes are for the causal table.
        mechanism: Of every table but the one that compares mechanisms.
        dtype: Of the tokens. None is bfloat16 on a GPU and float32 on a CPU.
        hurry: Whether to do as little as still shows that everything works.
        only: Names of tables, separated by commas. None is all of them, or the one that own shapes are for.
        seconds: About how long to measure one row.

    Returns:
        The plan, for a GPU where there is one.

    Raises:
        ValueError: If a name or a shape is not one.

    Examples:
        >>> prepare(shapes=["1,2,100,16"], causal=True).tables
        ('causal',)
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    clock = Clock(device, seconds or (QUICK_SECONDS if hurry else SECONDS))
    plan = gpu_plan(clock) if device.type == "cuda" else cpu_plan(clock)
    plan = quick(plan) if hurry else plan
    plan = replace(plan, mechanism=_known("mechanism", mechanism, tuple(mechanisms())))
    if dtype is not None:
        plan = replace(plan, dtype=DTYPES[_known("dtype", dtype, tuple(DTYPES))])
    if shapes:
        plan = with_shapes(plan, [Shape.parse(text) for text in shapes], causal=causal)
    return replace(plan, tables=_chosen(only, own_shapes=bool(shapes), causal=causal))


def begin(plan: Plan) -> Report:
    """An empty report of a plan on this machine."""
    clock = plan.clock
    settings = {
        "tables": list(plan.tables),
        "mechanism": plan.mechanism,
        "dtype": str(plan.dtype).removeprefix("torch."),
        "seconds_per_row": clock.seconds,
    }
    return Report(machine.describe(clock.device), settings)


def run(
    plan: Plan,
    report: Report,
    told: Callable[[str], None] = lambda said: None,
    finished: Callable[[str], None] = lambda table: None,
) -> None:
    """Measure a plan into a report. Ctrl-C ends it early; what was measured until then is in the report.

    Args:
        plan: What to measure.
        report: Where rows go, one by one.
        told: Hears what comes next.
        finished: Hears when the bandwidth is known, and each table's name when its last row is in or it was cut short.
    """
    start = time.perf_counter()
    try:
        told(COPY)
        clock = plan.clock
        report.copy_gb_per_s, report.copy = machine.copy_bandwidth(clock.device, clock.seconds, plan.copy_bytes)
        absent = missing_packages() if report.on_gpu else []
        if absent:
            report.notes.append(f"not installed, so without a row: {', '.join(absent)}")
        finished(COPY)
        for table in plan.tables:
            _measure(table, plan, report, told, finished, start)
    except KeyboardInterrupt:
        report.interrupted = True
    finally:
        report.seconds = time.perf_counter() - start


def _measure(
    table: str,
    plan: Plan,
    report: Report,
    told: Callable[[str], None],
    finished: Callable[[str], None],
    start: float,
) -> None:
    try:
        for row in tables.rows(table, plan, told):
            report.rows.append(row)
    finally:
        report.seconds = time.perf_counter() - start
        finished(table)


def as_json(report: Report) -> bytes:
    """The report with its verdicts, as the bytes of a file."""
    judged = [{"row": bar.row, "bar": bar.bar, "measured": bar.measured, "met": bar.met} for bar in verdicts(report)]
    return report.to_json(judged).encode()


def _chosen(only: str | None, *, own_shapes: bool, causal: bool) -> tuple[str, ...]:
    if only is not None:
        names = [name.strip() for name in only.split(",")]
        chosen = {_known("only", name, TABLES) for name in names}
        return tuple(name for name in TABLES if name in chosen)
    if causal:
        return ("causal",)
    return ("non-causal",) if own_shapes else TABLES


def _known(what: str, name: str, names: Sequence[str]) -> str:
    if name not in names:
        raise ValueError(f"{what}: expected one of {', '.join(names)}, got {name!r}; choose one of these")
    return name
