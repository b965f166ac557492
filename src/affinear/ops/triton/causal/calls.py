"""What the kernels of a call read, and what follows from its shapes alone: blocks, segments, room for results."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..rules import Rule
from ..sizes import cdiv, next_power_of_2
from ..starting import is_roomy
from ..statistics import Statistics

FITS = 128 * 128  # numbers of a state that one program can hold beside its tokens


class Nothing(NamedTuple):
    """What kernels read in place of `Statistics` where there are none."""

    count: None = None
    key_mean: None = None
    value_mean: None = None
    covariance: None = None
    rotated_key_mean: None = None


NOTHING = Nothing()


class Tokens(NamedTuple):
    """What the kernels of one call read: tensors, their strides, and sizes. Kernels call it `x`.

    Attributes:
        p_q: Queries, (B, N, H, D).
        p_k: Keys, (B, N, G, D).
        p_v: Values, (B, N, G, E).
        p_do: Gradient of the answers, (B, N, H, E), or None.
        p_mask: Which keys take part, (B, N), as bytes, or None.
        p_bounds: Where packed sequences begin and end, (S + 1,), or None.
        p_turns: Cosines and sines, (N, D), or None.
        s_qb: Strides, of each tensor in turn.
        scale: Factor of all scores.
        S_odd: Twice the sequences, and three: see `sequences_of`.
        N_odd: Twice the tokens of a batch entry, and three: see `length_of`.
        H: Query heads.
        G: Key heads.
        D: Channels of a key.
        E: Channels of a value.
        F: Features of a key.
    """

    p_q: Tensor
    p_k: Tensor
    p_v: Tensor
    p_do: Tensor | None
    p_mask: Tensor | None
    p_bounds: Tensor | None
    p_turns: Tensor | None
    s_qb: int
    s_qn: int
    s_qh: int
    s_qd: int
    s_kb: int
    s_kn: int
    s_kh: int
    s_kd: int
    s_vb: int
    s_vn: int
    s_vh: int
    s_vd: int
    s_gb: int
    s_gn: int
    s_gh: int
    s_gd: int
    s_mb: int
    s_mn: int
    scale: float
    S_odd: int
    N_odd: int
    H: int
    G: int
    D: int
    E: int
    F: int


class Shape(NamedTuple):
    """Block shapes and launch options for heads of one width; nothing of the batch is in them.

    Attributes:
        chunk: Tokens in a chunk.
        channels: Channels of a key, rounded up to a power of two.
        features: Features, `channels` or twice that.
        values: Channels of a value in a block.
        blocks: Blocks that hold all of a value.
        segment: Tokens in a segment.
        warps: Warps of a program.
        stages: Chunks in flight.
    """

    chunk: int
    channels: int
    features: int
    values: int
    blocks: int
    segment: int
    warps: int
    stages: int


@cache
def shape_for(
    head_dim: int,
    value_dim: int,
    features: int,
    itemsize: int,
    segment: int | None = None,
    roomy: bool = True,
    forward: bool = True,
    rounds: bool = True,
) -> Shape:
    """Shapes for heads of this width whose map makes so many features of a channel; a segment suits any chip."""
    width, values = (max(16, next_power_of_2(x)) for x in (head_dim, value_dim))
    wide = width * features
    narrow = wide * values <= 64 * 64
    # Products in float32 are spelled out, one multiplication after the other: smaller blocks keep them in registers.
    fits = FITS // 4 if itemsize == 4 else FITS if roomy else FITS // 2
    tall = fits == FITS and wide <= 128
    chunk = 64 if tall else 32 if fits == FITS and wide == 256 else 16
    # As ptxas 12.8 assembles them, chunks of 64 rows whose factors come in halves go wrong: see docs/kernels.md.
    if tall and not rounds:
        chunk = 32
    # Of two groups of four warps each would compute a whole chunk: they share out rows, and 64 is what one group takes.
    # The backward pass has more to keep than one can hold.
    few = narrow or (forward and tall)
    values = min(values, max(16, fits // wide), 64 if few else values)
    return Shape(
        chunk=chunk,
        channels=width,
        features=wide,
        values=values,
        blocks=cdiv(value_dim, values),
        segment=segment or (1024 if narrow else 2048),
        warps=4 if few and itemsize == 2 else 8,
        stages=2 if wide <= 256 else 1,
    )


class Plan(NamedTuple):
    """What the launches of a call share.

    Attributes:
        shape: Block shapes.
        x: Tokens.
        sequences: How many there are.
        slots: Room for segments, of all sequences.
        several: Whether a sequence can have more than one.
        constants: What the kernels are compiled for.
    """

    shape: Shape
    x: Tokens
    sequences: int
    slots: int
    several: bool
    constants: dict[str, Any]

    @property
    def programs(self) -> int:
        """One for each key head of every slot."""
        return self.slots * self.x.G


def plan_for(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad: Tensor | None,
    rule: Rule,
    scale: float,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    turns: Tensor | None,
    precision: str,
    segment: int | None,
) -> Plan:
    """Everything that follows from shapes alone."""
    batch, length, heads, width = query.shape
    groups, values = value.shape[2:]
    rounds = query.dtype == torch.bfloat16
    shape = shape_for(width, values, rule.blocks, query.element_size(), segment, is_roomy(), grad is None, rounds)
    if cu_seqlens is None:
        sequences, slots = batch, batch * max(-(-length // shape.segment), 1)
    else:
        sequences = cu_seqlens.shape[0] - 1
        slots = length // shape.segment + sequences
    x = Tokens(
        query, key, value, grad, None if key_mask is None else key_mask.view(torch.uint8), cu_seqlens, turns,
        *query.stride(), *key.stride(), *value.stride(), *((0, 0, 0, 0) if grad is None else grad.stride()),
        *((0, 0) if key_mask is None else key_mask.stride()),
        scale, 2 * sequences + 3, 2 * length + 3, heads, groups, width, values, width * rule.blocks,
    )  # fmt: skip
    constants = {
        "MAP": rule.map,
        "EVEN": width == shape.channels,
        "PRECISION": precision,
        "ROUND": rounds,
        "SEGMENT": shape.segment,
        "BC": shape.chunk,
        "BD": shape.channels,
        "BF": shape.features,
        "BE": shape.values,
        "num_warps": shape.warps,
        "num_stages": shape.stages,
    }
    return Plan(shape, x, sequences, slots, length > shape.segment, constants)


def new_statistics(plan: Plan, number: int, covariance: Tensor | None = None) -> Statistics:
    """Room for some states, the covariances in what is there for them, if anything is."""
    x = plan.x

    def empty(*shape: int) -> Tensor:
        return torch.empty(number, x.G, *shape, dtype=torch.float32, device=x.p_q.device)

    return Statistics(
        count=torch.empty(number, x.G, dtype=torch.int64, device=x.p_q.device),
        key_mean=empty(x.F),
        value_mean=empty(x.E),
        covariance=empty(x.F, x.E) if covariance is None else covariance,
        rotated_key_mean=None if x.p_turns is None else empty(x.F),
    )


def new_results(plan: Plan) -> tuple[Tensor, Statistics, tuple[Tensor, ...]]:
    """What `forward` returns, with nothing in it yet."""
    query, value = plan.x.p_q, plan.x.p_v
    out = torch.empty(*query.shape[:3], value.shape[3], dtype=query.dtype, device=query.device)
    saved = new_statistics(plan, plan.slots) if plan.several else ()
    return out, new_statistics(plan, plan.sequences), tuple(x for x in saved if x is not None)


def past_of(saved: tuple[Tensor, ...], initial: Statistics | None) -> Statistics | Nothing:
    """What the segments start from: the states before each if there are several, else those given, if any."""
    return Statistics(*saved[:4], saved[4] if len(saved) > 4 else None) if saved else initial or NOTHING
