"""A backbone of timm and a feature pyramid on it: one map per level, all of one width."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from timm.layers import LayerNorm2d
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.ops import FeaturePyramidNetwork

from ...layers import mask_of
from ..features import STRIDES, Features
from .settings import DetectorSettings, Norm

Maps = OrderedDict[str, Tensor]
MAKERS: Mapping[Norm, Callable[[int], nn.Module] | None] = {
    "layer": partial(LayerNorm2d, eps=1e-6),
    "group": partial(nn.GroupNorm, 32),
    "batch": nn.BatchNorm2d,
    "none": None,
}


class Neck(FeaturePyramidNetwork):
    """torchvision's feature pyramid, which leaves padding blank, with two coarser levels on top.

    Args:
        in_channels: Of the backbone's maps.
        channels: Of all levels.
        norm: After every convolution.
        coarser: Two more levels by convolutions from the backbone's last map, as RetinaNet has them; else one more, by
            leaving out every second place.
        relu: Whether the last level comes from the positive part of the one before.
    """

    def __init__(self, in_channels: Sequence[int], channels: int, norm: Norm, coarser: bool, relu: bool = True) -> None:
        super().__init__(list(in_channels), channels, norm_layer=MAKERS[norm])
        self.p6 = self.p7 = None
        self.relu = relu
        if coarser:
            self.p6 = nn.Conv2d(in_channels[-1], channels, 3, 2, 1)
            self.p7 = nn.Conv2d(channels, channels, 3, 2, 1)
            for layer in (self.p6, self.p7):
                nn.init.kaiming_uniform_(layer.weight, a=1)
                nn.init.zeros_(layer.bias)  # pyright: ignore[reportArgumentType]

    def forward(self, x: Sequence[Tensor], masks: Sequence[Tensor | None]) -> list[Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The levels, the finest first.

        Args:
            x: The backbone's maps, (B, C, H, W).
            masks: Of each level that comes out, (B, H, W), False where there is no image; or None.
        """
        out: list[Tensor] = []
        above: Tensor | None = None
        for i in reversed(range(len(x))):
            level = self.inner_blocks[i](x[i])
            if above is not None:
                level = level + F.interpolate(above, size=level.shape[-2:], mode="nearest")
            above = keep(level, masks[i])
            out.insert(0, keep(self.layer_blocks[i](above), masks[i]))
        if self.p6 is None or self.p7 is None:
            return [*out, out[-1][:, :, ::2, ::2]]
        six = keep(self.p6(x[-1]), masks[-2])
        return [*out, six, keep(self.p7(F.relu(six) if self.relu else six), masks[-1])]


class Backbone(nn.Module):
    """A network of timm without its head, and a pyramid on its maps.

    Args:
        name: Any name that timm takes with `features_only` and gives maps at strides 4, 8, 16 and 32.
        settings: Of the detector.
        model_args: What else the network is made with.

    Example:
        >>> import torch
        >>> from affinear.models.detectors import DetectorSettings
        >>> backbone = Backbone("mavit_tiny", DetectorSettings("mask_rcnn", channels=32))
        >>> {name: tuple(level.shape) for name, level in backbone(torch.rand(1, 3, 64, 96)).items()}
        {'0': (1, 32, 16, 24), '1': (1, 32, 8, 12), '2': (1, 32, 4, 6), '3': (1, 32, 2, 3), 'pool': (1, 32, 1, 2)}
    """

    def __init__(self, name: str, settings: DetectorSettings, model_args: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        retina = settings.kind == "retinanet"
        used = STRIDES[1:] if retina else STRIDES  # RetinaNet begins at stride 8
        self.features = Features(name, used, masked=settings.masked, model_args=dict(model_args or {}))
        if settings.grad_checkpointing:
            self.features.set_grad_checkpointing()
        self.neck = Neck(self.features.channels, settings.channels, settings.norm, retina, settings.relu_between)
        self.keys = ("0", "1", "2", "p6", "p7") if retina else ("0", "1", "2", "3", "pool")
        self.strides = tuple(used[0] * 2**i for i in range(5))
        self.out_channels = settings.channels
        self.frozen_norm = settings.frozen_norm

    def forward(self, images: Tensor, sizes: Sequence[tuple[int, int]] | None = None) -> Maps:
        """The levels by name, the finest first.

        Args:
            images: (B, 3, H, W), sides multiples of 32.
            sizes: Height and width of each image within; None if all fill the batch.
        """
        levels = self.neck(self.features(images, sizes), self.masks(images, sizes))
        return OrderedDict(zip(self.keys, levels, strict=True))

    def masks(self, images: Tensor, sizes: Sequence[tuple[int, int]] | None) -> list[Tensor | None]:
        """Where each level is image, (B, H, W): a place is if its first pixel is. None where padding is let in."""
        height, width = images.shape[-2:]
        masked = self.features.masks and self.features.masked
        if not masked or sizes is None or all(size == (height, width) for size in sizes):
            return [None] * len(self.strides)
        mask = mask_of(sizes, (height, width), images.device)
        return [mask[:, ::stride, ::stride] for stride in self.strides]

    def train(self, mode: bool = True) -> Backbone:
        """As in torch, but for batch norms that are frozen."""
        super().train(mode)
        if self.frozen_norm:
            for module in self.features.modules():
                if isinstance(module, nn.BatchNorm2d | nn.SyncBatchNorm):
                    module.eval()
        return self


def keep(level: Tensor, mask: Tensor | None) -> Tensor:
    """A map (B, C, H, W) with zeros where there is no image; the map itself without a mask."""
    return level if mask is None else level.masked_fill(~mask[:, None], 0)
