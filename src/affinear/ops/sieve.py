"""What is not finite, kept away from those who do not see it.

A weight of zero does not undo NaN: zero times NaN is NaN, in answers and in gradients alike. So what is not finite is
set to zero before it is multiplied, and the rows that did see it are made NaN in the end.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import Parameter

from .tracing import is_eager


class Sieve:
    """Lets finite numbers pass, and remembers which answers the others concern. Unless it is `on`, all pass.

    Answers are (B, H, T, G, C, E): T chunks of C tokens, and G queries to a key.
    """

    def __init__(self, *, on: bool) -> None:
        self.on = on
        self.wild: list[Tensor] = []  # which answers are made of something that is not finite, broadcastable to all

    def rows(self, x: Tensor) -> Tensor:
        """Numbers of each row, (B, H, T, G, C, W)."""
        return self._strain(x, lambda bad: bad.any(-1, keepdim=True))

    def sums(self, x: Tensor) -> Tensor:
        """Running sums over the tokens of a chunk, (B, H, T, C, W): they concern the rows of their token."""
        return self._strain(x, lambda bad: bad.any(-1, keepdim=True)[..., None, :, :])

    def keys(self, x: Tensor) -> Tensor:
        """Keys of a chunk, (B, H, T, C, F): they concern all rows from their own on."""
        return self._strain(x, lambda bad: _since(bad.any(-1, keepdim=True)))

    def values(self, x: Tensor) -> Tensor:
        """Values of a chunk, (B, H, T, C, E): likewise, but each channel for itself."""
        return self._strain(x, _since)

    def key_means(self, x: Tensor) -> Tensor:
        """Means of keys before each chunk, (B, H, T, F): they concern all its rows."""
        return self._strain(x, lambda bad: bad.any(-1, keepdim=True)[..., None, None, :])

    def value_means(self, x: Tensor) -> Tensor:
        """Means of values before each chunk, (B, H, T, E): likewise, but each channel for itself."""
        return self._strain(x, lambda bad: bad[..., None, None, :])

    def scatters(self, x: Tensor) -> Tensor:
        """Products of keys and values before each chunk, (B, H, T, F, E): likewise."""
        return self._strain(x, lambda bad: bad.any(-2)[..., None, None, :])

    def lost(self, keys: Tensor, values: Tensor) -> Tensor | None:
        """NaN where a chunk has keys (B, H, T, C, F) or values (B, H, T, C, E) that do not pass, (B, H, T, 1, E)."""
        if not self.on:
            return None
        bad_keys, bad_values = (~x.detach().isfinite() for x in (keys, values))
        return _nan_where(bad_keys.any(-1).any(-1)[..., None, None] | bad_values.any(-2)[..., None, :], values)

    def mark(self, out: Tensor) -> Tensor:
        """Answers, NaN where they are wild. A gradient of zero that comes to them goes on as zero."""
        for bad in self.wild:
            out = out + _nan_where(bad, out)
        return out

    def _strain(self, x: Tensor, concerned: Callable[[Tensor], Tensor]) -> Tensor:
        if not self.on:
            return x
        self.wild.append(concerned(~x.detach().isfinite()))
        # Unlike `masked_fill` and `where` it leaves gradients laid out as they come: sums over them keep their bits.
        return x.nan_to_num(0.0, 0.0, 0.0)


def can_be_read(x: Tensor) -> bool:
    """Whether numbers are there to look at, without waiting for a device."""
    return x.device.type == "cpu" and type(x) in (Tensor, Parameter) and is_eager()


def may_be_wild(out: Tensor) -> bool:
    """Whether answers may hold something that is not finite; where they cannot be looked at, they may."""
    # A sum that overflows is taken for wild, which is slow, not wrong.
    return not out.is_meta and not (can_be_read(out) and bool(out.detach().sum().isfinite()))


def _nan_where(bad: Tensor, like: Tensor) -> Tensor:
    return torch.zeros_like(bad, dtype=like.dtype).masked_fill(bad, torch.nan)


def _since(bad: Tensor) -> Tensor:
    return (bad.cumsum(-2) > 0)[..., None, :, :]
