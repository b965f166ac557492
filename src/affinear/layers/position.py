"""Learned positions of a grid, resized to whatever grid comes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..ops.precision import widen
from ..ops.tracing import is_compiling
from .padding import extent


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
        nn.init.normal_(self.table, std=0.02)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The map with its positions; with a mask (B, H, W), the table is resized to each image, not to the batch."""
        if mask is not None:
            return x + _resize_to_each(self.table, mask)
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


def _resize_to_each(table: Tensor, mask: Tensor) -> Tensor:
    """The table resized to every image of a batch, (B, H, W, C); beyond an image its border goes on."""
    wide = widen(table).permute(0, 3, 1, 2)
    y, x = (
        2 * (torch.arange(side, device=mask.device, dtype=wide.dtype) + 0.5) / length[:, None] - 1
        for side, length in zip(mask.shape[1:], extent(mask), strict=True)
    )
    places = torch.stack(torch.broadcast_tensors(x[:, None, :], y[:, :, None]), dim=-1)
    # With this border and these corners, sampling at these places is the bilinear resizing of `resize_table`.
    sampled = F.grid_sample(
        wide.expand(len(mask), -1, -1, -1), places, mode="bilinear", padding_mode="border", align_corners=False
    )
    return sampled.permute(0, 2, 3, 1).to(table.dtype)
