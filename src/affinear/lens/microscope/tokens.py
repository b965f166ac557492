"""What the microscope looks at: the queries and keys of one attention layer, whatever they come from."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

MOST_ROWS = 56  # of a grid that is drawn


@dataclass(frozen=True)
class Layer:
    """Queries and keys of one attention layer for one image.

    Attributes:
        name: The layer's name in its network.
        query: (W, N, H, D), float64; W is the number of windows, one where tokens see all others.
        key: The same shape.
        grid: Rows and columns of the tokens after the class tokens.
        prefix_tokens: Number of class tokens in front.
        rotary: Cosines and sines, each (N, D), where positions turn.
        key_mask: (W, N), False where a window holds no token; None where all do.
        mechanism: The one that the layer itself uses; "" where there is none.
    """

    name: str
    query: Tensor
    key: Tensor
    grid: tuple[int, int]
    prefix_tokens: int = 0
    rotary: tuple[Tensor, Tensor] | None = None
    key_mask: Tensor | None = None
    mechanism: str = ""

    @property
    def windows(self) -> int:
        """How many windows there are."""
        return self.query.shape[0]

    @property
    def heads(self) -> int:
        """How many heads there are."""
        return self.query.shape[2]

    @property
    def drawable(self) -> bool:
        """Whether the grid is small enough to be drawn."""
        return max(self.grid) <= MOST_ROWS
