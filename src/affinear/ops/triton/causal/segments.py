"""Segments summed up on their own, then merged from first to last: the state before each of them."""

from __future__ import annotations

import triton
import triton.language as tl

from ..blocks import channels
from ..moments import load_moments, merge_moments, store_moments
from .past import absorb, close_past, load_keys, open_past
from .places import FEW, find_rows, find_segment, find_slots, number_of
from .tokens import load_positions


@triton.jit
def take_rows(
    x, i_b, i_g, first, begin, stop, end, o_d, o_e, n, b_plain, b_turned, b_value, b_scatter, b_first,
    MAP: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, ROUND: tl.constexpr,
    BC: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Take the chunks that begin before `stop` into the past, of a segment up to `end`."""
    o_n = tl.arange(0, BC)
    for i_n in range(begin, stop, BC):
        i_r = first + i_n
        _n, m_k, m_n_load, m_k_load = find_rows(x, i_b, i_n, o_n, end, end)
        b_cos, b_sin = load_positions(x, i_r, o_n, m_n_load, o_d)
        number = number_of(x, m_k, end - i_n)
        _f, b_r, b_v, b_df, b_dr, b_dv, _ref = load_keys(
            x, i_b, i_r, i_g, o_n, m_k_load, m_k, o_e, b_cos, b_sin, n, number, b_plain, b_turned, b_value, b_first,
            MAP, EVEN, PRECISION, ROUND, BD,
        )  # fmt: skip
        n, b_plain, b_turned, b_value, b_scatter = absorb(
            x, n, number, b_plain, b_turned, b_value, b_scatter, m_k, b_r, b_v, b_df, b_dr, b_dv, PRECISION, ROUND
        )
    return n, b_plain, b_turned, b_value, b_scatter


@triton.jit
def sum_segments_kernel(
    x, parts, MAP: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, ROUND: tl.constexpr,
    SEGMENT: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Moments of every segment by itself, but for the last of each sequence, which nobody follows."""
    i_t, i_g, i_e = tl.program_id(0) // x.G, (tl.program_id(0) % x.G).to(tl.int64), tl.program_id(1)
    _s, i_b, first, length, begin = find_segment(x, i_t, SEGMENT)
    if begin + SEGMENT >= length:
        return
    stop = begin + SEGMENT
    o_d, o_s = channels(x.D, BD, BF)
    o_e = i_e * BE + tl.arange(0, BE)
    n, b_plain, b_turned, b_value, b_scatter, b_first, exact = open_past(
        x, parts, 0, i_b, i_g, first, begin, stop, o_d, o_s, o_e, False,
        MAP, EVEN, PRECISION, ROUND, SEGMENT, BC, BD, BF, BE,
    )  # fmt: skip
    if ROUND:
        n, b_plain, b_turned, b_value, b_scatter = take_rows(
            x, i_b, i_g, first, begin, exact, stop, o_d, o_e, n, b_plain, b_turned, b_value, b_scatter, b_first,
            MAP, EVEN, PRECISION, False, FEW, BD,
        )  # fmt: skip
    n, b_plain, b_turned, b_value, b_scatter = take_rows(
        x, i_b, i_g, first, exact, stop, stop, o_d, o_e, n, b_plain, b_turned, b_value, b_scatter, b_first,
        MAP, EVEN, PRECISION, ROUND, BC, BD,
    )  # fmt: skip
    close_past(x, parts, i_t * x.G + i_g, n, b_plain, b_turned, b_value, b_scatter, o_d, o_s, o_e, i_e)


@triton.jit
def merge_segments_kernel(
    x, parts, initial, past, SEGMENT: tl.constexpr, BR: tl.constexpr, BE: tl.constexpr
):  # fmt: skip
    """The state before every segment of one sequence and head, a block of the covariance each program."""
    ROTARY: tl.constexpr = x.p_turns is not None
    i_sg, i_r, i_e = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot, number = find_slots(x, i_sg // x.G, SEGMENT)
    o_s = i_r * BR + tl.arange(0, BR)
    o_e = i_e * BE + tl.arange(0, BE)
    count = slot * 0
    b_plain = tl.zeros((BR,), tl.float32)
    b_turned = tl.zeros((BR,), tl.float32)
    b_value = tl.zeros((BE,), tl.float32)
    b_cov = tl.zeros((BR, BE), tl.float32)
    if initial.count is not None:
        count = tl.load(initial.count + i_sg)
        _n, b_plain, b_turned, b_value, b_cov = load_moments(
            initial.count, initial.key_mean, initial.rotated_key_mean, initial.value_mean, initial.covariance,
            i_sg, o_s, o_s < x.F, o_e, x.F, x.E, ROTARY,
        )  # fmt: skip
    i = slot * x.G + i_sg % x.G
    for _ in range(1, number):
        n, b_plain2, b_turned2, b_value2, b_cov2 = load_moments(
            parts.count, parts.key_mean, parts.rotated_key_mean, parts.value_mean, parts.covariance,
            i, o_s, o_s < x.F, o_e, x.F, x.E, ROTARY,
        )  # fmt: skip
        tl.debug_barrier()  # the covariance before a segment is written over that of the segment
        store_moments(
            past.count, past.key_mean, past.rotated_key_mean, past.value_mean, past.covariance,
            i, count, b_plain, b_turned, b_value, b_cov, o_s, o_s < x.F, o_e, x.F, x.E, i_e == 0, i_r == 0, ROTARY,
        )  # fmt: skip
        _n, b_plain, b_turned, b_value, b_cov = merge_moments(
            count.to(tl.float32), b_plain, b_turned, b_value, b_cov, n, b_plain2, b_turned2, b_value2, b_cov2
        )
        count += n.to(tl.int64)
        i += x.G
    # Of the last segment there are no moments: nobody follows it.
    store_moments(
        past.count, past.key_mean, past.rotated_key_mean, past.value_mean, past.covariance,
        i, count, b_plain, b_turned, b_value, b_cov, o_s, o_s < x.F, o_e, x.F, x.E, i_e == 0, i_r == 0, ROTARY,
    )  # fmt: skip
