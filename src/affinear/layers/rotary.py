"""Rotary positions of a grid, for whatever size the grid has this time."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..ops import rotary_1d, rotary_2d


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


class ChannelRotary(nn.Module):
    """MILA's tables: over all channels before they are split into heads, so that heads turn differently.

    The first half of the channels turns with the row, the second with the column; dim / 4 frequencies run from 1 down
    towards 1 / base, which is not reached. With an even number of heads the first half of them knows rows alone.

    Args:
        dim: Channels C, a multiple of four.
        num_heads: Heads, a divisor of C into an even width.
        base: The slowest frequency is about 1 / base.

    Example:
        >>> from affinear.layers import ChannelRotary
        >>> import torch
        >>> cos, sin = ChannelRotary(128, 4)(torch.randn(2, 7, 9, 128))
        >>> cos.shape
        torch.Size([63, 4, 32])
    """

    def __init__(self, dim: int, num_heads: int, base: float = 10000.0) -> None:
        super().__init__()
        if dim % 4 or dim % (2 * num_heads):
            raise ValueError(
                f"dim: expected a multiple of 4 and of 2 x num_heads = {2 * num_heads}, as channels turn in pairs, "
                f"got {dim}"
            )
        self.dim, self.num_heads, self.base = dim, num_heads, base

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, each (H * W, num_heads, dim / num_heads), for a map (B, H, W, C)."""
        height, width = x.shape[1:3]
        rows = rotary_1d(height, self.dim // 2, base=self.base, device=x.device)
        columns = rotary_1d(width, self.dim // 2, base=self.base, device=x.device)

        def join(row: Tensor, column: Tensor) -> Tensor:
            table = torch.cat((row[:, None].expand(-1, width, -1), column.expand(height, -1, -1)), dim=-1)
            return table.flatten(0, 1).unflatten(-1, (self.num_heads, -1))

        return join(rows[0], columns[0]), join(rows[1], columns[1])

    def extra_repr(self) -> str:
        """What `print` shows."""
        return f"dim={self.dim}, num_heads={self.num_heads}, base={self.base:g}"
