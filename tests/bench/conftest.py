"""Rows and reports made up by hand, so that every expected number can be worked out on paper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from affinear.bench.cases import Case, Shape
from affinear.bench.measure import Clock
from affinear.bench.rows import Report, Row
from affinear.bench.timing import collect

CPU = torch.device("cpu")


@pytest.fixture
def clock() -> Clock:
    return Clock(CPU, 0.002)


@pytest.fixture
def case() -> Case:
    return Case(Shape(2, 2, 24, 8), torch.float32)


@pytest.fixture
def make_row() -> Callable[..., Row]:
    def make(ms: float | None = None, **changed: Any) -> Row:
        times = None if ms is None else collect([ms])
        fields: dict[str, Any] = {
            "table": "non-causal",
            "contender": "affinear triton",
            "direction": "forward",
            "shape": Shape(64, 1, 16384, 64),
            "dtype": "bfloat16",
            "mechanism": "mala",
            "graph": times,
            "call": times,
        }
        return Row(**fields | changed)

    return make


@pytest.fixture
def make_report() -> Callable[..., Report]:
    def make(*rows: Row, copy: float = 4000.0, gpu: str | None = "NVIDIA H200") -> Report:
        machine = {"gpu": gpu, "cpu": "a processor", "affinear": "0", "torch": "0", "triton": None}
        settings = {"tables": ["non-causal"], "mechanism": "mala", "dtype": "bfloat16"}
        return Report(machine, settings, copy, collect([1.0, 2.0]), list(rows))

    return make
