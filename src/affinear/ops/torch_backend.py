"""The torch backend: linear time and memory on CPU, MPS, anything. Chooses whether to work whole or tile by tile."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from . import linear, tiles
from .causal import causal_attention
from .mechanisms import Mechanism
from .packing import visibility
from .rotary import Rotary, rotate
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
        if rotary is not None:
            query, key = rotate(query, rotary), rotate(key, rotary)
        visible = None
        if key_mask is not None or cu_seqlens_k is not None:
            visible = visibility(query, key, causal, key_mask, cu_seqlens_q, cu_seqlens_k)
        return softmax(query, key, value, scale, visible, causal), None
    if causal:
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


def softmax(query: Tensor, key: Tensor, value: Tensor, scale: float, visible: Tensor | None, causal: bool) -> Tensor:
    """Softmax attention (B, N, H, E) through torch's own; `visible` (B or 1, 1, N, M) where no flag says it all."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    grouped = query.shape[1] != key.shape[1]
    if visible is None:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scale, enable_gqa=grouped)
        return out.transpose(1, 2)
    # A row that sees nothing is given everything, and its answer is then taken away: no NaN, no gradient.
    blind = ~visible.any(dim=-1, keepdim=True)
    key, value = (x.masked_fill(~visible.any(dim=-2)[..., None], 0) for x in (key, value))
    out = F.scaled_dot_product_attention(query, key, value, visible | blind, scale=scale, enable_gqa=grouped)
    return out.masked_fill(blind, 0).transpose(1, 2)
