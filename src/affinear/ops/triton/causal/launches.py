"""Launches: answers and the state they end in, and gradients of both."""

from __future__ import annotations

import torch
from torch import Tensor

from ..rules import Rule
from ..sizes import cdiv
from ..starting import on
from ..statistics import Statistics
from .answers import causal_kernel
from .calls import NOTHING, Plan, new_results, new_statistics, past_of, plan_for
from .future import add_segments_kernel, sum_queries_kernel
from .keys import key_kernel
from .queries import query_kernel
from .rows import ROWS
from .segments import merge_segments_kernel, sum_segments_kernel

WIDE = 1024  # numbers that one program adds up


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rule: Rule,
    scale: float,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    turns: Tensor | None,
    initial: Statistics | None,
    precision: str,
    segment: int | None = None,
) -> tuple[Tensor, Statistics, tuple[Tensor, ...]]:
    """Answers to queries that see the keys up to their own, the state after all of them, and what `backward` wants.

    Args:
        query: (B, N, H, D), any strides, as all tokens.
        key: (B, N, G, D), where G divides H.
        value: (B, N, G, E).
        rule: The mechanism.
        scale: Factor of all scores.
        key_mask: (B, N), True where a key takes part.
        cu_seqlens: (S + 1,), bounds of packed sequences; the batch is then one.
        turns: (N, D), cosines and sines of channel pairs side by side.
        initial: State before the first token of every sequence.
        precision: How products are taken: "split" for half precision, "tf32" or "ieee".
        segment: Tokens that one program walks through, a power of two; None is what suits the width.
    """
    plan = plan_for(query, key, value, None, rule, scale, key_mask, cu_seqlens, turns, precision, segment)
    out, final, saved = new_results(plan)
    past, x, shape = past_of(saved, initial), plan.x, plan.shape
    grid = plan.programs, shape.blocks
    if plan.several:
        # Most of a state is its covariance: what came before a segment takes the place of the segment's own.
        parts = new_statistics(plan, plan.slots, past.covariance)
        on(sum_segments_kernel, grid)(x, parts, **plan.constants)
        rows, columns = 16, min(shape.values, 128)
        on(merge_segments_kernel, (plan.sequences * x.G, cdiv(x.F, rows), cdiv(x.E, columns)))(
            x, parts, initial or NOTHING, past, SEGMENT=shape.segment, BR=rows, BE=columns, num_warps=4
        )
    on(causal_kernel, grid)(
        x, past, final, out, GAIN=rule.gain, RELEASED=rule.released, SEVERAL=plan.several, GROUP=x.H // x.G,
        **plan.constants,
    )  # fmt: skip
    return out, final, saved


def new_partial(plan: Plan, like: Tensor) -> Tensor | None:
    """Room for gradients of features that blocks of values add up, where there are several."""
    if plan.shape.blocks == 1:
        return None
    return torch.empty(*like.shape[:3], plan.x.F, dtype=torch.float32, device=like.device)


def backward(
    grad_out: Tensor,
    grad_final: Statistics | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rule: Rule,
    scale: float,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    turns: Tensor | None,
    initial: Statistics | None,
    final: Statistics,
    saved: tuple[Tensor, ...],
    precision: str,
    segment: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Statistics | None]:
    """Gradients of queries, keys, values and the initial state, from those of the answers and of the final state.

    Args:
        grad_out: (B, N, H, E), any strides.
        grad_final: Gradient of the final state, its count ignored, or None.
        query: As for `forward`, and so are all others up to `initial`.
        key: See there.
        value: See there.
        rule: See there.
        scale: See there.
        key_mask: See there.
        cu_seqlens: See there.
        turns: See there.
        initial: See there.
        final: What `forward` returned, as is `saved`.
        saved: See there.
        precision: As for `forward`.
        segment: As for `forward`.
    """
    plan = plan_for(query, key, value, grad_out, rule, scale, key_mask, cu_seqlens, turns, precision, segment)
    x, shape, past = plan.x, plan.shape, past_of(saved, initial)
    grad_query, grad_key, grad_value = (
        torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (query, key, value)
    )
    grad_initial = None
    if initial is not None:
        empty = (None if t is None else torch.empty_like(t) for t in initial[1:])
        grad_initial = Statistics(initial.count, *empty)
    rows = torch.empty(query.shape[0], x.H, ROWS.value, query.shape[1], dtype=torch.float32, device=query.device)
    constants = {"GROUP": x.H // x.G, **plan.constants}
    partial = new_partial(plan, query)
    for i in range(shape.blocks):
        on(query_kernel, (plan.programs,))(
            x, past, initial or NOTHING, final, grad_query, partial, rows, i, GAIN=rule.gain, RELEASED=rule.released,
            SEVERAL=plan.several, FIRST=i == 0, LAST=i == shape.blocks - 1, **constants,
        )  # fmt: skip
    sums = None
    if plan.several:
        width = x.E * x.F + 2 * x.F + x.E
        sums = torch.empty(plan.programs, width, dtype=torch.float32, device=query.device)
        on(sum_queries_kernel, (plan.programs, shape.blocks))(x, rows, sums, **constants)
        on(add_segments_kernel, (plan.sequences * x.G, cdiv(width, WIDE)))(x, sums, SEGMENT=shape.segment, BW=WIDE)
    partial = new_partial(plan, key)
    # One after the other: the registers of a program have no room for both gradients beside the state.
    for of_keys in (True, False):
        for i in range(shape.blocks):
            on(key_kernel, (plan.programs,))(
                x, past, initial or NOTHING, final, grad_final or NOTHING, grad_initial or NOTHING,
                grad_key, grad_value, partial, rows, sums, i, SEVERAL=plan.several,
                FIRST=i == 0, LAST=i == shape.blocks - 1, OF_KEYS=of_keys, **constants,
            )  # fmt: skip
    return grad_query, grad_key, grad_value, grad_initial
