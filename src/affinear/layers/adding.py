"""A layer norm that makes the residual sum which it is of."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..ops import add_norm


class AddNorm(nn.LayerNorm):
    """Adds two tensors and normalises the sum over its channels, in one pass; see `ops.add_norm`.

    Args:
        dim: Channels C.
        eps: Added to the variance.
        device: Where the weights live.
        dtype: Their dtype.

    Example:
        >>> import torch
        >>> from affinear.layers import AddNorm
        >>> x, branch = torch.randn(2, 2, 5, 7, 8).unbind()
        >>> total, normed = AddNorm(8)(x, branch)
        >>> torch.equal(total, x + branch), normed.shape
        (True, torch.Size([2, 5, 7, 8]))
    """

    def __init__(
        self, dim: int, eps: float = 1e-5, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(dim, eps, device=device, dtype=dtype)

    def forward(self, input: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The sum of two tensors (..., C), and its norm."""
        return add_norm(input, other, self.weight, self.bias, self.eps)
