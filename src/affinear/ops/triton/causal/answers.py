"""Answers to the queries of a segment, chunk after chunk, from the past and from the chunk's own keys."""

from __future__ import annotations

import triton
import triton.language as tl

from ..blocks import anew, channels, gain, halves, mean_weight, operand, store_block, times_state
from .past import absorb, close_past, load_keys, open_past
from .places import FEW, count_keys, find_pairs, find_rows, find_segment, length_of, number_of
from .tokens import features_of, load_positions, load_query, row_product, row_sums
from .wild import LARGEST, any_beyond, find_wild


@triton.jit
def answer(
    x, b_f, b_r, b_kf, b_kr, b_v, m_see, n, b_share, b_plain, b_turned, b_value, b_scatter,
    GAIN: tl.constexpr, RELEASED: tl.constexpr, PRECISION: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Answers to the queries of a chunk, from its own keys and values and from the past they are told from."""
    b_zero = tl.zeros(m_see.shape, tl.float32)
    b_q = operand(b_r, ROUND)
    b_past = row_sums(b_f, b_plain, PRECISION, ROUND)
    b_s = tl.where(m_see, row_product(b_q, tl.trans(b_kr), b_zero, PRECISION), 0.0)
    b_mean = tl.sum(b_s, 1) * b_share
    b_own = b_mean
    if x.p_turns is not None:
        b_p = row_product(operand(b_f, ROUND), tl.trans(b_kf), b_zero, PRECISION)
        b_own = tl.sum(tl.where(m_see, b_p, 0.0), 1) * b_share
    b_z = x.scale * (b_past + b_own)
    b_gain, _by_z = gain(b_z, GAIN, RELEASED)
    b_level = tl.where(b_share > 0, 1.0, 0.0)
    if RELEASED:
        b_added = tl.zeros_like(b_z)
        if x.p_turns is not None:
            b_turn = tl.sum(b_r * b_turned[None, :] - b_f * b_plain[None, :], 1)
            b_added = x.scale * (b_turn + (b_mean - b_own))
        b_weight, _by_z, _by_added = mean_weight(b_z, b_added, GAIN)
        b_level *= b_weight
    b_slope = x.scale * b_gain * b_share
    b_s -= b_mean[:, None]
    if not ROUND:
        # Centred scores sum to nothing but for rounding, which all values of a row would share: it is taken out.
        b_left = tl.sum(tl.where(m_see, b_s, 0.0), 1) - n.to(tl.float32) * b_mean
        b_s -= (b_share * b_left)[:, None]
    b_w = (b_level * b_share)[:, None] + b_slope[:, None] * b_s
    b_w = operand(tl.where(m_see, b_w, 0.0), ROUND)
    b_high, b_low = halves(b_scatter, PRECISION)
    b_o = tl.zeros((b_w.shape[0], b_v.shape[1]), tl.float32)
    b_o = times_state(b_q, tl.trans(b_high), tl.trans(b_low), b_o, PRECISION, ROUND)
    b_o = row_product(b_w, b_v, b_o * b_slope[:, None], PRECISION)
    if ROUND:
        b_level -= tl.sum(b_w.to(tl.float32), 1)
    return b_o + b_level[:, None] * b_value[None, :]


@triton.jit
def answer_rows(
    x, p_o, i_b, i_g, first, begin, stop, end, zero, o_d, o_e, n, b_plain, b_turned, b_value, b_scatter, b_first,
    MAP: tl.constexpr, EVEN: tl.constexpr, GAIN: tl.constexpr, RELEASED: tl.constexpr, PRECISION: tl.constexpr,
    ROUND: tl.constexpr, GROUP: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Answer the chunks that begin before `stop`, of a segment up to `end`, and take them into the past."""
    o_n = tl.arange(0, BC)
    for i_n in range(begin, stop, BC):
        i_r = first + i_n
        m_n, m_k, m_n_load, m_k_load = find_rows(x, i_b, i_n, o_n, end, end)
        b_cos, b_sin = load_positions(x, i_r, o_n, m_n_load, o_d)
        number = number_of(x, m_k, end - i_n)
        b_kf, b_kr, b_v, b_df, b_dr, b_dv, b_ref = load_keys(
            x, i_b, i_r, i_g, o_n, m_k_load, m_k, o_e, b_cos, b_sin, n, number, b_plain, b_turned, b_value, b_first,
            MAP, EVEN, PRECISION, ROUND, BD,
        )  # fmt: skip
        m_see = find_pairs(x, o_n, m_k, zero)
        b_share = count_keys(x, n, o_n, m_k)
        for j_h in range(GROUP):
            i_h = i_g * GROUP + j_h
            b_q = load_query(x, i_b, i_r, i_h, o_n, m_n_load, BD)
            b_f, b_r = features_of(x, b_q, b_cos, b_sin, MAP, True, EVEN, PRECISION)
            b_o = answer(
                x, b_f, b_r, b_kf, b_kr, b_v, m_see, n, b_share, b_plain, b_turned, b_ref, b_scatter,
                GAIN, RELEASED, PRECISION, ROUND,
            )  # fmt: skip
            store_block(p_o + ((i_b * length_of(x) + i_r) * x.H + i_h) * x.E, b_o, o_n, m_n, x.H * x.E, o_e, x.E)
        n, b_plain, b_turned, b_value, b_scatter = absorb(
            x, n, number, b_plain, b_turned, b_value, b_scatter, m_k, b_kr, b_v, b_df, b_dr, b_dv, PRECISION, ROUND
        )
    return n, b_plain, b_turned, b_value, b_scatter


@triton.jit
def answer_segment(
    x, past, p_o, i_t, i_g, i_e, end, zero,
    MAP: tl.constexpr, EVEN: tl.constexpr, GAIN: tl.constexpr, RELEASED: tl.constexpr,
    PRECISION: tl.constexpr, ROUND: tl.constexpr, SEVERAL: tl.constexpr, GROUP: tl.constexpr, SEGMENT: tl.constexpr,
    BC: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Answer the queries of one segment that share a key head, one block of the answers, of rows before `end`."""
    i_s, i_b, first, length, begin = find_segment(x, i_t, SEGMENT)
    stop = tl.minimum(begin + SEGMENT, length)
    end = tl.minimum(end, stop)
    o_d, o_s = channels(x.D, BD, BF)
    o_e = i_e * BE + tl.arange(0, BE)
    i = (i_t if SEVERAL else i_s) * x.G + i_g
    n, b_plain, b_turned, b_value, b_scatter, b_first, exact = open_past(
        x, past, i, i_b, i_g, first, begin, stop, o_d, o_s, o_e, past.count is not None,
        MAP, EVEN, PRECISION, ROUND, SEGMENT, BC, BD, BF, BE,
    )  # fmt: skip
    if ROUND:
        n, b_plain, b_turned, b_value, b_scatter = answer_rows(
            x, p_o, i_b, i_g, first, begin, tl.minimum(exact, end), end, zero, o_d, o_e,
            n, b_plain, b_turned, b_value, b_scatter, b_first,
            MAP, EVEN, GAIN, RELEASED, PRECISION, False, GROUP, FEW, BD,
        )  # fmt: skip
    return answer_rows(
        x, p_o, i_b, i_g, first, exact, end, end, zero, o_d, o_e, n, b_plain, b_turned, b_value, b_scatter, b_first,
        MAP, EVEN, GAIN, RELEASED, PRECISION, ROUND, GROUP, BC, BD,
    )  # fmt: skip


@triton.jit
def causal_kernel(
    x, past, final, p_o, MAP: tl.constexpr, EVEN: tl.constexpr, GAIN: tl.constexpr, RELEASED: tl.constexpr,
    PRECISION: tl.constexpr, ROUND: tl.constexpr, SEVERAL: tl.constexpr, GROUP: tl.constexpr, SEGMENT: tl.constexpr,
    BC: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Answer the queries of one segment; the program of the last one writes the state."""
    i_t, i_g, i_e = tl.program_id(0) // x.G, (tl.program_id(0) % x.G).to(tl.int64), tl.program_id(1)
    i_s, i_b, first, length, begin = find_segment(x, i_t, SEGMENT)
    if (begin >= length) & (begin > 0):
        return
    n, b_plain, b_turned, b_value, b_scatter = answer_segment(
        x, past, p_o, i_t, i_g, i_e, length, 0, MAP, EVEN, GAIN, RELEASED, PRECISION, ROUND, SEVERAL, GROUP, SEGMENT,
        BC, BD, BF, BE,
    )  # fmt: skip
    if begin + SEGMENT >= length:
        o_d, o_s = channels(x.D, BD, BF)
        o_e = i_e * BE + tl.arange(0, BE)
        close_past(x, final, i_s * x.G + i_g, n, b_plain, b_turned, b_value, b_scatter, o_d, o_s, o_e, i_e)
    if any_beyond(b_value, LARGEST) | any_beyond(b_scatter, LARGEST):
        # As if by another program: nothing of it is to be kept ready while the loop above has need of registers.
        program, i_e = anew(tl.program_id(0)), anew(tl.program_id(1))
        i_t, i_g = program // x.G, (program % x.G).to(tl.int64)
        _s, i_b, first, length, begin = find_segment(x, i_t, SEGMENT)
        stop = tl.minimum(begin + SEGMENT, length)
        o_e = i_e * BE + tl.arange(0, BE)
        end = find_wild(x, i_b, i_g, first, begin, stop, o_e, MAP, EVEN, PRECISION, FEW, BD)
        if end < stop:
            answer_segment(
                x, past, p_o, i_t, i_g, i_e, end, anew(program * 0), MAP, EVEN, GAIN, RELEASED, PRECISION, ROUND,
                SEVERAL, GROUP, SEGMENT, BC, BD, BF, BE,
            )  # fmt: skip
