"""Fresh random numbers for each run, and the one way in which the tests measure an error."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable

import pytest
import torch
from torch import Tensor


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Fresh numbers in every run. A failing test reports its seed; AFFINEAR_SEED repeats it."""
    number = int(os.environ.get("AFFINEAR_SEED", secrets.randbits(32)))
    torch.manual_seed(number)
    request.node.add_report_section("setup", "seed", f"AFFINEAR_SEED={number}")
    return number


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
