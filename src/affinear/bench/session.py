"""A run with somebody watching: what comes next beside it, each table as soon as it is done, the bars at the end."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console

from affinear.bench import ops, report
from affinear.bench.plan import Plan
from affinear.bench.rows import Report


def watch(plan: Plan, found: Report, page: Console, margin: Console, keep: Callable[[bytes], object]) -> None:
    """Measure a plan, show it, and keep it.

    Args:
        plan: What to measure.
        found: Where rows go.
        page: Gets the tables and the summary.
        margin: Gets a line for everything that is about to be measured.
        keep: Gets the whole report as JSON after every table, so that a run that is killed leaves what it has.
    """
    start = time.perf_counter()

    def told(said: str) -> None:
        margin.print(f"{time.perf_counter() - start:5.0f} s  {said}", style="dim", markup=False)

    def finished(table: str) -> None:
        if table == ops.COPY:
            page.print(report.heading(found), report.legend(), sep="\n", markup=False, soft_wrap=True)
        for grid in report.tables(found, table):
            page.print(grid)
        keep(ops.as_json(found))

    ops.run(plan, found, told, finished)
    for sentence in report.summary(found):
        page.print(sentence, soft_wrap=True)
