"""Anchors: the boxes that a detector starts from, at every place of every level."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.image_list import ImageList


class Anchors(AnchorGenerator):
    """torchvision's anchors, to the fraction of a pixel, at the levels' own strides.

    torchvision rounds sides to pixels, which matters for objects of eight of them, and works out strides from the
    sizes of maps, which goes wrong where a side had to be rounded up.

    Args:
        sizes: Sides of each level, (levels, sizes).
        ratios: Heights over widths.
        strides: Pixels from place to place, of each level.
    """

    def __init__(self, sizes: Sequence[Sequence[float]], ratios: Sequence[float], strides: Sequence[int]) -> None:
        super().__init__(tuple(map(tuple, sizes)), (tuple(ratios),) * len(sizes))
        self.strides = tuple(strides)

    def generate_anchors(
        self,
        scales: Sequence[float],
        aspect_ratios: Sequence[float],
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> Tensor:
        """Boxes around the origin, ratio by ratio, (ratios * sizes, 4)."""
        sides = torch.as_tensor(scales, dtype=dtype, device=device)
        root = torch.as_tensor(aspect_ratios, dtype=dtype, device=device).sqrt()
        width, height = (sides / root[:, None]).flatten(), (sides * root[:, None]).flatten()
        return torch.stack((-width, -height, width, height), dim=1) / 2

    def forward(self, image_list: ImageList, feature_maps: list[Tensor]) -> list[Tensor]:
        """All anchors of each image, level by level, (N, 4) in float32."""
        self.set_cell_anchors(torch.float32, feature_maps[0].device)
        grids = [list(level.shape[-2:]) for level in feature_maps]
        strides: Any = [[stride] * 2 for stride in self.strides]  # as tensors each would be a wait for the GPU
        every = torch.cat(self.grid_anchors(grids, strides))
        return [every] * len(image_list.image_sizes)


def sizes_of(levels: Sequence[float], octaves: int) -> list[list[float]]:
    """Sides of the anchors of each level, so many between one and its double.

    Examples:
        >>> sizes_of((32, 64), 1)
        [[32.0], [64.0]]
    """
    return [[side * 2 ** (i / octaves) for i in range(octaves)] for side in levels]


def on_image(anchors: Tensor, size: tuple[int, int]) -> Tensor:
    """Whether anchors (N, 4) stand on an image, and not on the padding beside it."""
    middle = (anchors[:, :2] + anchors[:, 2:]) / 2
    return (middle[:, 0] < size[1]) & (middle[:, 1] < size[0])


def on_images(anchors: Tensor, rims: Tensor) -> Tensor:
    """Whether anchors (N, 4) stand on images with right and bottom rims (B, 2), (B, N)."""
    middle = (anchors[:, :2] + anchors[:, 2:]) / 2
    return (middle < rims[:, None]).all(dim=-1)
