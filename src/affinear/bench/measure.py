"""One row: check the result, then time it, then weigh it; and if any of that fails, say why and go on."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from affinear.bench import timing
from affinear.bench.cases import Case, Inputs, draw
from affinear.bench.contenders import Contender, Step, step
from affinear.bench.judge import Finding, Judge, finite
from affinear.bench.rows import FAILED, WRONG, Row


@dataclass(frozen=True)
class Clock:
    """Where to measure and for how long.

    Attributes:
        device: Where everything runs.
        seconds: For one row, about; half as calls and half as a graph.
    """

    device: torch.device
    seconds: float


class Problem:
    """A case with its inputs and its judge, made once and shared by all contenders.

    Args:
        case: What is computed.
        clock: Where.
        sets: How many sets of inputs to rotate over; None takes as many as keep the cache cold.
    """

    def __init__(self, case: Case, clock: Clock, sets: int | None = None) -> None:
        self.case, self.clock, self.sets = case, clock, sets

    # Made when first asked for, inside a row: where memory does not suffice, the row says so.
    @cached_property
    def inputs(self) -> list[Inputs]:
        """Sets of inputs to rotate over."""
        count = self.sets or timing.input_sets(4 * self.case.tensor_bytes, self.clock.device)
        return [draw(self.case, self.clock.device, seed) for seed in range(count)]

    @cached_property
    def judge(self) -> Judge:
        """What the first set has to come to."""
        return Judge(self.case, self.inputs[0])

    def measure(self, table: str, contender: Contender, direction: str) -> Row:
        """Check and time one contender in one direction."""
        case = self.case
        empty = replace(
            blank(table, contender.name, direction, case),
            traffic=case.traffic(direction),
            held=case.held(direction),
        )

        def find(results: Sequence[Tensor]) -> Finding | None:
            return self.judge.find(results) if contender.exact else None

        def steps() -> list[Step]:
            return [step(contender, inputs, direction) for inputs in self.inputs]

        return measured(empty, steps, find, self.clock)


def blank(table: str, contender: str, direction: str, case: Case) -> Row:
    """A row of a case with nothing measured yet."""
    return Row(
        table=table,
        contender=contender,
        direction=direction,
        shape=case.shape,
        dtype=str(case.dtype).removeprefix("torch."),
        mechanism=case.mechanism,
        causal=case.causal,
        rotary=case.rotary,
    )


def measured(
    row: Row, make: Callable[[], list[Step]], find: Callable[[Sequence[Tensor]], Finding | None], clock: Clock
) -> Row:
    """Fill in a row.

    Args:
        row: What it is called.
        make: Gives the steps to time: the same call over different inputs.
        find: Looks at the results of the first step; None means that another function is computed.
        clock: Where and for how long.

    Returns:
        The row with times, or with the reason why there are none.
    """

    def fill() -> Row:
        steps = make()
        results = steps[0]()
        finding = find(results)
        checked = replace(row, error=finding and finding.error, budget=finding and finding.budget)
        if finding is not None and not finding.right:
            return replace(checked, status=WRONG, reason=f"wrong (error {finding.error:.1e})")
        if not finite(results):
            return replace(checked, status=WRONG, reason="wrong (not finite)")
        del results
        return _timed(checked, steps, clock)

    return surviving(row, fill)


def surviving(row: Row, fill: Callable[[], Row]) -> Row:
    """What `fill` returns, or the row with the reason why it could not."""
    try:
        return fill()
    except Exception as error:
        return replace(row, status=FAILED, reason=why(error), detail=_first_line(error))
    finally:
        if torch.cuda.is_available():  # a failed row may have left the memory held, or in pieces
            gc.collect()
            torch.cuda.empty_cache()


def why(error: Exception) -> str:
    """An exception in a word or two.

    Examples:
        >>> why(ValueError("backend: no Triton here")), why(ZeroDivisionError())
        ('cannot serve', 'ZeroDivisionError')
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error):
        return "out of memory"
    return "cannot serve" if isinstance(error, ValueError | NotImplementedError) else type(error).__name__


def _timed(row: Row, steps: list[Step], clock: Clock) -> Row:
    peak = timing.peak_bytes(steps[0], clock.device)
    call = timing.time_calls(steps, clock.device, clock.seconds / 2)
    graph, detail = None, ""
    if clock.device.type == "cuda" and call.median <= timing.SLOW_MS:
        try:
            graph = timing.time_graph(steps, clock.device, clock.seconds / 2)
        except RuntimeError as error:  # what cannot be captured can still be called
            detail = f"no graph: {_first_line(error)}"
    return replace(row, peak=peak, call=call, graph=graph, detail=detail)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200]
