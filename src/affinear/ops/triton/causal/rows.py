"""What both scans backwards share: references, the few numbers that are kept of a row, gradients of tokens."""

from __future__ import annotations

import triton
import triton.language as tl

from ..blocks import load_block, store_block, turn
from ..features import feature_gradient
from .past import load_first
from .places import find_first_key, length_of
from .wild import LARGEST, any_beyond

# What is kept of every row, as told from the references: factor of a score, weight of a key that scores nothing, what
# every turned feature of its chunk gets, over that factor, what those before get, and, where features are turned, what
# every plain one gets. Rounded chunks have their values as they are, told from nothing; what is before them does not.
ROWS: tl.constexpr = tl.constexpr(5)
TALL: tl.constexpr = tl.constexpr(64)  # rows of a chunk that the matrix units of a Hopper take at a time


@triton.jit
def load_gradient(x, i_b, i_n, i_h, o_n, m_n, o_e):
    """A block of the gradient of the answers."""
    p_do = x.p_do + i_b * x.s_gb + i_n * x.s_gn + i_h * x.s_gh
    return load_block(p_do, o_n, m_n, x.s_gn, o_e, x.s_gd, x.E)


@triton.jit
def load_means(x, state, i, o_d, o_s, o_e):
    """Mean feature, turned if features are, and mean value of entry `i` of a state."""
    i = tl.cast(i, tl.int64)
    p_key = state.key_mean
    if x.p_turns is not None:
        p_key = state.rotated_key_mean
    b_key = tl.load(p_key + i * x.F + o_s, mask=o_d < x.D, other=0.0)
    return b_key, tl.load(state.value_mean + i * x.E + o_e, mask=o_e < x.E, other=0.0)


@triton.jit
def load_references(
    x, initial, final, i, i_b, i_g, first, length, o_d, o_s, o_e,
    MAP: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, ROUND: tl.constexpr,
    SEGMENT: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """What the second scan tells keys and values from; whether the state in the end is wild.

    It is the means before the tokens. Where there are none, it is the first key and value, or, where keys are rounded,
    the mean of the first few of those that are not: those that are lie nearer to it. Small chunks, whose values meet
    the state in two halves, tell them from nothing.
    """
    b_key, b_value = load_means(x, final, i, o_d, o_s, o_e)
    wild = any_beyond(b_key, LARGEST) | any_beyond(b_value, LARGEST)
    stop = tl.minimum(SEGMENT, length)
    i_n = find_first_key(x, i_b, 0, stop, SEGMENT)
    rows = tl.minimum(BC - i_n % BC, stop - i_n) if ROUND else tl.minimum(stop - i_n, 1)
    _plain, b_turned, b_first = load_first(x, i_b, first, i_n, i_g, rows, o_d, o_e, MAP, EVEN, PRECISION, BD)
    b_key = tl.where(i_n < stop, b_turned, b_key)
    b_value = tl.where(i_n < stop, b_first, b_value)
    if initial.count is not None:
        some = tl.load(initial.count + i) > 0
        b_key_before, b_value_before = load_means(x, initial, i, o_d, o_s, o_e)
        b_key = tl.where(some, b_key_before, b_key)
        b_value = tl.where(some, b_value_before, b_value)
    if ROUND and BC < TALL:
        b_value = tl.zeros_like(b_value)
    b_key = tl.where(tl.abs(b_key) <= LARGEST, b_key, 0.0)
    b_value = tl.where(tl.abs(b_value) <= LARGEST, b_value, 0.0)
    return b_key, b_value, wild


@triton.jit
def rows_at(x, p_rows, i_b, i_n, i_h):
    """Where the kept numbers of a row lie, (B, H, ROWS, N)."""
    return p_rows + (i_b * x.H + i_h) * ROWS * length_of(x) + i_n


@triton.jit
def load_rows(x, p_rows, o_n, m_n, FIRST: tl.constexpr):
    """What is kept of a chunk's rows. Only the first block of values counts what is no product with values."""
    p_rows += o_n
    b_slope = tl.load(p_rows, mask=m_n, other=0.0)
    b_level = tl.load(p_rows + length_of(x), mask=m_n, other=0.0)
    b_pull = tl.zeros_like(b_slope)
    b_later = tl.zeros_like(b_slope)
    b_lift = tl.zeros_like(b_slope)
    if FIRST:
        b_pull = tl.load(p_rows + 2 * length_of(x), mask=m_n, other=0.0)
        b_later = tl.load(p_rows + 3 * length_of(x), mask=m_n, other=0.0)
        if x.p_turns is not None:
            b_lift = tl.load(p_rows + 4 * length_of(x), mask=m_n, other=0.0)
    return b_slope, b_level, b_pull, b_later, b_lift


@triton.jit
def unturn(x, b_f, b_r, b_cos, b_sin):
    """Gradient of features from those of plain and turned ones."""
    if x.p_turns is not None:
        b_f += turn(b_r, b_cos, -b_sin)
    else:
        b_f = b_r
    return b_f


@triton.jit
def of_keys(x, b_x, m_k):
    """Rows of keys that take part, zero elsewhere; past the end of a sequence nobody looks."""
    if x.p_mask is not None:
        b_x = tl.where(m_k[:, None], b_x, 0.0)
    return b_x


@triton.jit
def store_token_gradient(
    x, p_dx, p_sum, i_row, H, b_x, b_f, b_df, o_n, m_n, m_k, o_d, o_s,
    MAP: tl.constexpr, QUERY: tl.constexpr, PRECISION: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """From the gradient of features to that of tokens, or to a sum that further blocks of values add to."""
    if not (FIRST and LAST):
        p_sum += i_row * x.F + o_n[:, None] * (H * x.F) + o_s[None, :]
        m_sum = m_n[:, None] & (o_d < x.D)[None, :]
    if not FIRST:
        b_df += tl.load(p_sum, mask=m_sum, other=0.0)
    if LAST:
        b_dx = feature_gradient(b_x, b_f, b_df, MAP, QUERY, PRECISION == "split")
        if not QUERY:
            b_dx = of_keys(x, b_dx, m_k)
        store_block(p_dx + i_row * x.D, b_dx, o_n, m_n, H * x.D, tl.arange(0, b_x.shape[1]), x.D)
    else:
        tl.store(p_sum, b_df, mask=m_sum)
