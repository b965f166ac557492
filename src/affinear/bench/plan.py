"""What a run measures: shapes and lengths, large on a GPU, small on a CPU, few where somebody is in a hurry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from affinear.bench.cases import Case, Shape
from affinear.bench.measure import Clock

TABLES = ("non-causal", "causal", "decode", "rotary", "mechanisms", "overhead", "crossover")
MECHANISMS = ("mala", "nala", "inline", "linear")

LONG = (Shape(64, 1, 16384, 64), Shape(1, 16, 131072, 64), Shape(2, 16, 65536, 96), Shape(4, 16, 16384, 128))
STAGE_1, STAGE_2, STAGE_3 = Shape(128, 1, 3136, 64), Shape(128, 2, 784, 64), Shape(128, 3, 196, 64)


@dataclass(frozen=True)
class Plan:
    """The shapes of every table, and how to measure them.

    Attributes:
        clock: Where, and how long for a row.
        dtype: Of all tokens.
        mechanism: Of every table but the one that compares mechanisms.
        tables: Which are wanted, in order.
        full: Shapes of the non-causal table.
        causal: Shapes of the causal table.
        slow_starters: The shapes for which those are asked in whose first call takes long.
        rotary: Shapes of the rotary table.
        mechanisms: Shapes of the table of mechanisms.
        decode: One token for so many sequences and heads.
        tiny: A shape so small that only the host's work is left.
        new_lengths: Numbers of tokens that nobody has called before.
        crossover: Batch, heads and width of the crossover; its tokens do not count.
        lengths: Tokens of the crossover.
        limit_ms: A crossover line ends where one call would take longer.
        copy_bytes: How much to copy for the bandwidth.
    """

    clock: Clock
    dtype: torch.dtype
    mechanism: str
    tables: tuple[str, ...]
    full: tuple[Shape, ...]
    causal: tuple[Shape, ...]
    slow_starters: frozenset[Shape]
    rotary: tuple[Shape, ...]
    mechanisms: tuple[Shape, ...]
    decode: Shape
    tiny: Shape
    new_lengths: tuple[int, ...]
    crossover: Shape
    lengths: tuple[int, ...]
    limit_ms: float = 2000.0
    copy_bytes: int = 2**30

    def case(self, shape: Shape, *, causal: bool = False) -> Case:
        """The plan's own mechanism and dtype over a shape."""
        return Case(shape, self.dtype, self.mechanism, causal)


def gpu_plan(clock: Clock) -> Plan:
    """The shapes that the project's bars are set for.

    Examples:
        >>> len(gpu_plan(Clock(torch.device("cpu"), 1.0)).full)
        7
    """
    return Plan(
        clock=clock,
        dtype=torch.bfloat16,
        mechanism="mala",
        tables=TABLES,
        full=(*LONG, STAGE_1, STAGE_2, STAGE_3),
        causal=(Shape(8, 16, 4096, 64), Shape(4, 16, 16384, 128)),
        slow_starters=frozenset({LONG[0], STAGE_2}),
        rotary=(LONG[0], STAGE_1),
        mechanisms=(STAGE_1,),
        decode=Shape(64, 16, 1, 64),
        tiny=Shape(1, 1, 64, 64),
        new_lengths=(1009, 1344, 2051, 2720, 3072),
        crossover=Shape(1, 16, 1, 64),
        lengths=tuple(2**power for power in range(6, 21)),
    )


def cpu_plan(clock: Clock) -> Plan:
    """Shapes that a processor gets through in a minute or two."""
    return replace(
        gpu_plan(clock),
        dtype=torch.float32,
        full=(Shape(4, 4, 4096, 64), Shape(8, 3, 784, 64), Shape(16, 3, 196, 64)),
        causal=(Shape(4, 4, 1024, 64),),
        slow_starters=frozenset({Shape(8, 3, 784, 64)}),
        rotary=(Shape(8, 3, 784, 64),),
        mechanisms=(Shape(8, 3, 784, 64),),
        crossover=Shape(1, 4, 1, 64),
        lengths=tuple(2**power for power in range(6, 15)),
        copy_bytes=2**28,
    )


def quick(plan: Plan) -> Plan:
    """The same tables with as little in them as still shows that everything works."""
    if plan.clock.device.type == "cuda":
        return replace(
            plan,
            full=(LONG[0], STAGE_2, STAGE_3),
            causal=plan.causal[:1],
            slow_starters=frozenset(),
            rotary=(STAGE_1,),
            new_lengths=plan.new_lengths[:2],
            lengths=(256, 2048, 16384),
        )
    small = Shape(2, 2, 128, 16)
    return replace(
        plan,
        full=(small,),
        causal=(small,),
        slow_starters=frozenset(),
        rotary=(small,),
        mechanisms=(small,),
        decode=Shape(2, 2, 1, 16),
        tiny=Shape(1, 1, 16, 16),
        new_lengths=plan.new_lengths[:2],
        crossover=Shape(1, 2, 1, 16),
        lengths=(64, 256, 1024),
        copy_bytes=2**22,
    )


def with_shapes(plan: Plan, shapes: Sequence[Shape], *, causal: bool) -> Plan:
    """Other shapes, for every table that has a list of them; slow starters are asked in unless they are not at all."""
    chosen = tuple(shapes)
    slow = frozenset(chosen) if plan.slow_starters else plan.slow_starters
    full, scans = (plan.full, chosen) if causal else (chosen, plan.causal)
    return replace(plan, full=full, causal=scans, rotary=chosen, mechanisms=chosen, slow_starters=slow)
