"""SemanticFPN: a feature pyramid, each level brought to stride 4 by convolutions and enlargements, and summed.

Paper: Panoptic Feature Pyramid Networks, arXiv 1901.02446; with batch norms, as PVT's and MALA's segmenters have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

from torch import Tensor, nn
from torch.nn import functional as F

from .parts import Classifier, ConvNorm, enlarge, resize


class FeaturePyramid(nn.Module):
    """Every map in one width, with what the coarser ones know added from above, by nearest neighbours.

    Args:
        channels: Of the maps, finest first.
        width: Channels of all maps that come out.
    """

    def __init__(self, channels: Sequence[int], width: int) -> None:
        super().__init__()
        self.lateral = nn.ModuleList(nn.Conv2d(dim, width, 1) for dim in channels)
        self.output = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in channels)
        for module in (*self.lateral, *self.output):
            conv = cast(nn.Conv2d, module)
            nn.init.xavier_uniform_(conv.weight)
            nn.init.zeros_(cast(Tensor, conv.bias))

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """Maps of the same sizes."""
        maps = [conv(x) for conv, x in zip(self.lateral, maps, strict=True)]
        above = maps[-1]
        summed = [above]
        for x in reversed(maps[:-1]):
            above = x + F.interpolate(above, size=x.shape[2:], mode="nearest")
            summed.insert(0, above)
        return [conv(x) for conv, x in zip(self.output, summed, strict=True)]


class Enlarge(nn.Module):
    """Twice the rows and columns, bilinearly."""

    def forward(self, x: Tensor) -> Tensor:
        """The larger map."""
        return enlarge(x, (2 * x.shape[2], 2 * x.shape[3]))


class SemanticFPN(nn.Module):
    """One number per class at every place of the finest map.

    Args:
        channels: Of the backbone's maps, finest first.
        num_classes: Classes.
        width: Channels of the pyramid.
        head_width: Channels after its convolutions.
        drop_rate: Dropout before the classifier.
        strides: Of the maps; a level has as many convolutions as it needs to be doubled to the finest, one at least.

    Example:
        >>> import torch
        >>> from affinear.models.heads import SemanticFPN
        >>> maps = [torch.randn(1, 8, 16 // 2**i, 16 // 2**i) for i in range(4)]
        >>> SemanticFPN([8, 8, 8, 8], 5).eval()(maps).shape
        torch.Size([1, 5, 16, 16])
    """

    def __init__(
        self,
        channels: Sequence[int],
        num_classes: int,
        width: int = 256,
        head_width: int = 128,
        drop_rate: float = 0.1,
        strides: Sequence[int] = (4, 8, 16, 32),
    ) -> None:
        super().__init__()
        self.neck = FeaturePyramid(channels, width)
        self.levels = nn.ModuleList(_level(width, head_width, stride // strides[0]) for stride in strides)
        self.classifier = Classifier(head_width, num_classes, drop_rate)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Logits (B, num_classes, H / 4, W / 4) of maps, finest first."""
        finest, *coarser = self.neck(maps)
        summed = self.levels[0](finest)
        for i, x in enumerate(coarser, 1):
            # A side that strides do not divide is a little too long after doubling.
            summed = summed + resize(self.levels[i](x), summed)
        return self.classifier(summed)


def _level(width: int, head_width: int, factor: int) -> nn.Sequential:
    """Convolutions, each followed by a doubling, until a map of stride `factor` times the finest's has its size."""
    doublings = factor.bit_length() - 1
    layers: list[nn.Module] = []
    for before, after in pairwise([width] + [head_width] * max(1, doublings)):
        layers.append(ConvNorm(before, after, 3))
        if doublings:
            layers.append(Enlarge())
    return nn.Sequential(*layers)
