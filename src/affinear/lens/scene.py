"""What is looked at: queries and keys as an attention layer has them, and rows of their weights, a few at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import affinear
from affinear.ops import Mechanism

MOST_WEIGHTS = 2**22  # at a time: 32 MB in float64


@dataclass(frozen=True)
class Scene:
    """Queries and keys, the mechanism between them, and where they lie.

    Attributes:
        query: (B, N, H, D).
        key: (B, M, G, D), same dtype and device; G divides H.
        mechanism: A registered name, or a `Mechanism`.
        scale: Factor of the scores; None is the mechanism's own.
        rotary: Cosines and sines, each (N, D), where positions turn.
        grid: Rows and columns of the tokens after the class tokens; None where they lie on no grid.
        prefix_tokens: Number of class tokens in front.
        rows: (R,), numbers of the queries to look at; None is all.

    Example:
        >>> import torch
        >>> from affinear.lens import Scene
        >>> scene = Scene(torch.randn(2, 30, 4, 8), torch.randn(2, 30, 4, 8), "mala", grid=(5, 6))
        >>> scene.weights().shape
        torch.Size([2, 4, 30, 30])
        >>> scene.only([0, 7]).weights().shape
        torch.Size([2, 4, 2, 30])
    """

    query: Tensor
    key: Tensor
    mechanism: str | Mechanism = "mala"
    scale: float | None = None
    rotary: tuple[Tensor, Tensor] | None = None
    grid: tuple[int, int] | None = None
    prefix_tokens: int = 0
    rows: Tensor | None = None

    def only(self, rows: Tensor | list[int] | range) -> Scene:
        """The same scene, of which these rows are looked at."""
        return replace(self, rows=torch.as_tensor(rows, device=self.query.device))

    def under(self, mechanism: str | Mechanism) -> Scene:
        """The same tokens under another mechanism."""
        return replace(self, mechanism=mechanism)

    @property
    def numbers(self) -> Tensor:
        """Numbers of the queries that are looked at, (R,)."""
        return torch.arange(self.query.shape[1], device=self.query.device) if self.rows is None else self.rows

    def weights(self) -> Tensor:
        """Weights (B, H, R, M) of all rows that are looked at, at once."""
        return self._weights(self.numbers)

    def pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Numbers (r,) of some rows and their weights (B, H, r, M), until all were there."""
        batch, _, heads, _ = self.query.shape
        size = max(1, MOST_WEIGHTS // (batch * heads * self.key.shape[1]))
        for numbers in self.numbers.split(size):
            yield numbers, self._weights(numbers)

    def _weights(self, rows: Tensor) -> Tensor:
        return affinear.weights(self.query, self.key, self.mechanism, scale=self.scale, rotary=self.rotary, rows=rows)
