"""Maps cut into windows, with or without a shift, and put together again."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Windows:
    """How maps (B, H, W, C) are cut into windows: padded to whole windows, then rolled by the shift.

    Attributes:
        size: Rows and columns of the map.
        window: Rows and columns of a window.
        shift: Rows and columns by which windows are displaced.

    Example:
        >>> import torch
        >>> from affinear.layers import Windows
        >>> cut = Windows((6, 7), (2, 4), shift=(1, 2))
        >>> x = torch.randn(3, 6, 7, 5)
        >>> tokens = cut.split(x)
        >>> tokens.shape
        torch.Size([18, 8, 5])
        >>> torch.equal(cut.join(tokens), x)
        True
    """

    size: tuple[int, int]
    window: tuple[int, int]
    shift: tuple[int, int] = (0, 0)

    @property
    def padding(self) -> tuple[int, int]:
        """Rows below and columns to the right that make whole windows."""
        return -self.size[0] % self.window[0], -self.size[1] % self.window[1]

    @property
    def number(self) -> tuple[int, int]:
        """Windows in a column and in a row."""
        return (
            (self.size[0] + self.padding[0]) // self.window[0],
            (self.size[1] + self.padding[1]) // self.window[1],
        )

    def split(self, x: Tensor) -> Tensor:
        """Tokens (B * windows, h * w, C) of maps (B, H, W, C)."""
        below, right = self.padding
        if below or right:
            x = F.pad(x, (0, 0, 0, right, 0, below))
        if any(self.shift):
            x = x.roll((-self.shift[0], -self.shift[1]), (1, 2))
        (rows, columns), (height, width) = self.number, self.window
        x = x.reshape(-1, rows, height, columns, width, x.shape[-1]).transpose(2, 3)
        return x.reshape(-1, height * width, x.shape[-1])

    def join(self, tokens: Tensor) -> Tensor:
        """Maps (B, H, W, C) of tokens (B * windows, h * w, C)."""
        (rows, columns), (height, width) = self.number, self.window
        x = tokens.reshape(-1, rows, columns, height, width, tokens.shape[-1]).transpose(2, 3)
        x = x.reshape(-1, rows * height, columns * width, tokens.shape[-1])
        if any(self.shift):
            x = x.roll(self.shift, (1, 2))
        return x[:, : self.size[0], : self.size[1]]

    def real_of(self, x: Tensor, mask: Tensor | None = None) -> Tensor | None:
        """Which tokens of each window are not padding, (B * windows, h * w); None if all are.

        Args:
            x: Maps (B, H, W, ...).
            mask: (B, H, W), False where they are padding already.
        """
        if mask is not None:
            return self.split(mask[..., None])[..., 0]
        real = self.real(x.device)
        return None if real is None else real.repeat(x.shape[0], 1)

    def real(self, device: torch.device) -> Tensor | None:
        """Which tokens of each window are not padding, (windows, h * w); None if all are."""
        if not any(self.padding):
            return None
        return self.split(torch.ones(1, *self.size, 1, device=device))[..., 0] > 0

    def visible(self, device: torch.device, mask: Tensor | None = None) -> Tensor | None:
        """Which tokens see which, (windows, h * w, h * w); None if all see all.

        Tokens that were neighbours before the roll see each other; padding sees padding alone.

        Args:
            device: Where the answer lives.
            mask: (B, H, W), False where maps are padding already; the answer then is (B * windows, h * w, h * w).
        """
        if mask is None and not any(self.padding) and not any(self.shift):
            return None
        regions = self._regions(device)
        region = self.split(regions if mask is None else regions * mask[..., None])[..., 0]
        return region[:, :, None] == region[:, None, :]

    def _regions(self, device: torch.device) -> Tensor:
        """What a window may see as one piece of the map has one number, (1, H, W, 1); padding has zero."""
        row, column = (
            (torch.arange(size, device=device) >= shift).float()
            for size, shift in zip(self.size, self.shift, strict=True)
        )
        return (1 + 2 * row[:, None] + column)[None, :, :, None]
