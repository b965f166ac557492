"""Softmax for the layers of transformers' networks that stay: they answer as they did before others were swapped."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..ops.softmax import attend_latest
from .scores import EXTRAS


def stay(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    causal: bool,
    given: Mapping[str, Any],
) -> Tensor:
    """Answers (B, N, H, E) of queries, keys and values (B, N, H, D).

    Args:
        module: The layer.
        query: (B, N, H, D).
        key: (B, M, G, D).
        value: (B, M, G, E).
        mask: Padding (B, M), or what each query sees (B, 1 or H, N, M), boolean or added to the scores.
        scaling: Factor of the scores.
        causal: Whether padding alone is in the mask, and later tokens have to be hidden as well.
        given: What else the layer passes to an attention function. Biases, caps, sinks and dropout of weights are
            known to the function in the layer's own file, which is asked where there are any.
    """
    extras = [name for name in EXTRAS if given.get(name) is not None]
    if extras or given.get("dropout"):
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        if eager is not None:
            heads = (x.transpose(1, 2) for x in (query, key, value))
            added = _added(query, key, mask, causal)
            return eager(module, *heads, added, scaling=scaling, **given)[0]
        if extras:
            raise ValueError(
                f"{extras[0]}: expected a function eager_attention_forward beside {type(module).__name__} that knows "
                "it, got none; swap all layers of this network or none"
            )
    if causal and (mask is None or mask.ndim == 2):
        return attend_latest(query, key, value, None if mask is None else mask.bool(), scaling)
    seen = None if mask is None else _seen(mask)
    grouped = query.shape[2] != key.shape[2]
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scaling, enable_gqa=grouped)
    return out.transpose(1, 2)


def _seen(mask: Tensor) -> Tensor:
    """What torch's attention takes: padding (B, 1, 1, M), or the mask as it is; who would see nothing sees all."""
    mask = mask.bool()[:, None, None] if mask.ndim == 2 else mask
    return mask | ~mask.any(-1, keepdim=True) if mask.dtype == torch.bool else mask


def _added(query: Tensor, key: Tensor, mask: Tensor | None, causal: bool) -> Tensor | None:
    """What is added to the scores, (B, 1 or H, N, M); None for nothing."""
    if mask is not None and mask.ndim == 4 and mask.is_floating_point():
        return mask
    seen = None if mask is None else (mask.bool()[:, None, None] if mask.ndim == 2 else mask)
    if causal and (mask is None or mask.ndim == 2):
        tokens, keys = query.shape[1], key.shape[1]
        earlier = torch.ones(tokens, keys, dtype=torch.bool, device=query.device).tril(keys - tokens)
        seen = earlier if seen is None else seen & earlier
    if seen is None:
        return None
    return torch.zeros_like(seen, dtype=query.dtype).masked_fill(~seen, torch.finfo(query.dtype).min)
