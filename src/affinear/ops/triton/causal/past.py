"""All keys before a chunk: their moments, which a scan opens, takes chunk after chunk into, and writes down."""

from __future__ import annotations

import triton
import triton.language as tl

from ..blocks import no_sum, operand, token_product, token_sum, total
from ..moments import load_moments, store_moments
from .places import FEW, find_exact, find_first_key, find_keys
from .tokens import centre, features_of, load_key, load_positions, load_value


@triton.jit
def load_first(
    x, i_b, first, i_n, i_g, rows, o_d, o_e,
    MAP: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Mean of the features, plain and turned, and of the values of so many rows, 16 at most, from `i_n` on.

    Even one is read as a block, for the layout: what is told from it would be laid out like a block of one row.
    """
    o_n = tl.arange(0, FEW)
    m_n = find_keys(x, i_b, i_n, o_n, o_n < rows)
    b_k = load_key(x, i_b, first + i_n, i_g, o_n, m_n, BD)
    b_cos, b_sin = load_positions(x, first + i_n, o_n, m_n, o_d)
    b_f, b_r = features_of(x, b_k, b_cos, b_sin, MAP, False, EVEN, PRECISION)
    b_f = tl.where(m_n[:, None], b_f, 0.0)
    b_r = tl.where(m_n[:, None], b_r, 0.0)
    b_v = load_value(x, i_b, first + i_n, i_g, o_n, m_n, o_e).to(tl.float32)
    share = 1 / tl.maximum(tl.sum(m_n.to(tl.int32), 0), 1).to(tl.float32)
    return share * tl.sum(b_f, 0), share * tl.sum(b_r, 0), share * tl.sum(b_v, 0)


@triton.jit
def open_past(
    x, past, i, i_b, i_g, first, begin, stop, o_d, o_s, o_e, KNOWN: tl.constexpr,
    MAP: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, ROUND: tl.constexpr, SEGMENT: tl.constexpr,
    BC: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Entry `i` of `past` if known: count, means, scatter; the first value, and up to where nothing is to be rounded.

    The first key and value stand for the means where there are none: answers do not depend on them, rounding does.
    """
    n = first * 0
    b_plain = tl.zeros((BF,), tl.float32)
    b_turned = tl.zeros((BF,), tl.float32)
    b_value = tl.zeros((BE,), tl.float32)
    b_scatter = tl.zeros((BE, BF), tl.float32)
    if KNOWN:
        n = tl.load(past.count + i)
        b_n, b_plain, b_turned, b_value, b_cov = load_moments(
            past.count, past.key_mean, past.rotated_key_mean, past.value_mean, past.covariance,
            i, o_s, o_d < x.D, o_e, x.F, x.E, x.p_turns is not None,
        )  # fmt: skip
        # What was not there has no mean, whatever the memory says.
        b_plain = tl.where(n > 0, b_plain, 0.0)
        b_turned = tl.where(n > 0, b_turned, 0.0)
        b_value = tl.where(n > 0, b_value, 0.0)
        b_scatter = tl.where(n > 0, tl.trans(b_cov) * b_n, 0.0)
    i_n = find_first_key(x, i_b, begin, stop, SEGMENT)
    one = ((i_n < stop) & (n == 0)).to(tl.int32)
    b_first_plain, b_first_turned, b_first = load_first(
        x, i_b, first, i_n, i_g, one, o_d, o_e, MAP, EVEN, PRECISION, BD
    )
    b_plain = tl.where(n > 0, b_plain, b_first_plain)
    b_turned = tl.where(n > 0, b_turned, b_first_turned)
    exact = find_exact(n, begin, stop, i_n, ROUND, BC)
    return n, b_plain, b_turned, b_value, b_scatter, b_first, exact


@triton.jit
def sum_rows(b_x, m_n):
    """Sum of the rows `m_n` of a bfloat16 block, exactly."""
    return total(token_sum(m_n.to(tl.float32).to(tl.bfloat16), b_x, no_sum(b_x.shape[1]), "split"))


@triton.jit
def load_keys(
    x, i_b, i_n, i_g, o_n, m_n, m_k, o_e, b_cos, b_sin, n, number, b_plain, b_turned, b_value, b_first,
    MAP: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, ROUND: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Features of a chunk, plain and turned, and values, as factors of products; what they sum to; values' reference.

    Features are told from their means before the chunk, and so are values, but bfloat16 ones are exact as they are:
    the mean is then taken off the product. There, rows without a key hold anything: their values are zero, no query
    sees them, and sums leave them out.
    """
    b_k = load_key(x, i_b, i_n, i_g, o_n, m_n, BD)
    b_f, b_r = features_of(x, b_k, b_cos, b_sin, MAP, False, EVEN, PRECISION)
    b_v = load_value(x, i_b, i_n, i_g, o_n, m_n, o_e)
    if ROUND:
        b_f = operand(b_f - b_plain[None, :], True)
        b_df = sum_rows(b_f, m_k)
        b_dv = sum_rows(b_v, m_k) - number.to(tl.float32) * b_value
    else:
        b_f = centre(b_f, m_k, b_plain)
        b_df = tl.sum(b_f, 0)
        b_v = b_v.to(tl.float32)
        b_dv = tl.sum(centre(b_v, m_k, b_value), 0)
        b_value = tl.where(n > 0, b_value, b_first)
        b_v = centre(b_v, m_k, b_value)
    if x.p_turns is None:
        b_r = b_f
        b_dr = b_df
    elif ROUND:
        b_r = operand(b_r - b_turned[None, :], True)
        b_dr = sum_rows(b_r, m_k)
    else:
        b_r = centre(b_r, m_k, b_turned)
        b_dr = tl.sum(b_r, 0)
    return b_f, b_r, b_v, b_df, b_dr, b_dv, b_value


@triton.jit
def absorb(
    x, n, number, b_plain, b_turned, b_value, b_scatter, m_k, b_r, b_v, b_df, b_dr, b_dv,
    PRECISION: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Take a chunk of so many keys into the past: Welford's update.

    The scatter (BE, BF) gains (v - mean before) (k - mean after)^T. Where keys are rounded for all products at once
    they are told from the mean before, and the values from the one after, which is as good.
    """
    n += number
    share = 1 / tl.maximum(n, 1).to(tl.float32)
    b_value += share * b_dv
    if ROUND:
        b_scatter -= b_value[:, None] * b_dr[None, :]
    else:
        b_r = centre(b_r, m_k, share * b_dr)
    b_scatter = token_product(b_v, b_r, b_scatter, PRECISION)
    b_turned += share * b_dr
    if x.p_turns is not None:
        b_plain += share * b_df
    else:
        b_plain = b_turned
    return n, b_plain, b_turned, b_value, b_scatter


@triton.jit
def close_past(x, state, i, n, b_plain, b_turned, b_value, b_scatter, o_d, o_s, o_e, i_e):
    """Write what a scan arrived at as entry `i` of a state."""
    some = tl.where(n > 0, 1.0, 0.0)
    b_cov = tl.trans(b_scatter) * (some / tl.maximum(n, 1).to(tl.float32))
    store_moments(
        state.count, state.key_mean, state.rotated_key_mean, state.value_mean, state.covariance,
        i, n, some * b_plain, some * b_turned, some * b_value, b_cov,
        o_s, o_d < x.D, o_e, x.F, x.E, i_e == 0, True, x.p_turns is not None,
    )  # fmt: skip
