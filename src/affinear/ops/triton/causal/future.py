"""All queries after a chunk: the sums over them that its keys and values get, segment by segment and then added."""

from __future__ import annotations

import triton
import triton.language as tl

from ..blocks import channels, halves, no_sum, operand, token_product, token_sum, total
from .places import FEW, find_segment, find_slots, length_of
from .rows import ROWS, TALL, load_gradient, load_means, load_rows, rows_at
from .tokens import features_of, load_positions, load_query
from .wild import LARGEST, any_beyond


@triton.jit
def find_live(
    x, p_rows, i_b, i_g, first, begin, stop,
    GROUP: tl.constexpr, SEGMENT: tl.constexpr, BC: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """End of the rows of a segment that are to be looked at: the last one with a gradient, if any row is wild."""
    o_s = tl.arange(0, SEGMENT)
    wild = begin < 0
    for j_h in range(GROUP):
        p_row = rows_at(x, p_rows, i_b, first + begin, i_g * GROUP + j_h) + o_s
        for i in tl.static_range(1, ROWS - 1):  # a wild slope or lift shows in these three
            wild = wild | any_beyond(tl.load(p_row + i * length_of(x), mask=begin + o_s < stop, other=0.0), LARGEST)
    end = stop
    if wild:
        end = begin
        o_n = tl.arange(0, BC)
        for i_n in range(begin, stop, BC):
            for i in range(GROUP * tl.cdiv(x.E, BE)):
                o_e = i // GROUP * BE + tl.arange(0, BE)
                b_do = load_gradient(x, i_b, first + i_n, i_g * GROUP + i % GROUP, o_n, i_n + o_n < stop, o_e)
                m_live = tl.max((b_do.to(tl.float32) != 0).to(tl.int32), 1) > 0
                end = tl.maximum(end, tl.max(tl.where(m_live, i_n + o_n + 1, begin), 0))
    return end


@triton.jit
def weighted_sum(b_weight, b_x, PRECISION: tl.constexpr, ROUND: tl.constexpr):
    """Sum of a block's rows by their weights; by the matrix units where the block is bfloat16 and tall."""
    if ROUND and b_x.shape[0] >= TALL:
        b_high, b_low = halves(b_weight, PRECISION)
        b_sum = total(token_sum(b_high, b_x, token_sum(b_low, b_x, no_sum(b_x.shape[1]), PRECISION), PRECISION))
    else:
        b_sum = tl.sum(b_weight[:, None] * b_x.to(tl.float32), 0)
    return b_sum


@triton.jit
def foresee(
    x, b_sum, b_turned, b_plain, b_value, b_f, b_r, b_scaled, b_do, b_slope, b_level, b_later, b_lift,
    PRECISION: tl.constexpr, ROUND: tl.constexpr, OF_KEYS: tl.constexpr, OF_VALUES: tl.constexpr,
):  # fmt: skip
    """Add the queries of a chunk to what earlier keys will get: sum (BE, BF), and what does not depend on them.

    Turned features times their slopes come as `b_scaled`, too.
    """
    b_sum = token_product(b_do, b_scaled, b_sum, PRECISION)
    if OF_KEYS:
        if b_scaled.shape[0] < TALL:
            # What values have in common cancels between this and the sum above: one rounding is in both.
            b_turned += tl.sum(b_later[:, None] * b_scaled.to(tl.float32), 0)
        else:
            b_turned += tl.sum((b_slope * b_later)[:, None] * b_r, 0)
        if x.p_turns is not None:
            b_plain += tl.sum(b_lift[:, None] * b_f, 0)
    if OF_VALUES:
        b_value += weighted_sum(b_level, b_do, PRECISION, ROUND)
    return b_sum, b_turned, b_plain, b_value


@triton.jit
def sums_at(x, p_sums, i, o_d, o_s, o_e):
    """Pointers to the parts of row `i` of such sums, and which of them are there."""
    p_sum = p_sums + tl.cast(i, tl.int64) * (x.E * x.F + 2 * x.F + x.E)
    p_turned = p_sum + x.E * x.F + o_s
    m_sum = (o_e < x.E)[:, None] & (o_d < x.D)[None, :]
    return p_sum + o_e[:, None] * x.F + o_s[None, :], p_turned, p_turned + x.F, p_sum + (x.E + 2) * x.F + o_e, m_sum


@triton.jit
def sum_queries_kernel(
    x, p_rows, p_sums,
    MAP: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, ROUND: tl.constexpr,
    GROUP: tl.constexpr, SEGMENT: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """What the queries of every segment have for earlier keys, but for the first of each sequence, which has none."""
    i_t, i_g, i_e = tl.program_id(0) // x.G, (tl.program_id(0) % x.G).to(tl.int64), tl.program_id(1)
    _s, i_b, first, length, begin = find_segment(x, i_t, SEGMENT)
    if (begin >= length) | (begin == 0):
        return
    o_n = tl.arange(0, BC)
    o_d, o_s = channels(x.D, BD, BF)
    o_e = i_e * BE + tl.arange(0, BE)
    b_sum = tl.zeros((BE, BF), tl.float32)
    b_turned = tl.zeros((BF,), tl.float32)
    b_plain = tl.zeros((BF,), tl.float32)
    b_value = tl.zeros((BE,), tl.float32)
    stop = tl.minimum(begin + SEGMENT, length)
    live = find_live(x, p_rows, i_b, i_g, first, begin, stop, GROUP, SEGMENT, FEW, BE)
    for i_n in range(begin, live, BC):
        i_r = first + i_n
        m_n = i_n + o_n < live
        b_cos, b_sin = load_positions(x, i_r, o_n, m_n, o_d)
        for j_h in range(GROUP):
            i_h = i_g * GROUP + j_h
            b_q = load_query(x, i_b, i_r, i_h, o_n, m_n, BD)
            b_do = load_gradient(x, i_b, i_r, i_h, o_n, m_n, o_e)
            b_f, b_r = features_of(x, b_q, b_cos, b_sin, MAP, True, EVEN, PRECISION)
            p_row = rows_at(x, p_rows, i_b, i_r, i_h)
            b_slope, b_level, _pull, b_later, b_lift = load_rows(x, p_row, o_n, m_n, True)
            b_sum, b_turned, b_plain, b_value = foresee(
                x, b_sum, b_turned, b_plain, b_value, b_f, b_r, operand(b_slope[:, None] * b_r, ROUND), b_do,
                b_slope, b_level, b_later, b_lift, PRECISION, ROUND, True, True,
            )  # fmt: skip
    p_sum, p_turned, p_plain, p_value, m_sum = sums_at(x, p_sums, i_t * x.G + i_g, o_d, o_s, o_e)
    tl.store(p_sum, b_sum, mask=m_sum)
    tl.store(p_turned, b_turned, mask=(o_d < x.D) & (i_e == 0))
    tl.store(p_plain, b_plain, mask=(o_d < x.D) & (i_e == 0))
    tl.store(p_value, b_value, mask=o_e < x.E)


@triton.jit
def add_segments_kernel(x, p_sums, SEGMENT: tl.constexpr, BW: tl.constexpr):
    """Sums over all later segments in place of those of each segment, of one sequence and head."""
    i_sg, i_w = tl.program_id(0), tl.program_id(1)
    slot, number = find_slots(x, i_sg // x.G, SEGMENT)
    width = x.E * x.F + 2 * x.F + x.E
    o_w = i_w * BW + tl.arange(0, BW)
    m_w = o_w < width
    b_sum = tl.zeros((BW,), tl.float32)
    for i in range(number):
        i_seg = number - 1 - i
        p_own = p_sums + ((slot + i_seg) * x.G + i_sg % x.G) * width + o_w
        b_own = tl.load(p_own, mask=m_w & (i_seg > 0), other=0.0)
        tl.store(p_own, b_sum, mask=m_w)
        b_sum += b_own


@triton.jit
def open_future(
    x, p_sums, dfinal, final, i_t, i_s, i_g, o_d, o_s, o_e, b_key_mean, b_value_mean,
    SEVERAL: tl.constexpr, FIRST: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """What the keys of a segment get from later segments and from the state in the end."""
    b_sum = tl.zeros((BE, BF), tl.float32)
    b_turned = tl.zeros((BF,), tl.float32)
    b_plain = tl.zeros((BF,), tl.float32)
    b_value = tl.zeros((BE,), tl.float32)
    m_f, m_e = o_d < x.D, o_e < x.E
    if SEVERAL:
        p_sum, p_turned, p_plain, p_value, m_sum = sums_at(x, p_sums, i_t * x.G + i_g, o_d, o_s, o_e)
        b_sum = tl.load(p_sum, mask=m_sum, other=0.0)
        b_value = tl.load(p_value, mask=m_e, other=0.0)
        if FIRST:
            b_turned = tl.load(p_turned, mask=m_f, other=0.0)
            b_plain = tl.load(p_plain, mask=m_f, other=0.0)
    if dfinal.covariance is not None:
        i = tl.cast(i_s * x.G + i_g, tl.int64)
        n = tl.load(final.count + i)
        share = tl.where(n > 0, 1 / tl.maximum(n, 1).to(tl.float32), 0.0)
        b_key, b_mean = load_means(x, final, i, o_d, o_s, o_e)
        p_cov = dfinal.covariance + i * x.F * x.E + o_s[None, :] * x.E + o_e[:, None]
        b_dcov = share * tl.load(p_cov, mask=m_e[:, None] & m_f[None, :], other=0.0)
        b_sum += b_dcov
        # A state that nobody asked for may be wild.
        b_turned -= tl.sum(tl.where(b_dcov != 0, b_dcov * (b_mean - b_value_mean)[:, None], 0.0), 0)
        b_value -= tl.sum(tl.where(b_dcov != 0, b_dcov * (b_key - b_key_mean)[None, :], 0.0), 1)
        b_value += share * tl.load(dfinal.value_mean + i * x.E + o_e, mask=m_e, other=0.0)
        if FIRST:
            b_mean = share * tl.load(dfinal.key_mean + i * x.F + o_s, mask=m_f, other=0.0)
            if x.p_turns is not None:
                b_plain += b_mean
                b_mean = share * tl.load(dfinal.rotated_key_mean + i * x.F + o_s, mask=m_f, other=0.0)
            b_turned += b_mean
    return b_sum, b_turned, b_plain, b_value
