"""What a Conformer is built of: half steps of feed-forward, attention, and a convolution, each added to the tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...layers.padding import masked_norm
from ...ops import State
from .attention import MechanismAttention, RelativeAttention


@dataclass(frozen=True)
class BlockStream:
    """What a block remembers of a stream.

    Attributes:
        attention: The state of all tokens so far; None at the beginning, or without attention.
        tail: (B, K - 1, C), the last inputs of the convolution.
    """

    attention: State | None
    tail: Tensor


class FeedForward(nn.Sequential):
    """Norm, a wide layer, Swish, and back."""

    def __init__(self, dim: int, expansion: int, dropout: float) -> None:
        wide = (nn.Linear(dim, expansion * dim), nn.SiLU(), nn.Dropout(dropout))
        super().__init__(nn.LayerNorm(dim), *wide, nn.Linear(expansion * dim, dim), nn.Dropout(dropout))


class ConvolutionModule(nn.Module):
    """Norm, a gated layer, a depthwise convolution over time, norm, Swish, and a layer.

    Args:
        dim: Channels C.
        kernel_size: Tokens K that a convolution sees, odd.
        causal: Whether it sees those before and its own, and not as many on both sides.
        norm: "batch", as published, or "layer".
        dropout: Of the output.
    """

    def __init__(self, dim: int, kernel_size: int, causal: bool, norm: str, dropout: float) -> None:
        super().__init__()
        self.before = nn.LayerNorm(dim)
        self.expand = nn.Linear(dim, 2 * dim)
        self.depthwise = nn.Conv1d(dim, dim, kernel_size, groups=dim)
        self.norm = nn.BatchNorm2d(dim) if norm == "batch" else nn.LayerNorm(dim)
        self.contract = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)
        reach = kernel_size - 1
        self.margins = (reach, 0) if causal else (reach // 2, reach - reach // 2)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """What is added to tokens (B, N, C); beyond the end, where the mask is False, the convolution sees zeros."""
        x = F.glu(self.expand(self.before(x)), dim=-1)
        if mask is not None:
            x = x.masked_fill(~mask[..., None], 0)
        return self.dropout(self._after(self.depthwise(F.pad(x.mT, self.margins)), mask))

    def step(self, x: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
        """The same for the next tokens of a stream, and the tail after them."""
        x = torch.cat((tail, F.glu(self.expand(self.before(x)), dim=-1)), dim=1)
        return self._after(self.depthwise(x.mT), None), x[:, x.shape[1] - tail.shape[1] :]

    def _after(self, x: Tensor, mask: Tensor | None) -> Tensor:
        if isinstance(self.norm, nn.LayerNorm):
            x = self.norm(x.mT)
        else:
            x = masked_norm(self.norm, x[..., None], None if mask is None else mask[..., None])[..., 0].mT
        return self.contract(F.silu(x))


class Block(nn.Module):
    """Half a feed-forward, attention, convolution, half a feed-forward, and a norm.

    Args:
        dim: Channels C.
        attention: Made for this block, or None for no attention: the convolution alone looks around.
        kernel_size: Of the convolution.
        causal: Whether a token sees those before it and itself alone.
        conv_norm: "batch" or "layer".
        expansion: Width of the feed-forward over C.
        dropout: Of everything that is added.
    """

    def __init__(
        self,
        dim: int,
        attention: MechanismAttention | RelativeAttention | None,
        *,
        kernel_size: int,
        causal: bool,
        conv_norm: str,
        expansion: int,
        dropout: float,
    ) -> None:
        super().__init__()
        self.first = FeedForward(dim, expansion, dropout)
        self.norm = None if attention is None else nn.LayerNorm(dim)
        self.attention = attention
        self.convolution = ConvolutionModule(dim, kernel_size, causal, conv_norm, dropout)
        self.second = FeedForward(dim, expansion, dropout)
        self.last = nn.LayerNorm(dim)

    def forward(self, x: Tensor, mask: Tensor | None, tables: Any) -> Tensor:
        """Tokens (B, N, C)."""
        x = x + 0.5 * self.first(x)
        if self.attention is not None:
            assert self.norm is not None
            x = x + self.attention(self.norm(x), mask, tables)
        x = x + self.convolution(x, mask)
        return self.last(x + 0.5 * self.second(x))

    def step(self, x: Tensor, stream: BlockStream, tables: Any) -> tuple[Tensor, BlockStream]:
        """The next tokens of a stream, and what is remembered after them."""
        state = None
        x = x + 0.5 * self.first(x)
        if self.attention is not None:
            assert self.norm is not None
            assert isinstance(self.attention, MechanismAttention)
            out, state = self.attention.step(self.norm(x), stream.attention, tables)
            x = x + out
        out, tail = self.convolution.step(x, stream.tail)
        x = x + out
        return self.last(x + 0.5 * self.second(x)), BlockStream(state, tail)
