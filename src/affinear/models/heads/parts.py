"""What the heads are made of: a convolution with its norm, and maps brought to one size."""

from __future__ import annotations

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
    """A map (B, C, H, W) brought to this size, bilinearly, the corners of corner pixels on each other."""
    return x if tuple(x.shape[2:]) == size else F.interpolate(x, size=size, mode="bilinear", align_corners=False)
