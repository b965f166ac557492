"""From which length on linear attention is faster than softmax: time against tokens, everything else fixed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from affinear.bench.cases import DIRECTIONS
from affinear.bench.contenders import Contender, library, sdpa
from affinear.bench.measure import Problem
from affinear.bench.plan import Plan
from affinear.bench.rows import FAILED, Row

TABLE = "crossover"


def rows(plan: Plan, told: Callable[[str], None]) -> Iterator[Row]:
    """Every line of the chart, length by length; a line ends where its next call would take too long."""
    last: dict[tuple[str, str], Row] = {}
    for tokens in plan.lengths:
        told(f"{TABLE} {tokens} tokens")
        case = plan.case(replace(plan.crossover, tokens=tokens))
        problem = Problem(case, plan.clock)
        for contender in (*library(case, plan.clock.device), sdpa(case)):
            for direction in DIRECTIONS:
                key = contender.name, direction
                if _goes_on(contender, last.get(key), tokens, plan.limit_ms):
                    last[key] = problem.measure(TABLE, contender, direction)
                    yield last[key]


def _goes_on(contender: Contender, last: Row | None, tokens: int, limit_ms: float) -> bool:
    if last is None or last.ms is None:
        return last is None or last.status != FAILED
    return last.ms * (tokens / last.shape.tokens) ** contender.order <= limit_ms


def line(rows: Sequence[Row], contender: str, direction: str) -> list[tuple[int, float]]:
    """Tokens and milliseconds of one line of the chart."""
    return [
        (row.shape.tokens, row.ms)
        for row in rows
        if row.table == TABLE and row.contender == contender and row.direction == direction and row.ms is not None
    ]


def meeting_point(ours: Sequence[tuple[int, float]], theirs: Sequence[tuple[int, float]]) -> float | None:
    """Tokens from which on `ours` is the faster, read off between the points on logarithmic axes.

    Args:
        ours: Tokens and milliseconds.
        theirs: The same of a rival.

    Returns:
        The last crossing, or None if there is none.

    Examples:
        >>> meeting_point([(100, 2.0), (400, 2.0)], [(100, 1.0), (400, 4.0)])
        200.0
    """
    rival = dict(theirs)
    leads = [(tokens, math.log(rival[tokens] / ms)) for tokens, ms in ours if tokens in rival]
    found = None
    for (start, before), (end, after) in pairwise(leads):
        if before < 0 <= after:
            found = start * (end / start) ** (before / (before - after))
    return None if found is None else round(found, 6)
