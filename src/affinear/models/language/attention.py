"""Causal attention of a language model's layer, with all that may stand around it."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ... import ops
from ...ops.rotary import rotate
from ...ops.softmax import attend_latest
from .cache import KeysLayer, StateLayer
from .config import AffinearConfig
from .convolution import ShortConvolution
from .places import Places


class HeadRMSNorm(nn.RMSNorm):
    """A norm of each head, whose weights are cast to the heads' dtype, as autocast leaves them in another."""

    def forward(self, x: Tensor) -> Tensor:
        """Heads (..., D) to heads."""
        assert self.weight is not None
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class CausalAttention(nn.Module):
    """Queries, keys and values; a convolution, norms and a gate where they are asked for; and any mechanism.

    Args:
        config: Of the model.
        layer: Its number, which says the mechanism.
    """

    def __init__(self, config: AffinearConfig, layer: int) -> None:
        super().__init__()
        self.mechanism = config.mechanism_of(layer)
        self.linear = ops.mechanisms()[self.mechanism].gain is not None
        self.width, width = config.head_width, config.hidden_size
        inner, keys = config.num_attention_heads * self.width, config.key_heads * self.width
        self.q_proj = nn.Linear(width, inner, bias=False)
        self.k_proj = nn.Linear(width, keys, bias=False)
        self.v_proj = nn.Linear(width, keys, bias=False)
        self.o_proj = nn.Linear(inner, width, bias=False)
        self.g_proj = nn.Linear(width, inner, bias=False) if config.gate else None
        self.conv = ShortConvolution(inner + 2 * keys, config.conv_size) if config.conv_size else None
        self.q_norm = HeadRMSNorm(self.width, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = HeadRMSNorm(self.width, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, places: Places, kept: StateLayer | KeysLayer | None = None) -> Tensor:
        """Tokens (B, N, C) to tokens; `kept` knows those before, and learns these."""
        query, key, value, recent = self._projected(x, places, kept)
        if isinstance(kept, StateLayer):
            answer, state = self._after_state(query, key, value, places, kept)
            kept.memory = replace(kept.memory, state=state, recent=recent, seen=kept.memory.seen + x.shape[1])
        elif self.linear:
            answer = self._alone(query, key, value, places)
        else:
            answer = self._softmax(query, key, value, places, kept)
            if kept is not None:
                kept.recent = recent
        answer = answer.flatten(2)
        if self.g_proj is not None:
            answer = answer * F.silu(self.g_proj(x))
        return self.o_proj(answer)

    def _projected(
        self, x: Tensor, places: Places, kept: StateLayer | KeysLayer | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries, keys and values (B, N, H, D), and what the convolution has to remember."""
        query, key, value = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        recent = None
        if self.conv is not None:
            sizes = [part.shape[-1] for part in (query, key, value)]
            before = None if kept is None else kept.recent
            joined, recent = self.conv(torch.cat((query, key, value), dim=-1), places, before)
            query, key, value = joined.split(sizes, dim=-1)
        query, key, value = (part.unflatten(-1, (-1, self.width)) for part in (query, key, value))
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        return query, key, value, recent

    def _alone(self, query: Tensor, key: Tensor, value: Tensor, places: Places) -> Tensor:
        """Linear attention of a whole text, or of packed ones."""
        return ops.attention(
            query, key, value, self.mechanism, causal=True, key_mask=places.key_mask, rotary=places.rotary,
            cu_seqlens_q=places.cu_seqlens, cu_seqlens_k=places.cu_seqlens, layout="bnhd",
            mesh=None if places.share is None else places.share.group,
        )  # fmt: skip

    def _after_state(
        self, query: Tensor, key: Tensor, value: Tensor, places: Places, kept: StateLayer
    ) -> tuple[Tensor, ops.State]:
        """Linear attention of the next tokens of a text."""
        kept.to(query.device)
        return ops.attention(
            query, key, value, self.mechanism, causal=True, key_mask=places.key_mask, rotary=places.rotary,
            initial_state=kept.memory.state, return_state=True, layout="bnhd",
        )  # fmt: skip

    def _softmax(self, query: Tensor, key: Tensor, value: Tensor, places: Places, kept: KeysLayer | None) -> Tensor:
        """Softmax, of the next tokens if earlier ones are kept."""
        if places.cu_seqlens is not None:
            return ops.attention(
                query, key, value, self.mechanism, causal=True, rotary=places.rotary,
                cu_seqlens_q=places.cu_seqlens, cu_seqlens_k=places.cu_seqlens, layout="bnhd",
            )  # fmt: skip
        if places.rotary is not None:
            query, key = rotate(query, places.rotary), rotate(key, places.rotary)
        mask = places.key_mask
        if kept is not None:
            key, value = (x.transpose(1, 2) for x in kept.update(key.transpose(1, 2), value.transpose(1, 2)))
            mask = places.whole_mask
        return attend_latest(query, key, value, mask)
