"""The tensors of a state, as the kernels read and write them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Statistics(NamedTuple):
    """Moments of the tokens of S sequences and G key heads, float32 and contiguous.

    Attributes:
        count: (S, G), int64.
        key_mean: (S, G, F), before any rotation.
        value_mean: (S, G, E).
        covariance: (S, G, F, E).
        rotated_key_mean: (S, G, F), or None without rotary positions.
    """

    count: Tensor
    key_mean: Tensor
    value_mean: Tensor
    covariance: Tensor
    rotated_key_mean: Tensor | None


class Rest(NamedTuple):
    """What has been rounded off a state by those who took tokens into it, float32 and contiguous, None where unknown.

    Attributes:
        key_mean: (S, G, F).
        value_mean: (S, G, E).
        covariance: (S, G, F, E).
        rotated_key_mean: (S, G, F).
    """

    key_mean: Tensor | None = None
    value_mean: Tensor | None = None
    covariance: Tensor | None = None
    rotated_key_mean: Tensor | None = None
