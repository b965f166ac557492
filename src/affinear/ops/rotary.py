"""Rotary positions: tables of cosines and sines, and the rotation of features by them.

Channels rotate in adjacent pairs (0, 1), (2, 3), ...: a table holds each pair's cosine and sine twice.
"""

from __future__ import annotations

import torch
from torch import Tensor

Rotary = tuple[Tensor, Tensor]


def rotary_1d(
    length: int, dim: int, *, base: float = 10000.0, offset: int = 0, device: torch.device | str | None = None
) -> Rotary:
    """Tables for positions in a sequence, with frequencies base ** (-2m / dim).

    Args:
        length: Number of positions N.
        dim: Head width D, even.
        base: The slowest frequency is about 1 / base.
        offset: First position, for a piece of a longer sequence.
        device: Where the tables live.

    Returns:
        Cosines and sines, each (N, D) in float32.

    Example:
        >>> from affinear.ops import rotary_1d
        >>> cos, sin = rotary_1d(10, 8)
        >>> cos.shape
        torch.Size([10, 8])
    """
    _check_width("dim", dim, multiple=2)
    position = torch.arange(offset, offset + length, device=device, dtype=torch.float64)
    frequency = base ** -(torch.arange(0, dim, 2, device=device, dtype=torch.float64) / dim)
    return _tables(torch.outer(position, frequency))


def rotary_2d(
    height: int,
    width: int,
    dim: int,
    *,
    base: float = 10000.0,
    offset: int = 0,
    device: torch.device | str | None = None,
) -> Rotary:
    """Axial tables for a grid read row by row, as MAViT and NaLaFormer use them.

    The first half of the channels turns with the row, the second with the column; dim / 4 frequencies run from 1 down
    to 1 / base, both included.

    Args:
        height: Rows of the grid.
        width: Columns of the grid.
        dim: Head width D, a multiple of four.
        base: The slowest frequency is 1 / base.
        offset: First row, for a strip of a taller grid.
        device: Where the tables live.

    Returns:
        Cosines and sines, each (height * width, D) in float32.

    Example:
        >>> from affinear.ops import rotary_2d
        >>> cos, sin = rotary_2d(14, 14, 64)
        >>> cos.shape
        torch.Size([196, 64])
    """
    _check_width("dim", dim, multiple=4)
    exponent = torch.linspace(0, 1, dim // 4, device=device, dtype=torch.float64)
    frequency = base**-exponent
    row = torch.outer(torch.arange(offset, offset + height, device=device, dtype=torch.float64), frequency)
    column = torch.outer(torch.arange(width, device=device, dtype=torch.float64), frequency)
    angle = torch.cat((row[:, None].expand(-1, width, -1), column.expand(height, -1, -1)), dim=-1)
    return _tables(angle.flatten(0, 1))


def rotate(features: Tensor, rotary: Rotary) -> Tensor:
    """Turn the channel pairs of features (B, N, H, F) by tables (N, D) or (N, H, D); F is D, or several blocks of D."""
    tables = (table if is_for_each_head(rotary) else table[:, None] for table in rotary)
    cos, sin = (table.to(features.dtype)[:, :, None] for table in tables)
    blocks = features.unflatten(-1, (-1, cos.shape[-1]))
    even, odd = blocks.unflatten(-1, (-1, 2)).unbind(-1)
    quarter_turn = torch.stack((-odd, even), dim=-1).flatten(-2)
    return (blocks * cos + quarter_turn * sin).flatten(-2)


def is_for_each_head(rotary: Rotary | None) -> bool:
    """Whether every head turns in its own way, by tables (N, H, D)."""
    return rotary is not None and rotary[0].ndim == 3


def _tables(angle: Tensor) -> Rotary:
    # Angles are multiplied out in float64: at a million tokens float32 would be off by a tenth of a radian.
    pairs = angle.repeat_interleave(2, dim=-1)
    return pairs.cos().float(), pairs.sin().float()


def _check_width(name: str, width: int, *, multiple: int) -> None:
    if width <= 0 or width % multiple:
        raise ValueError(f"{name}: expected a positive multiple of {multiple}, got {width}; pad the head width")
