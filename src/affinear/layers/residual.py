"""InLine's local residual: a 3 x 3 convolution whose kernels the image itself chooses."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LocalResidual(nn.Module):
    """Convolves values with one 3 x 3 kernel per image and channel, made from the mean of the image's tokens.

    The nine taps are nine shifted products: unlike a grouped convolution with a group per image and channel, they leave
    the batch size out of the graph.

    Args:
        dim: Channels C.
        num_heads: Kernels are made from the mean head by head.
        device: Where the weights live.
        dtype: Their dtype.

    Example:
        >>> import torch
        >>> from affinear.layers import LocalResidual
        >>> tokens, values = torch.randn(2, 6, 8), torch.randn(2, 2, 3, 8)
        >>> LocalResidual(8, 2)(tokens.mean(1), values).shape
        torch.Size([2, 2, 3, 8])
    """

    def __init__(
        self, dim: int, num_heads: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.reduce = nn.Conv1d(dim, dim, 1, groups=num_heads, device=device, dtype=dtype)
        self.expand = nn.Conv1d(dim, 9 * dim, 1, groups=num_heads, device=device, dtype=dtype)

    def forward(self, mean: Tensor, value: Tensor) -> Tensor:
        """Values (B, H, W, C) convolved with the kernels that the mean (B, C) chooses."""
        height, width = value.shape[1:3]
        taps = self.expand(F.gelu(self.reduce(mean[..., None]))).unflatten(1, (-1, 9))[:, None, None, :, :, 0]
        padded = F.pad(value, (0, 0, 1, 1, 1, 1))
        shifted = [padded[:, i // 3 : i // 3 + height, i % 3 : i % 3 + width] for i in range(9)]
        out = shifted[0] * taps[..., 0]
        for i in range(1, 9):
            out = torch.addcmul(out, shifted[i], taps[..., i])
        return out
