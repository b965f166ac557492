"""Mamba2's scan in products of matrices, which transformers before 5.22 takes number by number without its kernels.

S_t = exp(A d_t) S_(t-1) + d_t B_t x_t, y_t = C_t S_t + D x_t, for every head: inside of a chunk of tokens as attention
whose weights decay, and from chunk to chunk by the state (Dao and Gu 2024, state space duality).
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@contextmanager
def in_products() -> Generator[None]:
    """Have transformers' Mamba2 scan so."""
    from transformers.models.mamba2 import modeling_mamba2 as modeling

    theirs, modeling.mamba2_chunk_scan = modeling.mamba2_chunk_scan, scan
    try:
        yield
    finally:
        modeling.mamba2_chunk_scan = theirs


def scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    chunk_size: int,
    D: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    **_: Any,
) -> Tensor:
    """What all tokens come to, (B, N, H, P).

    Args:
        hidden_states: (B, N, H, P).
        dt: (B, N, H), before bias and softplus.
        A: (H,), negative.
        B: (B, N, 1, S): all heads have the same.
        C: (B, N, 1, S).
        chunk_size: Tokens of a chunk.
        D: (H,).
        dt_bias: (H,).
        dt_limit: Of d.
    """
    length = hidden_states.shape[1]
    step = F.softplus(dt.float() + dt_bias).clamp(*dt_limit)

    def chunks(x: Tensor) -> Tensor:
        """(B, N, H, W) to (B, T, H, L, W); what only fills up leaves states as they are."""
        padded = F.pad(x, (0, 0, 0, 0, 0, -length % chunk_size))
        return padded.unflatten(1, (-1, chunk_size)).transpose(2, 3)

    x, b, c = chunks(hidden_states * step[..., None]), chunks(B), chunks(C)
    level = chunks((A * step)[..., None]).cumsum(-2)
    later = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=x.device).triu(1)
    decay = (level - level.mT).masked_fill(later, -torch.inf).exp()
    last = level[..., -1:, :]
    added = b.mT @ ((last - level).exp() * x)
    before = _states_before(added, last.exp())
    out = (c @ b.mT * decay) @ x + level.exp() * (c @ before)
    return out.transpose(2, 3).flatten(1, 2)[:, :length] + D[:, None] * hidden_states


def _states_before(added: Tensor, kept: Tensor) -> Tensor:
    """The state before each chunk, (B, T, H, S, P), of what chunks add to it and which share of it they keep."""
    state, found = torch.zeros_like(added[:, 0]), list[Tensor]()
    for more, share in zip(added.unbind(1), kept.unbind(1), strict=True):
        found.append(state)
        state = share * state + more
    return torch.stack(found, dim=1)
