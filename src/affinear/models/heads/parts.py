"""What the heads are made of: a convolution with its norm, and maps brought to one size."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ConvNorm(nn.Sequential):
    """A convolution without bias, a batch norm and a ReLU, on maps (B, C, H, W); odd kernels keep the size."""

    def __init__(self, dim: int, dim_out: int, kernel: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(dim, dim_out, kernel, padding=kernel // 2, bias=False)
        self.norm = nn.BatchNorm2d(dim_out)
        self.act = nn.ReLU(inplace=True)
        nn.init.kaiming_normal_(self.conv.weight, mode="fan_out", nonlinearity="relu")


class Classifier(nn.Sequential):
    """Dropout of whole channels, and a 1 x 1 convolution to one number per class."""

    def __init__(self, dim: int, num_classes: int, drop_rate: float) -> None:
        super().__init__()
        self.drop = nn.Dropout2d(drop_rate)
        self.conv = nn.Conv2d(dim, num_classes, 1)
        nn.init.normal_(self.conv.weight, std=0.01)
        nn.init.zeros_(self.conv.bias)  # pyright: ignore[reportArgumentType]


def resize(x: Tensor, like: Tensor) -> Tensor:
    """A map (B, C, H, W) brought to the size of another, bilinearly."""
    return enlarge(x, (like.shape[2], like.shape[3]))


def enlarge(x: Tensor, size: tuple[int, int]) -> Tensor:
    """A map (B, C, H, W) brought to this size, bilinearly, the corners of corner pixels on each other.

    On a GPU torch's gradient of it adds up in no fixed order, and slowly; factors of two become matrix products.
    """
    if tuple(x.shape[2:]) == size:
        return x
    if x.is_cuda and all(_doubles(before, after) for before, after in zip(x.shape[2:], size, strict=True)):
        return by_products(x, size)
    return F.interpolate(x, size=size, mode="bilinear", align_corners=False)


def by_products(x: Tensor, size: tuple[int, int]) -> Tensor:
    """The same by a product along each side, channels last in memory; shares of an eighth are exact in every dtype."""
    rows, columns = (_shares(x, before, after) for before, after in zip(x.shape[2:], size, strict=True))
    with torch.autocast(x.device.type, enabled=False):
        tall = torch.matmul(rows, x.permute(0, 2, 3, 1).flatten(2)).unflatten(2, (x.shape[3], x.shape[1]))
        return torch.matmul(columns, tall).permute(0, 3, 1, 2)


def _doubles(before: int, after: int) -> bool:
    factor, rest = divmod(after, before)
    return rest == 0 and factor.bit_count() == 1


def _shares(x: Tensor, before: int, after: int) -> Tensor:
    """What each pixel after (after, before) has of each one before."""
    place = ((torch.arange(after, device=x.device) + 0.5) * (before / after) - 0.5).clamp(0, before - 1)
    apart = (place[:, None] - torch.arange(before, device=x.device)).abs()
    return (1 - apart).clamp(min=0).to(x.dtype)
