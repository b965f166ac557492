"""Padding of maps in batches of images of several sizes, so that it can be kept out of every sum.

An image lies in the upper left corner of its place in the batch. A mask (B, H, W) is True where there is image.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def mask_of(
    sizes: Sequence[tuple[int, int]] | Tensor, grid: tuple[int, int], device: torch.device | None = None
) -> Tensor:
    """Where a batch of padded images is image, (B, H, W), boolean.

    Args:
        sizes: Rows and columns of each image, as pairs, or as a tensor (B, 2), which is taken as it is.
        grid: Rows H and columns W of the batch.
        device: Where the mask lives.

    Example:
        >>> from affinear.layers import mask_of
        >>> mask_of([(1, 2), (2, 3)], (2, 3)).int().tolist()
        [[[1, 1, 0], [0, 0, 0]], [[1, 1, 1], [1, 1, 1]]]
    """
    for size in () if isinstance(sizes, Tensor) else sizes:
        if not (1 <= size[0] <= grid[0] and 1 <= size[1] <= grid[1]):
            raise ValueError(
                f"sizes: expected images of 1 x 1 to {grid[0]} x {grid[1]}, the size of the batch, got {size[0]} x "
                f"{size[1]}; give rows and columns of each image as it lies in the batch"
            )
    sizes = sizes.to(device) if isinstance(sizes, Tensor) else torch.tensor(sizes, device=device).view(-1, 2)
    rows, columns = sizes.unbind(1)
    row, column = (torch.arange(side, device=device) for side in grid)
    return (row < rows[:, None])[:, :, None] & (column < columns[:, None])[:, None, :]


def blank(x: Tensor, mask: Tensor | None) -> Tensor:
    """A map (B, H, W, C) with zeros where there is no image; the map itself without a mask."""
    return x if mask is None else x.masked_fill(~mask[..., None], 0)


def extent(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns of each image, each (B,)."""
    return mask[:, :, 0].sum(dim=1), mask[:, 0, :].sum(dim=1)


def masked_mean(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """The mean (B, C) of tokens (B, N, C), without those where a mask (B, N) is False."""
    if key_mask is None:
        return x.mean(dim=1)
    weight = key_mask[..., None].to(x.dtype)
    return (x * weight).sum(dim=1) / weight.sum(dim=1).clamp_min(1)


def masked_norm(norm: nn.Module, x: Tensor, mask: Tensor | None) -> Tensor:
    """A batch norm of maps (B, C, H, W) whose statistics are those of the images alone.

    Args:
        norm: A batch norm, of one process or many.
        x: (B, C, H, W).
        mask: (B, H, W), or None for a map without padding.
    """
    if mask is None or not norm.training:
        return norm(x)
    places = x.permute(0, 2, 3, 1)
    normed = norm(places[mask][..., None, None])[..., 0, 0]
    out = torch.zeros_like(places, dtype=normed.dtype)
    out[mask] = normed
    return out.permute(0, 3, 1, 2)
