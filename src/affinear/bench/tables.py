"""The tables over shapes: non-causal, causal, rotary and mechanisms; and where to find the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from affinear.bench import crossover, decode, overhead
from affinear.bench.cases import DIRECTIONS, Case
from affinear.bench.contenders import Contender, contenders, library
from affinear.bench.measure import Clock, Problem
from affinear.bench.plan import MECHANISMS, Plan
from affinear.bench.rows import Row

Told = Callable[[str], None]


def rows(table: str, plan: Plan, told: Told) -> Iterator[Row]:
    """The rows of a table by its name, as they are measured.

    Args:
        table: One of `affinear.bench.plan.TABLES`.
        plan: What to measure.
        told: Hears what comes next.

    Returns:
        One row after the other.
    """
    return _TABLES[table](plan, told)


def _non_causal(plan: Plan, told: Told) -> Iterator[Row]:
    return _everybody("non-causal", [plan.case(shape) for shape in plan.full], plan, told)


def _causal(plan: Plan, told: Told) -> Iterator[Row]:
    return _everybody("causal", [plan.case(shape, causal=True) for shape in plan.causal], plan, told)


def _everybody(table: str, cases: Sequence[Case], plan: Plan, told: Told) -> Iterator[Row]:
    for case in cases:
        told(f"{table} {case.shape}")
        slow = case.shape in plan.slow_starters
        yield from _race(table, case, contenders(case, plan.clock.device, slow_starters=slow), plan.clock)


def _rotary(plan: Plan, told: Told) -> Iterator[Row]:
    for shape in plan.rotary:
        told(f"rotary {shape}")
        for turned in (False, True):
            case = replace(plan.case(shape), rotary=turned)
            yield from _race("rotary", case, library(case, plan.clock.device), plan.clock)


def _mechanisms(plan: Plan, told: Told) -> Iterator[Row]:
    for shape in plan.mechanisms:
        for mechanism in MECHANISMS:
            told(f"mechanisms {shape} {mechanism}")
            case = replace(plan.case(shape), mechanism=mechanism)
            yield from _race("mechanisms", case, library(case, plan.clock.device), plan.clock)


def _race(table: str, case: Case, everybody: Sequence[Contender], clock: Clock) -> Iterator[Row]:
    problem = Problem(case, clock)
    for direction in DIRECTIONS:
        for contender in everybody:
            yield problem.measure(table, contender, direction)


_TABLES: dict[str, Callable[[Plan, Told], Iterator[Row]]] = {
    "non-causal": _non_causal,
    "causal": _causal,
    "decode": decode.rows,
    "rotary": _rotary,
    "mechanisms": _mechanisms,
    "overhead": overhead.rows,
    "crossover": crossover.rows,
}
