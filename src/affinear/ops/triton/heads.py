"""Heads that turn differently, by tables (N, H, D), for kernels that know one table: end to end, or one call each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..rotary import Rotary
from ..state import State

Call = Callable[..., tuple[Tensor, State | None]]


def end_to_end(
    attention: Call, query: Tensor, key: Tensor, value: Tensor, rotary: Rotary, **given: Any
) -> tuple[Tensor, State | None]:
    """Attention of heads as packed sequences, one behind the other, with the batch in the heads' place: one launch."""
    length, heads = query.shape[1:3]

    def lay(x: Tensor) -> Tensor:
        return x.permute(2, 1, 0, 3).flatten(0, 1)[None]

    starts = length * torch.arange(heads + 1, device=query.device, dtype=torch.int32)
    tables = tuple(table.transpose(0, 1).flatten(0, 1) for table in rotary)
    given |= {"rotary": tables, "cu_seqlens_q": starts, "cu_seqlens_k": starts}
    out, _ = attention(lay(query), lay(key), lay(value), **given)
    return out[0].unflatten(0, (heads, length)).permute(2, 1, 0, 3), None


def one_by_one(
    attention: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotary: Rotary,
    initial_state: State | None,
    **given: Any,
) -> tuple[Tensor, State | None]:
    """Attention of each head by itself, with whatever else a call may have."""
    found = [
        attention(
            *(x[:, :, i : i + 1] for x in (query, key, value)),
            rotary=table_of(rotary, i),
            initial_state=None if initial_state is None else state_of(initial_state, i),
            **given,
        )
        for i in range(query.shape[2])
    ]
    states = [state for _, state in found if state is not None]
    return torch.cat([out for out, _ in found], dim=2), join(states) if states else None


def table_of(rotary: Rotary, head: int) -> Rotary:
    """Tables (N, D) of one head."""
    return rotary[0][:, head], rotary[1][:, head]


def state_of(state: State, head: int) -> State:
    """The state of one head."""
    return state.map(lambda x: x[:, head : head + 1])


def join(states: Sequence[State]) -> State:
    """One state of many heads from states of one head each."""
    first = states[0]

    def cat(name: str) -> Tensor:
        return torch.cat([getattr(state, name) for state in states], dim=1)

    rotated = None if first.rotated_key_mean is None else cat("rotated_key_mean")
    return State(cat("count"), cat("key_mean"), cat("value_mean"), cat("covariance"), first.mechanism, rotated)
