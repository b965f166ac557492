"""UperNet: pyramid pooling over the coarsest map, a feature pyramid below it, all levels joined; and its helper.

Paper: Unified Perceptual Parsing for Scene Understanding, arXiv 1807.10221.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .parts import Classifier, ConvNorm, resize

POOLS = (1, 2, 3, 6)


class PyramidPooling(nn.Module):
    """The map beside its means over 1, 2 x 2, 3 x 3 and 6 x 6 parts, joined by a 3 x 3 convolution.

    Args:
        dim: Channels of the map.
        width: Channels of each mean and of what comes out.
    """

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.pools = nn.ModuleList(nn.Sequential(nn.AdaptiveAvgPool2d(n), ConvNorm(dim, width, 1)) for n in POOLS)
        self.join = ConvNorm(dim + len(POOLS) * width, width, 3)

    def forward(self, x: Tensor) -> Tensor:
        """A map of the same size."""
        return self.join(torch.cat([x, *(resize(pool(x), x) for pool in self.pools)], dim=1))


class UperNet(nn.Module):
    """One number per class at every place of the finest map.

    In training a batch needs two images or more: the mean over a whole map is one place per image, and a batch norm
    cannot learn from one.

    Args:
        channels: Of the backbone's maps, finest first.
        num_classes: Classes.
        width: Channels of everything inside.
        drop_rate: Dropout before the classifier.

    Example:
        >>> import torch
        >>> from affinear.models.heads import UperNet
        >>> maps = [torch.randn(1, 8, 16 // 2**i, 16 // 2**i) for i in range(4)]
        >>> UperNet([8, 8, 8, 8], 5, width=16).eval()(maps).shape
        torch.Size([1, 5, 16, 16])
    """

    def __init__(self, channels: Sequence[int], num_classes: int, width: int = 512, drop_rate: float = 0.1) -> None:
        super().__init__()
        self.pooling = PyramidPooling(channels[-1], width)
        self.lateral = nn.ModuleList(ConvNorm(dim, width, 1) for dim in channels[:-1])
        self.output = nn.ModuleList(ConvNorm(width, width, 3) for _ in channels[:-1])
        self.join = ConvNorm(len(channels) * width, width, 3)
        self.classifier = Classifier(width, num_classes, drop_rate)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Logits (B, num_classes, H / 4, W / 4) of maps, finest first."""
        above = self.pooling(maps[-1])
        levels = [above]
        for i in reversed(range(len(self.lateral))):
            x = self.lateral[i](maps[i])
            above = x + resize(above, x)
            levels.insert(0, self.output[i](above))
        return self.classifier(self.join(torch.cat([resize(level, levels[0]) for level in levels], dim=1)))


class FCN(nn.Module):
    """The helper that learns beside UperNet, from the map of stride 16, and is left out afterwards.

    Args:
        dim: Channels of that map.
        num_classes: Classes.
        width: Channels inside.
        drop_rate: Dropout before the classifier.
    """

    def __init__(self, dim: int, num_classes: int, width: int = 256, drop_rate: float = 0.1) -> None:
        super().__init__()
        self.conv = ConvNorm(dim, width, 3)
        self.classifier = Classifier(width, num_classes, drop_rate)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, num_classes, H, W) of a map of that size."""
        return self.classifier(self.conv(x))
