"""MILA's branch: what queries and keys are projected from, and what is itself the values."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .convolution import DepthwiseConv


class Branch(nn.Module):
    """A linear layer, a depthwise convolution and a SiLU, of tokens that lie on a grid after any class tokens.

    Args:
        dim: Channels C.
        kernel_size: Side of the convolution, which class tokens do not see.
        prefix_tokens: Number of class tokens in front.
        device: Where the weights live.
        dtype: Their dtype.

    Example:
        >>> import torch
        >>> from affinear.layers import Branch
        >>> Branch(8, 3)(torch.randn(2, 5 * 7, 8), (5, 7)).shape
        torch.Size([2, 35, 8])
    """

    def __init__(
        self,
        dim: int,
        kernel_size: int,
        prefix_tokens: int = 0,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.prefix_tokens = prefix_tokens
        self.proj = nn.Linear(dim, dim, device=device, dtype=dtype)
        self.conv = DepthwiseConv(dim, kernel_size, device=device, dtype=dtype)

    def forward(self, x: Tensor, grid: tuple[int, int], mask: Tensor | None = None) -> Tensor:
        """Tokens (B, N, C); the convolution sees zeros where the mask (B, N) is False."""
        x = self.proj(x)
        if mask is not None:
            x = x * mask[..., None]
        places = self.conv(x[:, self.prefix_tokens :].unflatten(1, grid)).flatten(1, 2)
        if self.prefix_tokens:
            places = torch.cat((x[:, : self.prefix_tokens], places), dim=1)
        return F.silu(places)
