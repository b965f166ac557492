"""Numbers that describe rows of attention weights, and how a row answers when its query gets louder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

import affinear


@dataclass(frozen=True)
class RowNumbers:
    """What one row of weights looks like; every field has the shape of the weights without their last axis.

    Attributes:
        entropy: In nats, of |w| / Σ|w|; see `entropy`.
        largest_weight: The largest weight of the row.
        negative_mass: The sum of |w| over the negative weights.
        row_sum: The sum of the weights.
    """

    entropy: Tensor
    largest_weight: Tensor
    negative_mass: Tensor
    row_sum: Tensor


@dataclass(frozen=True)
class Loudness:
    """How the rows of one mechanism change as their queries are multiplied by a factor.

    Attributes:
        mechanism: The mechanism's name.
        factors: What the queries were multiplied by, one number for each of the F steps.
        weights: (F, B, H, Nq, Nk), the rows at each step.
        numbers: What the rows look like, each field (F, B, H, Nq).
    """

    mechanism: str
    factors: tuple[float, ...]
    weights: Tensor
    numbers: RowNumbers

    @property
    def labels(self) -> tuple[str, ...]:
        """The factors as people write them: "× 1/4", "× 16"."""
        fractions = (Fraction(factor) for factor in self.factors)
        return tuple(f"× {part if part.denominator <= 64 else format(float(part), 'g')}" for part in fractions)


def entropy(weights: Tensor) -> Tensor:
    """Return the entropy of each row, in nats: 0 for a single key, log N for N equal ones.

    Entropy belongs to probabilities, and rows of InLine or MALA can hold negative weights. It is therefore taken of
    |w| / Σ|w|, which is the row itself where nothing is negative. A row that is zero throughout has entropy 0.

    Args:
        weights: (..., N), any floating dtype; half precision is widened to float32.

    Returns:
        (...,), float32 or float64.

    Examples:
        >>> entropy(torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.0, 1.0, 0.0, 0.0]]))
        tensor([1.3863, 0.0000])
    """
    sizes = _widened(weights).abs()
    total = sizes.sum(-1, keepdim=True)
    return torch.special.entr(sizes / total.where(total > 0, 1.0)).sum(-1)


def largest_weight(weights: Tensor) -> Tensor:
    """Return the largest weight of each row.

    Args:
        weights: (..., N) with N >= 1, any floating dtype; half precision is widened to float32.

    Returns:
        (...,), float32 or float64.

    Examples:
        >>> largest_weight(torch.tensor([0.9, -0.4, 0.5]))
        tensor(0.9000)
    """
    return _widened(weights).amax(-1)


def negative_mass(weights: Tensor) -> Tensor:
    """Return the sum of |w| over the negative weights of each row; Σ|w| is the row sum plus twice this.

    Args:
        weights: (..., N), any floating dtype; half precision is widened to float32.

    Returns:
        (...,), float32 or float64, never negative.

    Examples:
        >>> negative_mass(torch.tensor([0.9, -0.4, 0.5]))
        tensor(0.4000)
    """
    return _widened(weights).neg().clamp(min=0).sum(-1)


def row_sum(weights: Tensor) -> Tensor:
    """Return the sum of each row: 1 for every mechanism but the `_released` ones with rotary positions.

    Args:
        weights: (..., N), any floating dtype; half precision is widened to float32.

    Returns:
        (...,), float32 or float64.

    Examples:
        >>> row_sum(torch.tensor([0.9, -0.4, 0.5]))
        tensor(1.)
    """
    return _widened(weights).sum(-1)


def measure(weights: Tensor) -> RowNumbers:
    """Return all numbers of each row at once.

    Args:
        weights: (..., N) with N >= 1, any floating dtype.

    Returns:
        The numbers, each (...,).

    Examples:
        >>> measure(torch.tensor([0.5, 0.5])).entropy
        tensor(0.6931)
    """
    return RowNumbers(entropy(weights), largest_weight(weights), negative_mass(weights), row_sum(weights))


def loudness(query: Tensor, key: Tensor, factors: Sequence[float], mechanism: str = "mala") -> Loudness:
    """Multiply the queries by each factor in turn and collect their rows: who hears that a query got louder?

    Softmax sharpens without limit, plain linear attention divides the magnitude away, InLine and MALA answer. This
    is the experiment behind MALA's diagnosis and, with the entropy as the number, NaLaFormer's Figure 1.

    Args:
        query: (B, Nq, H, D).
        key: (B, Nk, H, D), same dtype and device.
        factors: F numbers to multiply the queries by, at least one.
        mechanism: A name out of `affinear.mechanisms()`.

    Returns:
        The rows, (F, B, H, Nq, Nk), and their numbers, (F, B, H, Nq).

    Raises:
        ValueError: If there is no factor, or `affinear.weights` refuses the query, the key or the mechanism.

    Examples:
        >>> key = torch.tensor([[2.0, 0.0], [0.0, 1.0]]).reshape(1, 2, 1, 2)
        >>> query = torch.tensor([1.0, 0.0]).reshape(1, 1, 1, 2)
        >>> loudness(query, key, (1.0, 4.0), "inline").numbers.largest_weight.flatten()
        tensor([0.8536, 1.9142])
    """
    if len(factors) == 0:
        raise ValueError(
            "factors: expected at least one number to multiply the queries by, got none; try (0.25, 1, 4)."
        )
    weights = torch.stack([affinear.weights(query * factor, key, mechanism) for factor in factors])
    return Loudness(mechanism, tuple(float(factor) for factor in factors), weights, measure(weights))


def _widened(weights: Tensor) -> Tensor:
    return weights.to(torch.promote_types(weights.dtype, torch.float32))
