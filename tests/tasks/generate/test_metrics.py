"""Distances between real and made images, against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from affinear.tasks.generate.metrics import Moments, frechet, kernel_distance, moments, precision_recall


def features(count: int, width: int = 6, shift: float = 0.0) -> Tensor:
    return torch.randn(count, width) @ torch.randn(width, width) + shift


def root_by_newton(matrix: Tensor) -> Tensor:
    """Denman and Beavers' iteration: a root of any matrix without negative eigenvalues."""
    root, inverse = matrix, torch.eye(len(matrix), dtype=matrix.dtype)
    for _ in range(60):
        root, inverse = (root + torch.linalg.inv(inverse)) / 2, (inverse + torch.linalg.inv(root)) / 2
    return root


def test_the_frechet_distance_is_its_definition():
    one, other = moments(features(200)), moments(features(300, shift=0.5))
    root = root_by_newton(one.covariance @ other.covariance)
    expected = (one.mean - other.mean).square().sum() + (one.covariance + other.covariance - 2 * root).trace()
    assert frechet(one, other) == pytest.approx(float(expected), rel=1e-8)
    assert frechet(other, one) == pytest.approx(frechet(one, other), rel=1e-10)


def test_statistics_are_numpys():
    found = features(50)
    exact = moments(found)
    np.testing.assert_allclose(exact.covariance.numpy(), np.cov(found.double().numpy(), rowvar=False))
    np.testing.assert_allclose(exact.mean.numpy(), found.double().numpy().mean(0))


def test_nothing_lies_between_a_set_and_itself_however_few_they_are():
    few = features(4, width=40)  # far fewer than numbers: a singular covariance
    assert frechet(moments(few), moments(few)) == pytest.approx(0, abs=1e-6)
    moved = Moments(moments(few).mean + 1, moments(few).covariance)
    assert frechet(moments(few), moved) == pytest.approx(40, abs=1e-6)
    with pytest.raises(ValueError, match="features: expected two or more"):
        moments(few[:1])


def test_the_kernel_distance_is_its_definition():
    one, other = features(20).double(), features(30, shift=1.0).double()

    def kernel(a: Tensor, b: Tensor) -> float:
        return (float(a @ b) / 6 + 1) ** 3

    within = [np.mean([kernel(a, b) for i, a in enumerate(s) for j, b in enumerate(s) if i != j]) for s in (one, other)]
    across = np.mean([kernel(a, b) for a in one for b in other])
    assert kernel_distance(one, other) == pytest.approx(float(sum(within) - 2 * across), rel=1e-9)


def test_precision_and_recall_are_their_definition():
    real, made = features(40), features(30, shift=0.7)

    def among(asked: Tensor, known: Tensor) -> float:
        table = torch.cdist(known.double(), known.double())
        reach = table.sort(dim=1).values[:, 3]
        return float(
            np.mean(
                [
                    any((one - k).norm() <= r for k, r in zip(known.double(), reach, strict=True))
                    for one in asked.double()
                ]
            )
        )

    assert precision_recall(real, made) == pytest.approx((among(made, real), among(real, made)))
    assert precision_recall(real, real) == (1.0, 1.0)
    assert precision_recall(real, real + 1000) == (0.0, 0.0)
    collapsed = real[:1] + 1e-3 * torch.randn(30, 6)
    precision, recall = precision_recall(real, collapsed)
    assert precision == 1.0
    assert recall <= 0.1
