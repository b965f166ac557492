"""What the levels of a pyramid show in regions of an image."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchvision.ops import roi_align

from .matching import Rows

CANONICAL = 224.0  # side of a region that is looked up at stride 16, as the pyramid's paper has it


class RegionPool(nn.Module):
    """RoIAlign from the level that fits a region's size.

    Args:
        size: Side of the pooled maps.
        strides: Of the levels that are pooled from, the finest first.
        sampling: Points in a bin along each side; 0 for as many as it has pixels.
        aligned: Whether a pixel's value is taken to be at its middle.
    """

    def __init__(self, size: int, strides: Sequence[int], sampling: int, aligned: bool) -> None:
        super().__init__()
        self.size, self.strides = size, tuple(strides)
        self.sampling, self.aligned = sampling, aligned

    def forward(self, features: dict[str, Tensor], boxes: list[Tensor], sizes: list[tuple[int, int]]) -> Tensor:
        """Maps (regions, C, size, size) of all regions.

        Args:
            features: Levels by name, the finest first; coarser ones than are pooled from are left out.
            boxes: Left, top, right and bottom of the regions of each image.
            sizes: Height and width of each image.
        """
        levels = list(features.values())[: len(self.strides)]
        every = torch.cat(boxes)
        regions = torch.cat((Rows.of(boxes).owner[:, None].to(every), every), dim=1)
        chosen = self.level(every)
        # One wait for the GPU, not one for each level; a region that is no number is on none.
        counts: list[int] = (chosen == torch.arange(len(levels), device=every.device)[:, None]).sum(dim=1).tolist()
        order = chosen.argsort(stable=True)[len(every) - sum(counts) :]
        pooled = [
            roi_align(bordered(level, sizes, stride), some, self.size, 1 / stride, self.sampling or -1, self.aligned)
            for level, stride, some in zip(levels, self.strides, regions[order].split(counts), strict=True)
        ]
        out = levels[0].new_zeros(len(every), levels[0].shape[1], self.size, self.size)
        return out.index_copy(0, order, torch.cat(pooled).to(out.dtype))

    def level(self, boxes: Tensor) -> Tensor:
        """Which level each box (N, 4) is looked up in, (N,)."""
        side = ((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])).sqrt()
        place = 4 + torch.log2(side / CANONICAL) + 1e-6 - math.log2(self.strides[0])
        return place.floor().clamp(0, len(self.strides) - 1).long()


def bordered(level: Tensor, sizes: Sequence[tuple[int, int]], stride: int) -> Tensor:
    """A map whose last row and column of image go on once more into the padding.

    A point near the border lies between the last place and the next. Alone, an image has no next place and its last
    one counts twice; this makes it so beside larger images, too.
    """
    height, width = level.shape[-2:]
    rows = [-(-size[0] // stride) for size in sizes]
    columns = [-(-size[1] // stride) for size in sizes]
    for dim, last, side in ((2, rows, height), (3, columns, width)):
        if all(one >= side for one in last):
            continue
        place = torch.arange(side, device=level.device)
        here = place == torch.tensor(last, device=level.device)[:, None]
        here = here[:, None, :, None] if dim == 2 else here[:, None, None, :]
        level = torch.where(here, level.roll(1, dim), level)
    return level
