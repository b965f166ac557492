"""The torch backend: linear time and memory on CPU, MPS, anything. Chooses whether to work whole or tile by tile."""

from __future__ import annotations

from torch import Tensor

from . import linear, softmax, tiles
from .causal import causal_attention
from .mechanisms import Mechanism
from .rotary import Rotary
from .state import State, merge


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mechanism: Mechanism,
    scale: float,
    causal: bool,
    key_mask: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    rotary: Rotary | None,
    initial_state: State | None,
    return_state: bool,
) -> tuple[Tensor, State | None]:
    """Answers (B, N, H, E), and the state of all keys if asked for."""
    if mechanism.gain is None:
        return softmax.attention(
            query, key, value, mechanism=mechanism, scale=scale, causal=causal, key_mask=key_mask,
            cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, rotary=rotary,
        ), None  # fmt: skip
    if causal and query.shape[1] != 1:  # one token sees itself and what came before, either way, and merging is quicker
        out, state = _causal(query, key, value, mechanism, scale, key_mask, cu_seqlens_k, rotary, initial_state)
        return out, state if return_state else None
    state = summarize(key, value, mechanism=mechanism, key_mask=key_mask, cu_seqlens=cu_seqlens_k, rotary=rotary)
    if initial_state is not None:
        state = merge(initial_state, state)
    out = attend(query, state, scale=scale, cu_seqlens=cu_seqlens_q, rotary=rotary)
    return out, state if return_state else None


def summarize(
    key: Tensor,
    value: Tensor,
    *,
    mechanism: Mechanism,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    rotary: Rotary | None,
) -> State:
    """The state of keys (B, M, H, D) and values (B, M, H, E)."""
    if cu_seqlens is None and tiles.worthwhile(mechanism, rotary, key):
        return tiles.summarize(key, value, tiles.Work(mechanism, 1.0, tiles.tile_length(key), key_mask, rotary))
    return linear.summarize(key, value, mechanism=mechanism, key_mask=key_mask, cu_seqlens=cu_seqlens, rotary=rotary)


def attend(query: Tensor, state: State, *, scale: float, cu_seqlens: Tensor | None, rotary: Rotary | None) -> Tensor:
    """Answers to queries (B, N, H, D), as (B, N, H, E)."""
    if cu_seqlens is None and tiles.worthwhile(state.mechanism, rotary, query):
        return tiles.attend(query, state, tiles.Work(state.mechanism, scale, tiles.tile_length(query), None, rotary))
    return linear.attend(query, state, scale=scale, cu_seqlens=cu_seqlens, rotary=rotary)


def _causal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mechanism: Mechanism,
    scale: float,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    rotary: Rotary | None,
    initial: State | None,
) -> tuple[Tensor, State]:
    if cu_seqlens is None and tiles.worthwhile(mechanism, rotary, query):
        work = tiles.Work(mechanism, scale, tiles.tile_length(query), key_mask, rotary)
        if initial is None:
            nothing = work.options(slice(0, 0))
            initial = linear.summarize(key[:, :0].detach(), value[:, :0].detach(), mechanism=mechanism, **nothing)
        return tiles.causal_attention(query, key, value, initial, work)
    return causal_attention(query, key, value, mechanism, scale, key_mask, cu_seqlens, rotary, initial)
