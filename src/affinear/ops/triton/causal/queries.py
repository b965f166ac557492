"""Gradients of queries, in a scan forwards, which leaves what keys and values will want of every row."""

from __future__ import annotations

import triton
import triton.language as tl

from ..blocks import INTERPRETED, channels, gain, halves, mean_weight, operand, times_state
from .past import absorb, load_keys, open_past
from .places import FEW, count_keys, find_pairs, find_rows, find_segment, length_of, number_of
from .rows import load_gradient, load_references, rows_at, store_token_gradient, unturn
from .tokens import features_of, load_positions, load_query, row_product
from .wild import find_wild


@triton.jit
def _add_two(a, b, other_a, other_b):
    """Two sums at once."""
    return a + other_a, b + other_b


@triton.jit
def sum_two(b_a, b_b):
    """Sums of the rows of two blocks: together they wait for each other once, not twice."""
    if INTERPRETED:
        return tl.sum(b_a, 1), tl.sum(b_b, 1)
    else:
        return tl.reduce((b_a, b_b), 1, _add_two)


@triton.jit
def _add_three(a, b, c, other_a, other_b, other_c):
    """Three sums at once."""
    return a + other_a, b + other_b, c + other_c


@triton.jit
def sum_three(b_a, b_b, b_c):
    """Sums of the rows of three blocks, likewise."""
    if INTERPRETED:
        return tl.sum(b_a, 1), tl.sum(b_b, 1), tl.sum(b_c, 1)
    else:
        return tl.reduce((b_a, b_b, b_c), 1, _add_three)


