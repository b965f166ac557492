"""RALA's part: keys weighed by how the mean query sees them, before they are summed."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..ops import Mechanism
from ..ops.mechanisms import identity
from ..ops.precision import exact, widen


def weigh_keys(
    query: Tensor, key: Tensor, mechanism: Mechanism, key_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Mechanism]:
    """Features of queries and keys, those of keys weighed, and the mechanism that takes features as they are.

    With the mean feature of the queries, q_mean, and n tokens, the features of key j are multiplied by

        alpha_j = n * softmax_j(D ** -0.5 * q_mean . phi(k_j))

    which sum to n. Of RALA (Breaking the Low-Rank Dilemma of Linear Attention, arXiv 2411.07635). The weights need all
    queries, so no state of keys alone can hold them: see the theory page.

    Args:
        query: (B, N, H, D), of the tokens that the keys are of.
        key: (B, N, H, D), same dtype and device.
        mechanism: One with feature maps: any but softmax.
        key_mask: (B, N), boolean. False takes a token out, as a query and as a key.

    Returns:
        Features of queries and keys, each (B, N, H, F), in the dtype of the query but float32 for float16, which
        n times a feature would leave; and the mechanism for them.

    Example:
        >>> import torch, affinear as af
        >>> from affinear.layers import weigh_keys
        >>> q, k, v = torch.randn(3, 2, 50, 4, 32).unbind()
        >>> features_q, features_k, rule = weigh_keys(q, k, af.mechanisms()["linear"])
        >>> af.attention(features_q, features_k, v, rule).shape
        torch.Size([2, 50, 4, 32])
    """
    wide_q, wide_k = widen(query), widen(key)
    if key_mask is not None:
        hidden = ~key_mask[..., None, None]  # what is masked may hold anything, even NaN
        wide_q, wide_k = wide_q.masked_fill(hidden, 0), wide_k.masked_fill(hidden, 0)
    with exact(query):
        features_q, features_k = mechanism.query_map(wide_q), mechanism.key_map(wide_k)
        logits = torch.einsum("bhf,bnhf->bnh", _mean(features_q, key_mask), features_k) * query.shape[-1] ** -0.5
        weighed = features_k * _alpha(logits, key_mask)[..., None]
    bare = replace(mechanism, query_map=identity, key_map=identity, scale=mechanism.scale_for(query.shape[-1]))
    dtype = features_q.dtype if query.dtype == torch.float16 else query.dtype
    return features_q.to(dtype), weighed.to(dtype), bare


def _mean(features: Tensor, mask: Tensor | None) -> Tensor:
    """Over tokens that are there, (B, H, F)."""
    if mask is None:
        return features.mean(dim=1)
    share = mask.to(features.dtype) / mask.sum(dim=1, keepdim=True).clamp(min=1)
    return torch.einsum("bn,bnhf->bhf", share, features)


def _alpha(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Weights (B, N, H) that sum to the number of tokens that are there."""
    if mask is None:
        return logits.softmax(dim=1) * logits.shape[1]
    seen = mask[..., None]
    nothing = ~seen.any(dim=1, keepdim=True)  # an empty row is shared evenly, and masked out by the operator
    alpha = logits.masked_fill(~seen & ~nothing, -torch.inf).softmax(dim=1)
    return alpha * seen.sum(dim=1, keepdim=True)
