"""What pictures are compared by: features of Inception, which makes the distance FID, or of a small random network."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import inception

NAMES = ("inception", "random")
WIDTHS, SEED = (32, 64, 64), 20


class RandomFeatures(nn.Module):
    """Three convolutions whose weights are drawn once and for all: no file needed, and the same on every machine.

    Distances over it compare networks that were trained on the same data. They are no FID.

    Args:
        channels: Of the images or latents.

    Example:
        >>> import torch
        >>> RandomFeatures(3)(torch.zeros(2, 3, 8, 8, dtype=torch.uint8)).shape
        torch.Size([2, 64])
    """

    width = WIDTHS[-1]

    def __init__(self, channels: int) -> None:
        super().__init__()
        generator = torch.Generator("cpu").manual_seed(SEED)
        sizes = zip((channels, *WIDTHS), WIDTHS, strict=False)
        for number, (inner, outer) in enumerate(sizes):
            drawn = torch.randn(outer, inner, 3, 3, generator=generator, device="cpu") * (2 / (9 * inner)) ** 0.5
            self.register_buffer(f"weight{number}", drawn)

    def forward(self, pictures: Tensor) -> Tensor:
        """Features (B, 64), float32, of pictures (B, C, H, W), uint8, or of latents, float32."""
        x = pictures.float() / 127.5 - 1 if pictures.dtype == torch.uint8 else pictures.float()
        for number in range(len(WIDTHS)):
            x = F.relu(F.conv2d(x, self.get_buffer(f"weight{number}"), stride=1 + (number > 0), padding=1))
        return x.mean(dim=(2, 3))


def features_of(name: str, channels: int, device: torch.device) -> nn.Module:
    """The network of features of a setting's name, on a device, in evaluation mode.

    Raises:
        ValueError: If it is Inception, and there are no weights of it.
    """
    found = inception.load() if name == "inception" else RandomFeatures(channels)
    return found.to(device).eval()