@triton.jit
def query_gradient(
    x, p_rows, b_f, b_r, b_do, b_kf, b_kr, b_v, o_n, m_n, m_see, b_share, b_plain, b_turned, b_value, b_scatter,
    b_key_mean, b_value_mean, GAIN: tl.constexpr, RELEASED: tl.constexpr, PRECISION: tl.constexpr,
    ROUND: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Gradients of the features of a chunk's queries, plain and turned; what keys will want of the rows is written."""
    b_zero = tl.zeros((m_see.shape[0], b_kr.shape[1]), tl.float32)
    b_wide = b_do.to(tl.float32)
    b_past, b_apart = sum_two(b_wide * b_value[None, :], b_wide * (b_value - b_value_mean)[None, :])
    b_p = row_product(b_do, tl.trans(b_v), tl.zeros(m_see.shape, tl.float32), PRECISION)
    if ROUND:
        b_p -= b_past[:, None]
    b_p = tl.where(m_see, b_p, 0.0)
    b_mean = tl.sum(b_p, 1) * b_share
    b_p = operand(tl.where(m_see, b_p - b_mean[:, None], 0.0), ROUND)
    b_high, b_low = halves(b_scatter, PRECISION)
    b_dr = times_state(b_do, b_high, b_low, b_zero, PRECISION, ROUND)
    b_dr += row_product(b_p, b_kr, b_zero, PRECISION)

    # Running means: the sum over the keys in sight is a product with ones and zeros.
    b_one = operand(m_see.to(tl.float32), PRECISION == "split")
    b_seen = b_plain[None, :] + b_share[:, None] * row_product(b_one, b_kf, b_zero, PRECISION)
    b_turned_seen = b_seen
    if x.p_turns is not None:
        b_turned_seen = b_turned[None, :] + b_share[:, None] * row_product(b_one, b_kr, b_zero, PRECISION)
    b_seen_score, b_away_score, b_dgain = sum_three(
        b_f * b_seen, b_r * (b_turned_seen - b_key_mean[None, :]), b_r * b_dr
    )
    b_z = x.scale * b_seen_score
    b_gain, b_by_z = gain(b_z, GAIN, RELEASED)
    b_slope = x.scale * b_gain * b_share
    b_dz = b_by_z * x.scale * b_share * b_dgain
    b_level = tl.where(b_share > 0, 1.0, 0.0)
    b_dadded = tl.zeros_like(b_z)
    if RELEASED:
        b_added = tl.zeros_like(b_z)
        if x.p_turns is not None:
            b_added = x.scale * tl.sum(b_r * b_turned_seen - b_f * b_seen, 1)
        b_weight, b_by_z, b_by_added = mean_weight(b_z, b_added, GAIN)
        b_dlevel = b_level * (b_past + b_mean)
        b_level *= b_weight
        b_dz += b_by_z * b_dlevel
        if x.p_turns is not None:
            b_dadded = b_by_added * b_dlevel
    b_df = (x.scale * (b_dz - b_dadded))[:, None] * b_seen
    b_weight = b_level * b_share - b_slope * b_away_score
    b_dr = b_slope[:, None] * b_dr
    if RELEASED and x.p_turns is not None:
        b_dr += (x.scale * b_dadded)[:, None] * b_turned_seen
    if x.p_turns is None:
        b_dr += b_df

    b_lift = x.scale * b_share * (b_dz - b_dadded)
    b_pull = x.scale * b_share * b_dadded
    if x.p_turns is None:
        b_pull += b_lift
    b_pull = tl.where(b_slope != 0, b_pull / tl.where(b_slope != 0, b_slope, 1.0), 0.0)
    b_later = b_pull - (b_apart + b_mean)
    b_pull = b_pull - (b_past + b_mean) if ROUND else b_later
    p_rows += o_n
    if not FIRST:
        b_pull += tl.load(p_rows + 2 * length_of(x), mask=m_n, other=0.0)
        b_later += tl.load(p_rows + 3 * length_of(x), mask=m_n, other=0.0)
    tl.store(p_rows, b_slope, mask=m_n)
    tl.store(p_rows + length_of(x), b_weight, mask=m_n)
    tl.store(p_rows + 2 * length_of(x), b_pull, mask=m_n)
    tl.store(p_rows + 3 * length_of(x), b_later, mask=m_n)
    if x.p_turns is not None:
        if not FIRST:
            b_lift += tl.load(p_rows + 4 * length_of(x), mask=m_n, other=0.0)
        tl.store(p_rows + 4 * length_of(x), b_lift, mask=m_n)
    return b_df, b_dr


@triton.jit
def query_rows(
    x, p_dq, p_sum, p_rows, i_b, i_g, first, begin, stop, end, key_end, o_d, o_s, o_e,
    n, b_plain, b_turned, b_value, b_scatter, b_first, b_key_mean, b_value_mean,
    MAP: tl.constexpr, EVEN: tl.constexpr, GAIN: tl.constexpr, RELEASED: tl.constexpr, PRECISION: tl.constexpr,
    ROUND: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, GROUP: tl.constexpr,
    BC: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries of the chunks that begin before `stop`, of a segment up to `end`.

    Keys and values from `key_end` on are left out, and rows from there on get NaN.
    """
    o_n = tl.arange(0, BC)
    for i_n in range(begin, stop, BC):
        i_r = first + i_n
        m_n, m_k, m_n_load, m_k_load = find_rows(x, i_b, i_n, o_n, end, key_end)
        b_cos, b_sin = load_positions(x, i_r, o_n, m_n_load, o_d)
        number = number_of(x, m_k, end - i_n)
        b_kf, b_kr, b_v, b_dkf, b_dkr, b_dv, b_ref = load_keys(
            x, i_b, i_r, i_g, o_n, m_k_load, m_k, o_e, b_cos, b_sin, n, number, b_plain, b_turned, b_value, b_first,
            MAP, EVEN, PRECISION, ROUND, BD,
        )  # fmt: skip
        m_see = find_pairs(x, o_n, m_k, 0)
        b_share = tl.where(o_n < key_end - i_n, count_keys(x, n, o_n, m_k), float("nan"))
        for j_h in range(GROUP):
            i_h = i_g * GROUP + j_h
            b_q = load_query(x, i_b, i_r, i_h, o_n, m_n_load, BD)
            b_do = load_gradient(x, i_b, i_r, i_h, o_n, m_n_load, o_e)
            b_f, b_r = features_of(x, b_q, b_cos, b_sin, MAP, True, EVEN, PRECISION)
            b_df, b_dr = query_gradient(
                x, rows_at(x, p_rows, i_b, i_r, i_h), b_f, b_r, b_do, b_kf, b_kr, b_v, o_n, m_n, m_see, b_share,
                b_plain, b_turned, b_ref, b_scatter, b_key_mean, b_value_mean,
                GAIN, RELEASED, PRECISION, ROUND, FIRST,
            )  # fmt: skip
            store_token_gradient(
                x, p_dq, p_sum, (i_b * length_of(x) + i_r) * x.H + i_h, x.H, b_q, b_f,
                unturn(x, b_df, b_dr, b_cos, b_sin),
                o_n, m_n, m_n, o_d, o_s, MAP, True, PRECISION, FIRST, LAST,
            )  # fmt: skip
        n, b_plain, b_turned, b_value, b_scatter = absorb(
            x, n, number, b_plain, b_turned, b_value, b_scatter, m_k, b_kr, b_v, b_dkf, b_dkr, b_dv, PRECISION, ROUND
        )
    return n, b_plain, b_turned, b_value, b_scatter


@triton.jit
def query_kernel(
    x, past, initial, final, p_dq, p_sum, p_rows, i_e,
    MAP: tl.constexpr, EVEN: tl.constexpr, GAIN: tl.constexpr, RELEASED: tl.constexpr, PRECISION: tl.constexpr,
    ROUND: tl.constexpr, SEVERAL: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
    GROUP: tl.constexpr, SEGMENT: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries of one segment that share a key head, as far as one block of the values tells."""
    i_t, i_g = tl.program_id(0) // x.G, (tl.program_id(0) % x.G).to(tl.int64)
    i_s, i_b, first, length, begin = find_segment(x, i_t, SEGMENT)
    if begin >= length:
        return
    stop = tl.minimum(begin + SEGMENT, length)
    o_d, o_s = channels(x.D, BD, BF)
    o_e = i_e * BE + tl.arange(0, BE)
    i = (i_t if SEVERAL else i_s) * x.G + i_g
    n, b_plain, b_turned, b_value, b_scatter, b_first, exact = open_past(
        x, past, i, i_b, i_g, first, begin, stop, o_d, o_s, o_e, past.count is not None,
        MAP, EVEN, PRECISION, ROUND, SEGMENT, BC, BD, BF, BE,
    )  # fmt: skip
    b_key_mean, b_value_mean, wild = load_references(
        x, initial, final, i_s * x.G + i_g, i_b, i_g, first, length, o_d, o_s, o_e,
        MAP, EVEN, PRECISION, ROUND, SEGMENT, BC, BD,
    )  # fmt: skip
    key_end = stop
    if wild:
        key_end = find_wild(x, i_b, i_g, first, begin, stop, o_e, MAP, EVEN, PRECISION, FEW, BD)
    if ROUND:
        n, b_plain, b_turned, b_value, b_scatter = query_rows(
            x, p_dq, p_sum, p_rows, i_b, i_g, first, begin, exact, stop, key_end, o_d, o_s, o_e,
            n, b_plain, b_turned, b_value, b_scatter, b_first, tl.zeros_like(b_key_mean), tl.zeros_like(b_value_mean),
            MAP, EVEN, GAIN, RELEASED, PRECISION, False, FIRST, LAST, GROUP, FEW, BD,
        )  # fmt: skip
    query_rows(
        x, p_dq, p_sum, p_rows, i_b, i_g, first, exact, stop, stop, key_end, o_d, o_s, o_e,
        n, b_plain, b_turned, b_value, b_scatter, b_first, b_key_mean, b_value_mean,
        MAP, EVEN, GAIN, RELEASED, PRECISION, ROUND, FIRST, LAST, GROUP, BC, BD,
    )  # fmt: skip
