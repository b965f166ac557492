"""What is not finite, or too large to subtract."""

from __future__ import annotations

import triton
import triton.language as tl

from ..features import feature
from .places import find_keys
from .tokens import load_key, load_value

LARGEST: tl.constexpr = tl.constexpr(3.4028234663852886e38)  # of the float32 numbers
TAME: tl.constexpr = tl.constexpr(1e37)  # up to here the difference of two numbers is finite, and so are sums of a few


@triton.jit
def any_beyond(b_x, MOST: tl.constexpr):
    """Whether a block holds NaN or a magnitude beyond `MOST`."""
    b_wild = tl.where(tl.abs(b_x) <= MOST, 0, 1)
    if len(b_x.shape) == 2:
        b_wild = tl.max(b_wild, 1)
    return tl.max(b_wild, 0) > 0


@triton.jit
def find_wild(
    x, i_b, i_g, first, begin, stop, o_e,
    MAP: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """The first of some rows with a key or a value that is not tame, or `stop`."""
    o_n = tl.arange(0, BC)
    found = stop
    for i_n in range(begin, stop, BC):
        m_k = find_keys(x, i_b, i_n, o_n, i_n + o_n < stop)
        b_k = load_key(x, i_b, first + i_n, i_g, o_n, m_k, BD)
        b_f = feature(b_k, tl.arange(0, BD) < x.D, MAP, False, EVEN, PRECISION == "split")
        b_v = load_value(x, i_b, first + i_n, i_g, o_n, m_k, o_e).to(tl.float32)
        b_wild = tl.max(tl.where(tl.abs(b_f) <= TAME, 0, 1), 1) + tl.max(tl.where(tl.abs(b_v) <= TAME, 0, 1), 1)
        found = tl.minimum(found, tl.min(tl.where(m_k & (b_wild > 0), i_n + o_n, stop), 0))
    return found
