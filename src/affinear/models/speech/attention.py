"""The Conformer's attention: any mechanism with rotary positions, or softmax with relative ones as published."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ... import ops
from ...ops import State

Positions = Literal["rotary", "relative", "none"]
POSITIONS = ("rotary", "relative", "none")


class MechanismAttention(nn.Module):
    """Self-attention of a sequence by any mechanism, with rotary positions or none.

    Args:
        dim: Channels C.
        num_heads: Heads H, a divisor of C.
        mechanism: A registered name.
        causal: Whether a token sees those before it and itself alone.
        dropout: Of the output.
    """

    def __init__(self, dim: int, num_heads: int, mechanism: str, causal: bool, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.causal, self.mechanism = num_heads, causal, ops.find(mechanism)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)

    @property
    def streams(self) -> bool:
        """Whether there is a state of one size that carries over."""
        return self.causal and self.mechanism.gain is not None

    def forward(self, x: Tensor, mask: Tensor | None, tables: tuple[Tensor, Tensor] | None) -> Tensor:
        """Tokens (B, N, C) that have looked at each other; the mask (B, N) is False where there is none.

        Args:
            x: Tokens.
            mask: None where all are tokens.
            tables: Cosines and sines of their positions, (N, D) each.
        """
        query, key, value = self._heads(x)
        # What comes after the end is not seen by what comes before it: a causal sequence needs no mask.
        mask = None if self.causal else mask
        out = ops.attention(
            query, key, value, self.mechanism, causal=self.causal, key_mask=mask, rotary=tables, layout="bnhd"
        )
        return self.dropout(self.proj(out.flatten(2)))

    def step(self, x: Tensor, state: State | None, tables: tuple[Tensor, Tensor] | None) -> tuple[Tensor, State]:
        """The next tokens (B, N, C) of a stream, and the state after them."""
        query, key, value = self._heads(x)
        out, state = ops.attention(
            query,
            key,
            value,
            self.mechanism,
            causal=True,
            rotary=tables,
            initial_state=state,
            return_state=True,
            layout="bnhd",
        )
        return self.proj(out.flatten(2)), state

    def _heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        return query, key, value

    def extra_repr(self) -> str:
        """What `print` shows."""
        return f"{self.mechanism.name}, num_heads={self.num_heads}, causal={self.causal}"


class RelativeAttention(nn.Module):
    """Softmax attention whose scores know how far apart two tokens are, as in Transformer-XL and the Conformer.

        score_ij = ((q_i + u) . k_j + (q_i + v) . W r_(i-j)) / sqrt(D)

    r is a table of sinusoids, W, u and v are learnt. Every pair of tokens has a score of its own: time and memory grow
    with the square of the length.

    Args:
        dim: Channels C.
        num_heads: Heads H, a divisor of C.
        causal: Whether a token sees those before it and itself alone.
        dropout: Of the output.
    """

    streams = False

    def __init__(self, dim: int, num_heads: int, causal: bool, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.causal = num_heads, causal
        self.qkv = nn.Linear(dim, 3 * dim)
        self.place = nn.Linear(dim, dim, bias=False)
        self.content_bias = nn.Parameter(torch.zeros(num_heads, dim // num_heads))
        self.place_bias = nn.Parameter(torch.zeros(num_heads, dim // num_heads))
        self.proj = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None, tables: Tensor) -> Tensor:
        """Tokens (B, N, C) that have looked at each other.

        Args:
            x: Tokens.
            mask: (B, N), False where there is none; None where all are tokens.
            tables: (2N - 1, C), the sinusoids of distances from N - 1 down to 1 - N.
        """
        query, key, value = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        places = self.place(tables.to(x.dtype)).unflatten(-1, (self.num_heads, -1)).permute(1, 2, 0)
        bias = by_distance((query + self.place_bias[:, None].to(query.dtype)) @ places) * query.shape[-1] ** -0.5
        if self.causal:
            later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
            bias = bias.masked_fill(later, -torch.inf)
        elif mask is not None:
            bias = bias.masked_fill(~mask[:, None, None], -torch.inf)
        query = query + self.content_bias[:, None].to(query.dtype)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=bias.to(query.dtype))
        return self.dropout(self.proj(out.transpose(1, 2).flatten(2)))

    def extra_repr(self) -> str:
        """What `print` shows."""
        return f"softmax with relative positions, num_heads={self.num_heads}, causal={self.causal}"


def by_distance(scores: Tensor) -> Tensor:
    """Scores (..., N, 2N - 1) by distance, from N - 1 down to 1 - N, as scores (..., N, N) of query and key.

    Example:
        >>> by_distance(torch.tensor([[1, 0, -1], [1, 0, -1]])).tolist()      # query minus key
        [[0, -1], [1, 0]]
    """
    *lead, length, distances = scores.shape
    # Rows of 2N - 1 become rows of 2N, and read as rows of N again each begins one place earlier than the one above.
    shifted = F.pad(scores, (1, 0)).reshape(*lead, distances + 1, length)[..., 1:, :]
    return shifted.reshape(*lead, length, distances)[..., :length]


def distance_table(length: int, dim: int, device: torch.device | None = None) -> Tensor:
    """Sinusoids (2N - 1, C) of distances from N - 1 down to 1 - N."""
    distance = torch.arange(length - 1, -length, -1, device=device, dtype=torch.float64)
    frequency = 10000.0 ** -(torch.arange(0, dim, 2, device=device, dtype=torch.float64) / dim)
    angle = torch.outer(distance, frequency)
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1)[:, :dim].float()
