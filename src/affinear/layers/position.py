"""Learned positions of a grid, resized to whatever grid comes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..ops.precision import widen
from ..ops.tracing import is_compiling


class LearnedPosition(nn.Module):
    """Adds a learned table to maps (B, H, W, C), resized bilinearly if their size is another.

    Args:
        grid: Rows and columns of the table.
        dim: Channels C.
        device: Where the table lives.
        dtype: Its dtype.

    Example:
        >>> import torch
        >>> from affinear.layers import LearnedPosition
        >>> LearnedPosition((7, 7), 8)(torch.randn(2, 5, 9, 8)).shape
        torch.Size([2, 5, 9, 8])
    """

    def __init__(
        self,
        grid: tuple[int, int],
        dim: int,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(1, *grid, dim, device=device, dtype=dtype))
        nn.init.trunc_normal_(self.table, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """The map with its positions."""
        return x + resize_table(self.table, (x.shape[1], x.shape[2]))

    def extra_repr(self) -> str:
        """What `print` shows."""
        return f"grid={tuple(self.table.shape[1:3])}"


def resize_table(table: Tensor, grid: tuple[int, int]) -> Tensor:
    """A table of positions (1, H, W, C) for a grid of another size."""
    # A traced graph must not ask for the size; resized to its own, a table stays as it is.
    if not is_compiling() and tuple(table.shape[1:3]) == grid:
        return table
    resized = F.interpolate(widen(table).permute(0, 3, 1, 2), size=grid, mode="bilinear", align_corners=False)
    return resized.permute(0, 2, 3, 1).to(table.dtype)
