"""`affinear bench`: time the library on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from .common import FORMATS, check_output, keeper, require, stop, told
from .plugins import Plugins, load_plugins


def bench_ops(
    shape: Annotated[
        list[str] | None, typer.Option(help="B,H,N,D instead of the default shapes; may be given again.")
    ] = None,
    causal: Annotated[bool, typer.Option("--causal", help="The shapes are causal; alone: the causal table.")] = False,
    mechanism: Annotated[str, typer.Option(help="Of every table but the one that compares mechanisms.")] = "mala",
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16, float16 or float32; if not given, bfloat16, on a CPU float32.")
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(help="Tables, with commas: non-causal, causal, decode, rotary, mechanisms, overhead, crossover."),
    ] = None,
    seconds: Annotated[float | None, typer.Option(min=1e-3, help="About how long to measure one row.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="As little as still shows that everything works.")] = False,
    output: Annotated[Path, typer.Option(help="Where to save the report, every number of it: .json.")] = Path(
        "affinear-bench.json"
    ),
    chart: Annotated[Path, typer.Option(help="Where to save the crossover chart: .png, .svg or .pdf.")] = Path(
        "affinear-crossover.png"
    ),
    plugin: Plugins = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the files if they are there.")] = False,
) -> None:
    """Time the operator beside its rivals, check every result first, and say which bars are met.

    All tables take some minutes. Ctrl-C ends a run early; what was measured is saved all the same. If a file is there
    already and differs, a free name such as affinear-bench-2.json is taken, unless --force.
    """
    check_output(output, "The report", (".json",))
    check_output(chart, "The chart", FORMATS, "--chart")
    from rich.console import Console

    from affinear.bench import ops
    from affinear.bench.session import watch

    try:
        load_plugins(plugin)
        plan = ops.prepare(shape or (), causal, mechanism, dtype, quick, only, seconds)
    except ValueError as error:
        stop(f"{error}.")
    keep = keeper(output, "report", force)
    report = ops.begin(plan)
    page = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    watch(plan, report, page, Console(highlight=False, stderr=True), keep)
    if any(row.table == "crossover" and row.ms is not None for row in report.rows):
        from affinear.bench.chart import crossover_figure
        from affinear.lens.figures import render

        drawn = keeper(chart, "chart", force)(render(crossover_figure(report), chart.suffix[1:].lower()))
        print(told(drawn.path, drawn.written, chart, "chart"))
    saved = keep(ops.as_json(report))
    print(told(saved.path, True, output, "report"))
    if report.interrupted:
        sys.exit(130)


def bench_models(
    model: Annotated[
        list[str] | None, typer.Option(help="A network instead of the default ones, any of timm's; may be given again.")
    ] = None,
    size: Annotated[
        list[str] | None,
        typer.Option("--image-size", "--size", help="Side, or height x width: 224 or 512x2048; may be given again."),
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Images at once; given again, one for each size.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of autocast: bfloat16 or float32; if not given, bfloat16, on a CPU float32.")
    ] = None,
    compiled: Annotated[
        bool | None,
        typer.Option("--compile/--no-compile", help="Measure compiled networks too; if not given, on a GPU."),
    ] = None,
    only: Annotated[
        str | None, typer.Option(help="Any of these, with commas: inference, training, eager, compiled, graphed.")
    ] = None,
    seconds: Annotated[float | None, typer.Option(min=1e-3, help="About how long to measure one row.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="As little as still shows that everything works.")] = False,
    output: Annotated[Path, typer.Option(help="Where to save the report, every number of it: .json.")] = Path(
        "affinear-bench-models.json"
    ),
    plugin: Plugins = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False,
) -> None:
    """Time networks beside softmax networks of about their size: images per second and memory.

    Inference and a training step; eager, compiled, and graphed, which is compiled and replayed as CUDA graphs; each
    network in turns with its baseline. Compiling takes most of the time. Ctrl-C ends a run early; what was measured is
    saved all the same. If the file is there already and differs, a free name such as
    affinear-bench-models-2.json is taken, unless --force.
    """
    require("vision", "timm")
    check_output(output, "The report", (".json",))
    from rich.console import Console

    from affinear.bench import models as networks

    try:
        load_plugins(plugin)
        plan = networks.prepare(model or (), size or (), batch or (), dtype, compiled, only, quick, seconds)
    except ValueError as error:
        stop(f"{error}.")
    keep = keeper(output, "report", force)
    report = networks.begin(plan)
    page = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    networks.watch(plan, report, page, Console(highlight=False, stderr=True), keep)
    saved = keep(networks.as_json(report))
    print(told(saved.path, True, output, "report"))
    if report.interrupted:
        sys.exit(130)
