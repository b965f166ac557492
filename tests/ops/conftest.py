"""Random numbers in float64, and the one way in which the tests measure an error."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor


@pytest.fixture
def randn(seed: int) -> Callable[..., Tensor]:
    """`torch.randn` in float64."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return draw


@pytest.fixture(scope="session")
def relative_error() -> Callable[[Tensor, Tensor], float]:
    """||out - truth|| / ||truth|| in float64; of a truth that vanishes, ||out||."""

    def measure(out: Tensor, truth: Tensor) -> float:
        assert out.shape == truth.shape
        length = truth.double().norm().item()
        return (out.double() - truth.double()).norm().item() / (length or 1.0)

    return measure
