"""Gradients of keys or of values, in a scan backwards, and of the state before all tokens."""

from __future__ import annotations

import triton
import triton.language as tl

from ..blocks import channels, halves, operand, store_block, times_state
from .future import find_live, foresee, open_future, weighted_sum
from .places import FEW, find_exact, find_first_key, find_rows, find_segment, length_of
from .rows import (
    TALL,
    load_gradient,
    load_means,
    load_references,
    load_rows,
    of_keys,
    rows_at,
    store_token_gradient,
    unturn,
)
from .tokens import centre, features_of, load_key, load_positions, load_query, load_value, row_product


@triton.jit
def add_own(b_dx, b_x, b_a, b_b, b_level, m_seen, PRECISION: tl.constexpr, ROUND: tl.constexpr):
    """Add to the gradients of a chunk's keys or values what its own queries have for them: (x a^T + level) b.

    Pairs are keys by queries: what comes of one product is then the first factor of the next as it lies.
    """
    b_w = row_product(b_x, tl.trans(b_a), tl.zeros(m_seen.shape, tl.float32), PRECISION)
    b_w = tl.where(m_seen, b_level[None, :] + b_w, 0.0)
    return row_product(operand(b_w, ROUND), b_b, b_dx, PRECISION)


@triton.jit
def key_rows(
    x, p_dk, p_dv, p_partial, p_rows, i_b, i_g, first, begin, stop, end, live, o_d, o_s, o_e,
    b_sum, b_turned, b_plain, b_value, b_key_mean, b_value_mean,
    MAP: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, ROUND: tl.constexpr,
    AS_THEY_ARE: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, OF_KEYS: tl.constexpr,
    GROUP: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Gradients of keys, or else of values, from `begin` to `stop`, last chunk first, of a segment up to `end`.

    Its queries up to `live` have a part in them.

    Those of keys come from values and those of values from keys, by the same sum of all later queries.
    """
    # Two groups of warps both compute a product that another one adds to. So tall chunks meet the state in one product,
    # with values told from their mean; and, where the state is wide, apart from what their own queries give.
    ONCE: tl.constexpr = ROUND and BC >= TALL
    APART: tl.constexpr = b_sum.shape[0] * b_sum.shape[1] > 64 * 64 and BC >= TALL
    o_n = tl.arange(0, BC)
    m_seen = o_n[:, None] <= o_n[None, :]
    number = tl.cdiv(stop - begin, BC)
    for i in range(number):
        i_n = begin + (number - 1 - i) * BC
        i_r = first + i_n
        i_row = (i_b * length_of(x) + i_r) * x.G + i_g
        m_n, m_k, m_n_load, m_k_load = find_rows(x, i_b, i_n, o_n, end, end)
        m_live = i_n + o_n < live
        b_cos, b_sin = load_positions(x, i_r, o_n, m_n_load, o_d)
        b_high, b_low = halves(b_sum, PRECISION)
        if OF_KEYS:
            b_x = load_value(x, i_b, i_r, i_g, o_n, m_k_load, o_e)
            if not AS_THEY_ARE:
                b_x = centre(b_x.to(tl.float32), m_k, b_value_mean)
            b_common = b_turned
            if ONCE:
                b_common -= weighted_sum(b_value_mean, b_high, PRECISION, True)
        else:
            b_k = load_key(x, i_b, i_r, i_g, o_n, m_k_load, BD)
            _f, b_r = features_of(x, b_k, b_cos, b_sin, MAP, False, EVEN, PRECISION)
            b_x = operand(centre(b_r, m_k, b_key_mean), ROUND)
            b_common = b_value
            b_high = tl.trans(b_high)
            b_low = tl.trans(b_low)
        b_df = tl.zeros((BC, b_plain.shape[0]), tl.float32) + b_plain[None, :]
        b_later = tl.zeros((BC, b_common.shape[0]), tl.float32) + b_common[None, :]
        b_dx = tl.zeros_like(b_later) if APART else times_state(b_x, b_high, b_low, b_later, PRECISION, ONCE)
        for j_h in range(GROUP):
            i_h = i_g * GROUP + j_h
            b_q = load_query(x, i_b, i_r, i_h, o_n, m_live, BD)
            b_do = load_gradient(x, i_b, i_r, i_h, o_n, m_live, o_e)
            b_f, b_r = features_of(x, b_q, b_cos, b_sin, MAP, True, EVEN, PRECISION)
            p_row = rows_at(x, p_rows, i_b, i_r, i_h)
            b_slope, b_level, b_pull, b_later_pull, b_lift = load_rows(x, p_row, o_n, m_live, FIRST)
            b_scaled = operand(b_slope[:, None] * b_r, ROUND)
            if OF_KEYS:
                b_dx = add_own(b_dx, b_x, b_do, b_scaled, b_pull, m_seen, PRECISION, ROUND)
                if x.p_turns is not None:
                    b_w = operand(tl.where(m_seen, b_lift[None, :], 0.0), ROUND)
                    b_df = row_product(b_w, operand(b_f, ROUND), b_df, PRECISION)
            else:
                b_dx = add_own(b_dx, b_x, b_scaled, b_do, b_level, m_seen, PRECISION, ROUND)
            b_sum, b_turned, b_plain, b_value = foresee(
                x, b_sum, b_turned, b_plain, b_value, b_f, b_r, b_scaled, b_do, b_slope, b_level, b_later_pull, b_lift,
                PRECISION, ROUND, OF_KEYS, not OF_KEYS,
            )  # fmt: skip
        if APART:
            b_dx += times_state(b_x, b_high, b_low, b_later, PRECISION, ONCE)
        if OF_KEYS:
            b_k = load_key(x, i_b, i_r, i_g, o_n, m_k_load, BD)
            b_f, _r = features_of(x, b_k, b_cos, b_sin, MAP, False, EVEN, PRECISION)
            store_token_gradient(
                x, p_dk, p_partial, i_row, x.G, b_k, b_f, unturn(x, b_df, b_dx, b_cos, b_sin),
                o_n, m_n, m_k, o_d, o_s, MAP, False, PRECISION, FIRST, LAST,
            )  # fmt: skip
        else:
            store_block(p_dv + i_row * x.E, of_keys(x, b_dx, m_k), o_n, m_n, x.G * x.E, o_e, x.E)
    return b_sum, b_turned, b_plain, b_value


@triton.jit
def store_initial_gradient(
    x, initial, dinitial, i, here, b_sum, b_turned, b_plain, b_value, b_key_mean, b_value_mean, o_d, o_s, o_e,
    FIRST: tl.constexpr, OF_KEYS: tl.constexpr,
):  # fmt: skip
    """Gradient of entry `i` of the state before all tokens, if here, which acts as so many tokens at its means."""
    i = tl.cast(i, tl.int64)
    m_f, m_e = here & (o_d < x.D), here & (o_e < x.E)
    n = tl.load(initial.count + i).to(tl.float32)
    b_key, b_mean = load_means(x, initial, i, o_d, o_s, o_e)
    if OF_KEYS:
        b_turned = n * (b_turned + tl.sum(b_sum * (b_mean - b_value_mean)[:, None], 0))
        p_dkey = dinitial.key_mean
        if x.p_turns is not None:
            p_dkey = dinitial.rotated_key_mean
        p_dkey += i * x.F + o_s
        if not FIRST:
            b_turned += tl.load(p_dkey, mask=m_f, other=0.0)
        tl.store(p_dkey, b_turned, mask=m_f)
        if FIRST and x.p_turns is not None:
            tl.store(dinitial.key_mean + i * x.F + o_s, n * b_plain, mask=m_f)
    else:
        b_value += tl.sum(b_sum * (b_key - b_key_mean)[None, :], 1)
        tl.store(dinitial.value_mean + i * x.E + o_e, n * b_value, mask=m_e)
        p_cov = dinitial.covariance + i * x.F * x.E + o_s[None, :] * x.E + o_e[:, None]
        tl.store(p_cov, n * b_sum, mask=m_e[:, None] & m_f[None, :])


@triton.jit
def key_kernel(
    x, past, initial, final, dfinal, dinitial, p_dk, p_dv, p_partial, p_rows, p_sums, i_e,
    MAP: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, ROUND: tl.constexpr,
    SEVERAL: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, OF_KEYS: tl.constexpr,
    GROUP: tl.constexpr, SEGMENT: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Gradients of the keys or else the values of one segment, one block of the values, and of the state before."""
    i_t, i_g = tl.program_id(0) // x.G, (tl.program_id(0) % x.G).to(tl.int64)
    i_s, i_b, first, length, begin = find_segment(x, i_t, SEGMENT)
    if (begin >= length) & (begin > 0):
        return
    stop = tl.minimum(begin + SEGMENT, length)
    o_d, o_s = channels(x.D, BD, BF)
    o_e = i_e * BE + tl.arange(0, BE)
    n = first * 0
    if past.count is not None:
        n = tl.load(past.count + (i_t if SEVERAL else i_s) * x.G + i_g)
    exact = find_exact(n, begin, stop, find_first_key(x, i_b, begin, stop, SEGMENT), ROUND, BC)
    b_key_mean, b_value_mean, _wild = load_references(
        x, initial, final, i_s * x.G + i_g, i_b, i_g, first, length, o_d, o_s, o_e,
        MAP, EVEN, PRECISION, ROUND, SEGMENT, BC, BD,
    )  # fmt: skip
    live = find_live(x, p_rows, i_b, i_g, first, begin, stop, GROUP, SEGMENT, FEW, BE)
    b_sum, b_turned, b_plain, b_value = open_future(
        x, p_sums, dfinal, final, i_t, i_s, i_g, o_d, o_s, o_e, b_key_mean, b_value_mean, SEVERAL, FIRST, BF, BE
    )
    b_sum, b_turned, b_plain, b_value = key_rows(
        x, p_dk, p_dv, p_partial, p_rows, i_b, i_g, first, exact, stop, stop, live, o_d, o_s, o_e,
        b_sum, b_turned, b_plain, b_value, b_key_mean, b_value_mean,
        MAP, EVEN, PRECISION, ROUND, ROUND, FIRST, LAST, OF_KEYS, GROUP, BC, BD,
    )  # fmt: skip
    if ROUND:
        # The few first rows are not rounded, and told from nothing; so is then all that they are added to.
        b_value -= tl.sum(b_sum * b_key_mean[None, :], 1)
        b_turned -= tl.sum(b_sum * b_value_mean[:, None], 0)
        b_key_mean = tl.zeros_like(b_key_mean)
        b_value_mean = tl.zeros_like(b_value_mean)
        b_sum, b_turned, b_plain, b_value = key_rows(
            x, p_dk, p_dv, p_partial, p_rows, i_b, i_g, first, begin, exact, stop, live, o_d, o_s, o_e,
            b_sum, b_turned, b_plain, b_value, b_key_mean, b_value_mean,
            MAP, EVEN, PRECISION, False, True, FIRST, LAST, OF_KEYS, GROUP, FEW, BD,
        )  # fmt: skip
    if dinitial.covariance is not None:
        store_initial_gradient(
            x, initial, dinitial, i_s * x.G + i_g, begin == 0, b_sum, b_turned, b_plain, b_value,
            b_key_mean, b_value_mean, o_d, o_s, o_e, FIRST, OF_KEYS,
        )  # fmt: skip
