"""What is computed: a shape, a mechanism, a dtype; and the bytes that no implementation can avoid moving."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from affinear.ops import rotary_1d
from affinear.ops.rotary import Rotary

FORWARD, TRAINING = "forward", "forward + backward"
DIRECTIONS = (FORWARD, TRAINING)


@dataclass(frozen=True)
class Shape:
    """Batch, heads, tokens and head width, written B,H,N,D.

    Examples:
        >>> str(Shape.parse("2,16,1024,64"))
        '2,16,1024,64'
        >>> Shape(2, 16, 1024, 64).elements
        2097152
    """

    batch: int
    heads: int
    tokens: int
    width: int

    @staticmethod
    def parse(text: str) -> Shape:
        """Read B,H,N,D; anything else is a ValueError that says so."""
        parts = text.split(",")
        if len(parts) != 4 or not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
            raise ValueError(f"shape: expected four positive numbers B,H,N,D, got {text!r}; write it as 2,16,1024,64")
        return Shape(*map(int, parts))

    @property
    def elements(self) -> int:
        """Numbers in one of query, key, value or answer."""
        return self.batch * self.heads * self.tokens * self.width

    def __str__(self) -> str:
        return f"{self.batch},{self.heads},{self.tokens},{self.width}"


@dataclass(frozen=True)
class Case:
    """One attention to be computed.

    Attributes:
        shape: Of query, key and value.
        dtype: Of query, key and value.
        mechanism: Name of a registered mechanism.
        causal: Whether query i sees keys 0 to i only.
        rotary: Whether tokens have rotary positions.
    """

    shape: Shape
    dtype: torch.dtype
    mechanism: str = "mala"
    causal: bool = False
    rotary: bool = False

    def traffic(self, direction: str) -> int:
        """Bytes that have to move, each tensor once: q, k, v, o forward; q, k, v, do, dq, dk, dv more backward.

        Examples:
            >>> case = Case(Shape(1, 1, 100, 10), torch.bfloat16)
            >>> case.traffic(FORWARD), case.traffic(TRAINING)
            (8000, 22000)
        """
        tensors = 4 if direction == FORWARD else 11
        return tensors * self.tensor_bytes

    def held(self, direction: str) -> int:
        """Bytes of inputs and results: q, k, v, o forward; do, dq, dk, dv more backward."""
        tensors = 4 if direction == FORWARD else 8
        return tensors * self.tensor_bytes

    @property
    def tensor_bytes(self) -> int:
        """Bytes of one of query, key, value or answer."""
        return self.shape.elements * self.dtype.itemsize

    def tables(self, device: torch.device) -> Rotary | None:
        """Cosines and sines for the tokens, or None without positions."""
        return rotary_1d(self.shape.tokens, self.shape.width, device=device) if self.rotary else None


@dataclass(frozen=True)
class Inputs:
    """Query, key, value and the gradient of the answer, each (B, N, H, D)."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad: Tensor

    @property
    def tokens(self) -> tuple[Tensor, Tensor, Tensor]:
        """The three that are differentiated."""
        return self.query, self.key, self.value


def draw(case: Case, device: torch.device, seed: int) -> Inputs:
    """Standard normal inputs, the same for the same seed.

    Examples:
        >>> draw(Case(Shape(1, 2, 5, 4), torch.float32), torch.device("cpu"), 0).query.shape
        torch.Size([1, 5, 2, 4])
    """
    shape = case.shape
    size = (shape.batch, shape.tokens, shape.heads, shape.width)
    generator = torch.Generator(device).manual_seed(seed)
    return Inputs(*(torch.randn(size, generator=generator, device=device, dtype=case.dtype) for _ in range(4)))
