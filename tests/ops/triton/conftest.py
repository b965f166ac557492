"""The interpreter, made to round as the hardware does."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter

sys.path.insert(0, str(Path(__file__).parent))

collect_ignore = ["prepared_launches.py"]  # a program for a process of its own


@pytest.fixture
def rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter cuts off where the hardware rounds to bfloat16; here it rounds."""
    convert = interpreter._convert_float

    def rounded(x: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(x, source, target, mode)
        bits = np.ascontiguousarray(x).view(np.uint32)
        nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return np.where(np.isnan(x), np.uint16(0x7FC0), nearest).reshape(x.shape)

    monkeypatch.setattr(interpreter, "_convert_float", rounded)
