"""Fresh random numbers for each run. Without a GPU, Triton interprets the kernels: it has to know before its import."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

# Some virtual machines announce matrix instructions for bfloat16 and then stop the program that uses them.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


# What takes long, or throws noise at readers until they trip: `make test-all` runs it, `make test` does not.
EXHAUSTIVE = tuple(Path(__file__).parent / name for name in ("exhaustive", "fuzz"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all that lies in the folders of exhaustive tests."""
    for item in items:
        if any(folder in item.path.parents for folder in EXHAUSTIVE):
            item.add_marker(pytest.mark.exhaustive)


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Fresh numbers in every run. A failing test reports its seed; AFFINEAR_SEED repeats it."""
    number = int(os.environ.get("AFFINEAR_SEED", secrets.randbits(32)))
    torch.manual_seed(number)
    request.node.add_report_section("setup", "seed", f"AFFINEAR_SEED={number}")
    return number
