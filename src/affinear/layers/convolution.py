"""Depthwise convolution of maps that keep their channels last."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..ops import depthwise
from .padding import blank


class DepthwiseConv(nn.Conv2d):
    """One odd square kernel per channel, zeros beyond the border, on maps (B, H, W, C).

    Example:
        >>> import torch
        >>> from affinear.layers import DepthwiseConv
        >>> DepthwiseConv(8, 3)(torch.randn(2, 5, 7, 8)).shape
        torch.Size([2, 5, 7, 8])
    """

    one_pass = True  # False where the convolution itself is another, which torch's own does not know either

    def __init__(
        self, dim: int, kernel_size: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(dim, dim, kernel_size, padding=kernel_size // 2, groups=dim, device=device, dtype=dtype)

    def forward(
        self,
        input: Tensor,
        mask: Tensor | None = None,
        *,
        itself: bool = False,
        added: Tensor | None = None,
        gate: Tensor | None = None,
    ) -> Tensor:
        """The map, convolved; where a mask (B, H, W) is False it counts as zeros.

        With `itself` it is added to its convolution, and so is `added`; a gate multiplies the sum. See `ops.depthwise`.
        """
        seen = blank(input, mask)
        if self.one_pass and mask is None:
            return depthwise(seen, self.weight, self.bias, itself=itself, added=added, gate=gate)
        out = super().forward(seen.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        for other in (input if itself else None, added):
            out = out if other is None else other + out
        return out if gate is None else out * gate
