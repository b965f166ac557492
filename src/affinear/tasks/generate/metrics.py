"""How far made images are from real ones, over features of both: Fréchet distance, kernel distance, precision, recall.

Fréchet distance: arXiv 1706.08500; kernel distance: arXiv 1801.01401; precision and recall: arXiv 1904.06991.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

AT_ONCE = 2048  # rows of a table of distances
DEGREE = 3  # of the kernel


@dataclass(frozen=True, eq=False)
class Moments:
    """Mean and covariance of features, in float64.

    Attributes:
        mean: (D,).
        covariance: (D, D).
    """

    mean: Tensor
    covariance: Tensor


def moments(features: Tensor) -> Moments:
    """Mean and covariance of features (N, D), N of 2 or more.

    Raises:
        ValueError: If there are fewer than two.
    """
    if len(features) < 2:
        raise ValueError(f"features: expected two or more, since one has no covariance, got {len(features)}")
    exact = features.double()
    mean = exact.mean(dim=0)
    centred = exact - mean
    return Moments(mean, centred.T @ centred / (len(features) - 1))


def frechet(one: Moments, other: Moments) -> float:
    """The Fréchet distance of two normal distributions with these moments, squared, as FID is: never below 0.

    The trace of the root of a product is the sum of the singular values of the product of the roots, which symmetric
    matrices have exactly; a root of the product itself would lose half of all digits where a covariance is singular.

    Example:
        >>> import torch
        >>> from affinear.tasks.generate.metrics import Moments, frechet
        >>> eye = torch.eye(2, dtype=torch.float64)
        >>> frechet(Moments(torch.zeros(2).double(), eye), Moments(torch.ones(2).double(), 4 * eye))
        4.0
    """
    shared = torch.linalg.svdvals(_root(one.covariance) @ _root(other.covariance)).sum()
    apart = (one.mean - other.mean).square().sum()
    total = apart + one.covariance.trace() + other.covariance.trace() - 2 * shared
    return max(float(total), 0.0)


def _root(matrix: Tensor) -> Tensor:
    """The symmetric square root of a covariance."""
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp(min=0).sqrt()) @ vectors.T


def kernel_distance(one: Tensor, other: Tensor) -> float:
    """The squared distance of two sets of features (N, D), (M, D) under a cubic kernel, without bias: KID."""
    count, others, width = len(one), len(other), one.shape[1]

    def total(a: Tensor, b: Tensor) -> Tensor:
        parts = [((part.double() @ b.double().T) / width + 1).pow(DEGREE).sum() for part in a.split(AT_ONCE)]
        return torch.stack(parts).sum()

    def own(a: Tensor) -> Tensor:
        return (a.double().square().sum(dim=1) / width + 1).pow(DEGREE).sum()

    within = (total(one, one) - own(one)) / (count * (count - 1))
    within += (total(other, other) - own(other)) / (others * (others - 1))
    return float(within - 2 * total(one, other) / (count * others))


def precision_recall(real: Tensor, made: Tensor, neighbours: int = 3) -> tuple[float, float]:
    """Which share of made images lies among real ones, and which share of real ones among those made.

    An image lies among others if it is no farther from one of them than that one's so-many-th neighbour among its own.

    Args:
        real: Features (N, D).
        made: Features (M, D).
        neighbours: Which neighbour sets the radius; no more than there are.
    """
    reach = [_reach(features, min(neighbours, len(features) - 1)) for features in (real, made)]
    return _within(made, real, reach[0]), _within(real, made, reach[1])


def _reach(features: Tensor, neighbours: int) -> Tensor:
    """How far from each its neighbour of this rank is, itself not counted."""
    parts = [
        torch.cdist(part.double(), features.double()).kthvalue(neighbours + 1, dim=1).values
        for part in features.split(AT_ONCE)
    ]
    return torch.cat(parts)


def _within(asked: Tensor, among: Tensor, reach: Tensor) -> float:
    inside = [(torch.cdist(part.double(), among.double()) <= reach).any(dim=1) for part in asked.split(AT_ONCE)]
    return float(torch.cat(inside).double().mean())
