"""The type in which sums are kept: wide enough that a hundred thousand half-precision keys do not overflow it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def widen(x: Tensor) -> Tensor:
    """Tokens in the type in which sums are kept; the tensor itself where it has that type already."""
    return x.to(statistics_dtype(x.dtype))


def exact(x: Tensor) -> AbstractContextManager[object]:
    """A region without autocast, which would round the statistics to half precision, in the backward pass too."""
    # Where autocast is off, nothing is done, which is quicker; the meta device knows no autocast.
    on = not x.is_meta and torch.is_autocast_enabled(x.device.type)
    return torch.autocast(x.device.type, enabled=False) if on else nullcontext()
