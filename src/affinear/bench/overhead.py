"""What a call costs before any arithmetic: the host's time per call, and the first call at a new length."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from affinear.bench import timing
from affinear.bench.cases import DIRECTIONS, FORWARD, Case, draw
from affinear.bench.contenders import Contender, contenders, library, step
from affinear.bench.measure import Clock, blank, surviving
from affinear.bench.plan import Plan
from affinear.bench.rows import Row

HOST, FIRST_CALL = "host time", "first call"


def rows(plan: Plan, told: Callable[[str], None]) -> Iterator[Row]:
    """Host time of every contender, then first calls of the library's own."""
    told(f"overhead {plan.tiny}")
    case = plan.case(plan.tiny)
    for direction in DIRECTIONS:
        for contender in contenders(case, plan.clock.device):
            yield host_row(contender, case, direction, plan.clock)
    told(f"first calls at {', '.join(map(str, plan.new_lengths))} tokens")
    for contender in library(case, plan.clock.device):
        for direction in DIRECTIONS:
            yield first_call_row(contender, case, direction, plan)


def host_row(contender: Contender, case: Case, direction: str, clock: Clock) -> Row:
    """What the host spends on one call."""
    row = blank("overhead", contender.name, f"{HOST}, {direction}", case)

    def fill() -> Row:
        call = step(contender, draw(case, clock.device, 0), direction)
        return replace(row, call=timing.time_host(call, clock.device, clock.seconds))

    return surviving(row, fill)


def first_call_row(contender: Contender, case: Case, direction: str, plan: Plan) -> Row:
    """The first call at each of several lengths, after another length has been called."""
    # Directions take lengths of their own, or the second would find everything prepared by the first.
    lengths = [length + (0 if direction == FORWARD else 16) for length in plan.new_lengths]
    row = blank("overhead", contender.name, f"{FIRST_CALL}, {direction}", case)

    def fill() -> Row:
        device = plan.clock.device
        timing.time_once(step(contender, draw(case, device, 0), direction), device)
        times = [_first_call(contender, case, length, direction, device) for length in lengths]
        return replace(row, call=timing.collect(times), detail=f"tokens {', '.join(map(str, lengths))}")

    return surviving(row, fill)


def _first_call(contender: Contender, case: Case, length: int, direction: str, device: torch.device) -> float:
    longer = replace(case, shape=replace(case.shape, tokens=length))
    return timing.time_once(step(contender, draw(longer, device, 0), direction), device)
