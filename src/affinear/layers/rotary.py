"""Rotary positions of a grid, for whatever size the grid has this time."""

from __future__ import annotations

from torch import Tensor, nn

from ..ops import rotary_2d


class AxialRotary(nn.Module):
    """Tables of `affinear.ops.rotary_2d` for a grid whose size is known when it comes.

    It has no weights and no buffers, so any size may follow any other.

    Args:
        head_dim: Width of a head, a multiple of four.
        base: The slowest frequency is 1 / base.

    Example:
        >>> from affinear.layers import AxialRotary
        >>> import torch
        >>> cos, sin = AxialRotary(64)(torch.randn(2, 7, 9, 128))
        >>> cos.shape
        torch.Size([63, 64])
    """

    def __init__(self, head_dim: int, base: float = 10000.0) -> None:
        super().__init__()
        self.head_dim, self.base = head_dim, base

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, each (H * W, head_dim), for a map (B, H, W, C)."""
        return rotary_2d(x.shape[1], x.shape[2], self.head_dim, base=self.base, device=x.device)

    def extra_repr(self) -> str:
        """What `print` shows."""
        return f"head_dim={self.head_dim}, base={self.base:g}"
