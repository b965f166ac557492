"""Sums of each token and all before it."""

from __future__ import annotations

import pytest
import torch

from affinear.linearizing.sums import running_sum


@pytest.mark.parametrize("tokens", [1, 127, 256, 257, 384, 1000])
def test_it_is_cumsum_and_its_gradient_too(tokens: int):
    x = torch.randn(2, tokens, 3, 4, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(2, tokens, 3, 4, dtype=torch.float64)
    found, truth = running_sum(x), x.cumsum(1)
    assert torch.allclose(found, truth, atol=1e-12)
    slope, wanted = (torch.autograd.grad((out * weights).sum(), x)[0] for out in (found, truth))
    assert torch.allclose(slope, wanted, atol=1e-12)


def test_a_long_sum_of_float32_is_as_exact_as_its_numbers():
    x = torch.rand(1, 20_000, 1, 8)
    truth = x.double().cumsum(1)
    assert float(((running_sum(x) - truth) / truth).abs().max()) < 1e-6
