"""What becomes of a bias of position, and of windows that are cut into regions."""

from __future__ import annotations

import torch
from torch import Tensor

from .core import LinearCore

REGIONS = 4  # a shifted window has at most so many: cut once from left to right and once from top to bottom


def add_position(out: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    """Answers with attention by position alone added: the softmax of the bias, less the plain mean.

    To first order in scores s and bias b, softmax(s + b) v is v_mean + cov(s, v) + cov(b, v). A linear answer has the
    first two terms; the third is softmax(b) v - v_mean. Rows still sum to one.

    Args:
        out: (B, N, H, E), the answers without bias.
        value: (B, M, H, E).
        bias: (H, N, M), or (B, H, N, M); -inf or far below the others where a query may not look.

    Returns:
        (B, N, H, E).
    """
    share = bias.float().softmax(-1)
    seen = (bias > -50).float()  # what softmax gives nothing to has no part in the mean either
    share = (share - seen / seen.sum(-1, keepdim=True).clamp(min=1)).to(value.dtype)
    inputs = "hnm,bmhe->bnhe" if share.ndim == 3 else "bhnm,bmhe->bnhe"
    return out + torch.einsum(inputs, share, value).to(out.dtype)


def regions_of(mask: Tensor) -> Tensor:
    """The region of each token of windows (W, N), from what their queries may see (W, N, N): 0 where they may."""
    visible = mask == 0
    first = visible.to(torch.int8).argmax(-1)  # each region is known by its first token
    is_first = first == torch.arange(mask.shape[-1], device=mask.device)
    return (is_first.cumsum(-1) - 1).gather(-1, first)


def attend_in_regions(core: LinearCore, query: Tensor, key: Tensor, value: Tensor, regions: Tensor) -> Tensor:
    """Answers (B, N, H, E) of windows whose tokens see only those of their own region (W, N); W divides B."""
    regions = regions.repeat(query.shape[0] // regions.shape[0], 1)
    out = torch.zeros_like(query[..., : value.shape[-1]])
    for region in range(REGIONS):
        mine = regions == region
        answer = core(query, key, value, key_mask=mine)
        out = torch.where(mine[..., None, None], answer, out)
    return out
