"""A short causal convolution, each channel by itself: what a token makes of the few before it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .places import Places


class ShortConvolution(nn.Module):
    """Depthwise and causal, followed by SiLU. It begins as the token itself.

    Args:
        channels: Of the tokens, C.
        size: Taps, K: the token itself and K - 1 before it, of its own document.
    """

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.weight = nn.Parameter(fresh(size, channels))

    def forward(self, x: Tensor, places: Places, before: Tensor | None) -> tuple[Tensor, Tensor]:
        """Tokens (B, N, C) after it, and the last K - 1 of them, (B, K - 1, C), which the next ones need.

        Args:
            x: Tokens.
            places: Where they stand; padding counts as zeros.
            before: What this returned for the tokens before these; None for a start.
        """
        if places.key_mask is not None:
            x = x.masked_fill(~places.key_mask[..., None], 0)
        reach = self.size - 1
        if places.share is not None and reach:
            before = places.share.tail_before(x, reach)
        known = x.new_zeros(x.shape[0], reach, x.shape[2]) if before is None else before.to(x.dtype)
        line = torch.cat((known, x), dim=1)
        weight = self.weight.to(x.dtype)
        out = x * weight[0]
        for step in range(1, self.size):
            earlier = line[:, reach - step : reach - step + x.shape[1]]
            if places.since is not None:  # not across the beginning of a document
                earlier = earlier.masked_fill((places.since < step)[:, None], 0)
            out = out + earlier * weight[step]
        return F.silu(out), line[:, line.shape[1] - reach :].clone()  # a slice would hold on to the whole text


def fresh(size: int, channels: int) -> Tensor:
    """Weights (K, C) to begin with: the token itself, and little of those before it."""
    weight = 0.02 * torch.randn(size, channels)
    weight[0] += 1
    return weight
