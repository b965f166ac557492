"""Kernels of `attend`: from queries and a state to answers, and from the gradient of the answers back to both."""

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import (
    channels,
    factors,
    gain,
    halves,
    load_block,
    mean_weight,
    no_sum,
    operand,
    store_block,
    times_features,
    times_state,
    token_product,
    token_sum,
    total,
    turn,
    unpack_turns,
)
from .features import feature, feature_gradient
from .moments import LENGTHS, find_sequence, load_merged, load_moments, segment_rows, store_gradient, store_moments


@triton.jit
def load_queries(
    p_q, p_turns, i_n, o_n, m_n, o_d, s_qn, s_qd, D, ROTARY: tl.constexpr, BD: tl.constexpr, WHOLE: tl.constexpr
):
    """A block of queries and one of what turns them; without rotation the queries twice."""
    b_q = load_block(p_q + tl.cast(i_n, tl.int64) * s_qn, o_n, m_n, s_qn, tl.arange(0, BD), s_qd, D, WHOLE)
    b_turns = b_q
    if ROTARY:
        b_turns = load_block(p_turns + tl.cast(i_n, tl.int64) * D, o_n, m_n, D, o_d, 1, D, WHOLE)
    return b_q, b_turns


@triton.jit
def query_block(
    b_q, b_turns, D, b_plain, b_turned, scale,
    MAP: tl.constexpr, ROTARY: tl.constexpr, RELEASED: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Queries of a block, their features plain and turned, by what they were turned, z, and what turning adds to z."""
    b_q = b_q.to(tl.float32)
    b_f = feature(b_q, tl.arange(0, b_q.shape[1]) < D, MAP, True, b_q.shape[1] == D, FAST)
    b_z = scale * tl.sum(b_f * b_plain[None, :], 1)
    b_r = b_f
    b_cos = b_f
    b_sin = b_f
    b_added = tl.zeros_like(b_z)
    if ROTARY:
        b_cos, b_sin = unpack_turns(b_turns)
        b_r = turn(b_f, b_cos, b_sin)
        if RELEASED:
            b_added = scale * tl.sum(b_r * b_turned[None, :] - b_f * b_plain[None, :], 1)
    return b_q, b_f, b_r, b_cos, b_sin, b_z, b_added


@triton.jit
def attend_block(
    b_q, b_turns, p_o, i_n, stop, o_n, o_e, s_on, D, E, scale, b_plain, b_turned, b_value, b_high, b_low, unit,
    MAP: tl.constexpr, GAIN: tl.constexpr, RELEASED: tl.constexpr, ROTARY: tl.constexpr, PRECISION: tl.constexpr,
    ROUND: tl.constexpr, FINE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Answer one block of queries."""
    m_n = i_n + o_n < stop
    _q, _f, b_r, _cos, _sin, b_z, b_added = query_block(
        b_q, b_turns, D, b_plain, b_turned, scale, MAP, ROTARY, RELEASED, PRECISION == "split"
    )
    b_gain, _slope = gain(b_z, GAIN, RELEASED)
    # A power of a direction is no longer than one, and the power of its longest channel no shorter than 2 ** -18.
    bounded: tl.constexpr = MAP == "nala" or MAP == "nala_cosine"
    b_o = times_features(b_r, b_high, b_low, unit, PRECISION, ROUND, FINE, bounded)
    if RELEASED:
        b_weight, _by_z, _by_added = mean_weight(b_z, b_added, GAIN)
        b_o = b_gain[:, None] * b_o + b_weight[:, None] * b_value[None, :]
    else:
        b_o = b_gain[:, None] * b_o + b_value[None, :]
    store_block(p_o + tl.cast(i_n, tl.int64) * s_on, b_o, o_n, m_n, s_on, o_e, E, WHOLE)


@triton.jit
def attend_rows(
    p_q, p_o, p_turns, start, stop, s_qn, s_qd, s_on, D, E, i_e, scale,
    b_plain, b_turned, b_value, b_high, b_low, unit,
    MAP: tl.constexpr, GAIN: tl.constexpr, RELEASED: tl.constexpr, ROTARY: tl.constexpr, PRECISION: tl.constexpr,
    ROUND: tl.constexpr, FINE: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Answer some queries; the covariance comes scaled, as `factors`."""
    o_n = tl.arange(0, BN)
    o_d, _o_s = channels(D, BD, BF)
    o_e = i_e * BE + tl.arange(0, BE)
    whole = stop - (stop - start) % BN
    # The remainder goes first: after it, only shared memory has to hold the covariance.
    if whole < stop:
        b_q, b_turns = load_queries(p_q, p_turns, whole, o_n, whole + o_n < stop, o_d, s_qn, s_qd, D, ROTARY, BD, False)
        attend_block(
            b_q, b_turns, p_o, whole, stop, o_n, o_e, s_on, D, E, scale,
            b_plain, b_turned, b_value, b_high, b_low, unit, MAP, GAIN, RELEASED, ROTARY, PRECISION, ROUND, FINE, False,
        )  # fmt: skip
    # The next block is fetched into registers: from shared memory it would come by conflicting banks.
    b_next, b_next_turns = load_queries(
        p_q, p_turns, start, o_n, start + o_n < stop, o_d, s_qn, s_qd, D, ROTARY, BD, False
    )
    for i_n in tl.range(start, whole, BN, num_stages=1):
        b_q = b_next
        b_turns = b_next_turns
        b_next, b_next_turns = load_queries(
            p_q, p_turns, tl.minimum(i_n + BN, whole - BN), o_n, o_n < BN, o_d, s_qn, s_qd, D, ROTARY, BD, True
        )
        attend_block(
            b_q, b_turns, p_o, i_n, stop, o_n, o_e, s_on, D, E, scale,
            b_plain, b_turned, b_value, b_high, b_low, unit, MAP, GAIN, RELEASED, ROTARY, PRECISION, ROUND, FINE, True,
        )  # fmt: skip


@triton.jit(do_not_specialize=LENGTHS)
def attend_kernel(
    p_q, p_bounds, p_bounds_k, p_turns, p_counts, p_plains, p_turneds, p_values, p_covs,
    p_count, p_plain, p_turned, p_value, p_cov, p_o,
    s_qb, s_qn, s_qh, s_qd, length, length_k, tokens, rows, segments, scale, H, G,
    MAP: tl.constexpr, GAIN: tl.constexpr, RELEASED: tl.constexpr, ROTARY: tl.constexpr, PACKED: tl.constexpr,
    MERGE: tl.constexpr, KEEP: tl.constexpr, SEGMENT_BN: tl.constexpr, PRECISION: tl.constexpr, ROUND: tl.constexpr,
    FINE: tl.constexpr, D: tl.constexpr, E: tl.constexpr, F: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Answer `rows` queries of one sequence and head, one block of the answers; MERGE the state from its segments."""
    i_s, i_h, i_e = tl.program_id(0) // H, tl.program_id(0) % H, tl.program_id(2)
    i_b, first, length = find_sequence(p_bounds, i_s, length, PACKED)
    start = tl.program_id(1) * rows
    keeps = (start == 0) & (i_h % (H // G) == 0)
    if (start >= length) & ((not KEEP) | (not keeps)):
        return
    i_sg = i_s * G + i_h // (H // G)
    o_d, o_s = channels(D, BD, BF)
    o_e = i_e * BE + tl.arange(0, BE)
    if MERGE:
        _b, _first, length_k = find_sequence(p_bounds_k, i_s, length_k, PACKED)
        number = tl.maximum(tl.cdiv(length_k, segment_rows(length_k, SEGMENT_BN)), 1)
        n, b_plain, b_turned, b_value, b_cov = load_merged(
            p_counts, p_plains, p_turneds, p_values, p_covs, i_sg * segments, number, o_s, o_d < D, o_e, F, E,
            BF, BE, ROTARY,
        )  # fmt: skip
        if KEEP:
            store_moments(
                p_count, p_plain, p_turned, p_value, p_cov, i_sg, n, b_plain, b_turned, b_value, b_cov,
                o_s, (o_d < D) & keeps, o_e, F, E, keeps & (i_e == 0), keeps, ROTARY,
            )  # fmt: skip
    else:
        n, b_plain, b_turned, b_value, b_cov = load_moments(
            p_counts, p_plains, p_turneds, p_values, p_covs, i_sg, o_s, o_d < D, o_e, F, E, ROTARY
        )
    b_high, b_low, unit = factors(scale * b_cov, PRECISION, FINE)
    attend_rows(
        p_q + i_b * s_qb + first * s_qn + tl.cast(i_h, tl.int64) * s_qh,
        p_o + ((i_b * tokens + first) * H + i_h) * E, p_turns + first * D, start, tl.minimum(start + rows, length),
        s_qn, s_qd, H * E, D, E, i_e, scale, b_plain, b_turned, b_value, b_high, b_low, unit,
        MAP, GAIN, RELEASED, ROTARY, PRECISION, ROUND, FINE, BN, BD, BF, BE, STAGES,
    )  # fmt: skip


@triton.jit
def mean_and_features_gradient(
    p_do, p_value, p_cov, o_n, m_n, o_d, o_s, s_gn, s_gd, D, E, F, scale, b_do, b_value, b_high, b_low,
    RELEASED: tl.constexpr, PRECISION: tl.constexpr, ROUND: tl.constexpr, BE: tl.constexpr, E_BLOCKS: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """What the gradient of the answers has in common with the mean value, and with the scaled covariance."""
    b_df = tl.zeros((o_n.shape[0], o_d.shape[0]), tl.float32)
    b_mean = tl.zeros((o_n.shape[0],), tl.float32)
    if E_BLOCKS == 1:
        b_df = times_state(b_do, tl.trans(b_high), tl.trans(b_low), b_df, PRECISION, ROUND)
        if RELEASED:
            b_mean = tl.sum(b_do.to(tl.float32) * b_value[None, :], 1)
    else:
        for j_e in tl.static_range(E_BLOCKS):
            o_e = j_e * BE + tl.arange(0, BE)
            m_cov = (o_d < D)[:, None] & (o_e < E)[None, :]
            b_cov = tl.load(p_cov + o_s[:, None] * E + o_e[None, :], mask=m_cov, other=0.0)
            b_other_high, b_other_low = halves(scale * b_cov, PRECISION)
            b_other = load_block(p_do, o_n, m_n, s_gn, o_e, s_gd, E, WHOLE)
            b_df = times_state(b_other, tl.trans(b_other_high), tl.trans(b_other_low), b_df, PRECISION, ROUND)
            if RELEASED:
                b_other_value = tl.load(p_value + o_e, mask=o_e < E, other=0.0)
                b_mean += tl.sum(b_other.to(tl.float32) * b_other_value[None, :], 1)
    return b_mean, b_df


@triton.jit
def attend_backward_block(
    b_q, b_turns, p_do, p_dq, p_value, p_cov, i_n, stop, o_n, o_d, o_s, i_e, s_gn, s_gd, s_dq, D, E, F,
    scale, b_plain, b_turned, b_value, b_high, b_low, b_dplain, b_dturned, b_dvalue, b_dcov,
    MAP: tl.constexpr, GAIN: tl.constexpr, RELEASED: tl.constexpr, ROTARY: tl.constexpr, PRECISION: tl.constexpr,
    ROUND: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, E_BLOCKS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Write the gradient of one block of queries, and add what it says of the state."""
    m_n = i_n + o_n < stop
    b_q, b_f, b_r, b_cos, b_sin, b_z, b_added = query_block(
        b_q, b_turns, D, b_plain, b_turned, scale, MAP, ROTARY, RELEASED, PRECISION == "split"
    )
    p_do += tl.cast(i_n, tl.int64) * s_gn
    b_do = load_block(p_do, o_n, m_n, s_gn, i_e * BE + tl.arange(0, BE), s_gd, E, WHOLE)
    b_mean, b_df = mean_and_features_gradient(
        p_do, p_value, p_cov, o_n, m_n, o_d, o_s, s_gn, s_gd, D, E, F, scale, b_do, b_value, b_high, b_low,
        RELEASED, PRECISION, ROUND, BE, E_BLOCKS, WHOLE,
    )  # fmt: skip
    b_gain, b_slope = gain(b_z, GAIN, RELEASED)
    b_dz = b_slope * tl.sum(b_r * b_df, 1)
    b_df = b_gain[:, None] * b_df
    b_x = operand(b_gain[:, None] * b_r, ROUND)
    b_dcov = token_product(b_do, b_x, b_dcov, PRECISION)
    if RELEASED:
        b_weight, b_by_z, b_by_added = mean_weight(b_z, b_added, GAIN)
        b_dz += b_by_z * b_mean
        b_dvalue = token_sum(operand(b_weight, ROUND), b_do, b_dvalue, PRECISION)
        if ROTARY:
            b_dadded = scale * b_by_added * b_mean
            b_dz -= b_by_added * b_mean
            b_df += b_dadded[:, None] * b_turned[None, :]
            b_dturned = token_sum(operand(b_dadded / b_gain, ROUND), b_x, b_dturned, PRECISION)
    else:
        b_ones = operand(tl.full((o_n.shape[0],), 1.0, tl.float32), ROUND)
        b_dvalue = token_sum(b_ones, b_do, b_dvalue, PRECISION)
    b_dz *= scale
    if ROTARY:
        b_df = turn(b_df, b_cos, -b_sin)
        b_dplain = token_sum(operand(b_dz, ROUND), operand(b_f, ROUND), b_dplain, PRECISION)
    elif GAIN != "one":
        b_dplain = token_sum(operand(b_dz / b_gain, ROUND), b_x, b_dplain, PRECISION)
    b_df += b_dz[:, None] * b_plain[None, :]
    b_dq = feature_gradient(b_q, b_f, b_df, MAP, True, PRECISION == "split")
    p_dq += tl.cast(i_n, tl.int64) * s_dq
    if E_BLOCKS == 1:
        store_block(p_dq, b_dq, o_n, m_n, s_dq, tl.arange(0, BD), D, WHOLE)
    else:
        store_block(p_dq, b_dq, o_n, m_n & (i_e == 0), s_dq, tl.arange(0, BD), D)
    return b_dplain, b_dturned, b_dvalue, b_dcov


@triton.jit
def attend_backward_rows(
    p_q, p_do, p_turns, p_dq, p_value, p_cov, start, stop, s_qn, s_qd, s_gn, s_gd, s_dq, D, E, F, i_e, scale,
    b_plain, b_turned, b_value, b_high, b_low,
    MAP: tl.constexpr, GAIN: tl.constexpr, RELEASED: tl.constexpr, ROTARY: tl.constexpr, PRECISION: tl.constexpr,
    ROUND: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr,
    E_BLOCKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of some queries, written, and what they add to that of the state, returned.

    With the values in several blocks, one program each, every program needs them all for the queries and keeps its own
    for the state; only the first one writes.
    """
    o_n = tl.arange(0, BN)
    o_d, o_s = channels(D, BD, BF)
    b_dplain = no_sum(BF)
    b_dturned = no_sum(BF)
    b_dvalue = no_sum(BE)
    b_dcov = tl.zeros((BE, BF), tl.float32)  # of values and keys, turned over at the end
    whole = stop - (stop - start) % BN
    # The remainder goes first: after it, only shared memory has to hold the covariance.
    if whole < stop:
        b_q, b_turns = load_queries(p_q, p_turns, whole, o_n, whole + o_n < stop, o_d, s_qn, s_qd, D, ROTARY, BD, False)
        b_dplain, b_dturned, b_dvalue, b_dcov = attend_backward_block(
            b_q, b_turns, p_do, p_dq, p_value, p_cov, whole, stop, o_n, o_d, o_s, i_e, s_gn, s_gd, s_dq,
            D, E, F, scale, b_plain, b_turned, b_value, b_high, b_low, b_dplain, b_dturned, b_dvalue, b_dcov,
            MAP, GAIN, RELEASED, ROTARY, PRECISION, ROUND, BD, BE, E_BLOCKS, False,
        )  # fmt: skip
    b_next, _turns = load_queries(p_q, p_turns, start, o_n, start + o_n < stop, o_d, s_qn, s_qd, D, False, BD, False)
    for i_n in tl.range(start, whole, BN, num_stages=STAGES):
        b_q = b_next
        b_turns = b_next
        if ROTARY:
            b_turns = load_block(p_turns + tl.cast(i_n, tl.int64) * D, o_n, o_n < BN, D, o_d, 1, D, True)
        b_next, _turns = load_queries(
            p_q, p_turns, tl.minimum(i_n + BN, whole - BN), o_n, o_n < BN, o_d, s_qn, s_qd, D, False, BD, True
        )
        b_dplain, b_dturned, b_dvalue, b_dcov = attend_backward_block(
            b_q, b_turns, p_do, p_dq, p_value, p_cov, i_n, stop, o_n, o_d, o_s, i_e, s_gn, s_gd, s_dq,
            D, E, F, scale, b_plain, b_turned, b_value, b_high, b_low, b_dplain, b_dturned, b_dvalue, b_dcov,
            MAP, GAIN, RELEASED, ROTARY, PRECISION, ROUND, BD, BE, E_BLOCKS, True,
        )  # fmt: skip
    return total(b_dplain), total(b_dturned), total(b_dvalue), scale * tl.trans(b_dcov)


@triton.jit(do_not_specialize=LENGTHS)
def attend_backward_kernel(
    p_q, p_do, p_bounds, p_turns, p_count, p_plain, p_turned, p_value, p_cov, p_dq, p_grad,
    s_qb, s_qn, s_qh, s_qd, s_gb, s_gn, s_gh, s_gd, length, tokens, segments, scale, H, G,
    MAP: tl.constexpr, GAIN: tl.constexpr, RELEASED: tl.constexpr, ROTARY: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr, ROUND: tl.constexpr, D: tl.constexpr, E: tl.constexpr, F: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, E_BLOCKS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of one segment of queries of one sequence and head, and of the state as far as they see it."""
    i_sh, i_seg, i_e = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_s, i_h = i_sh // H, i_sh % H
    i_b, first, length = find_sequence(p_bounds, i_s, length, PACKED)
    rows = segment_rows(length, BN)
    start = i_seg * rows
    i_sg = i_s * G + i_h // (H // G)
    o_d, o_s = channels(D, BD, BF)
    o_e = i_e * BE + tl.arange(0, BE)
    _n, b_plain, b_turned, b_value, b_cov = load_moments(
        p_count, p_plain, p_turned, p_value, p_cov, i_sg, o_s, o_d < D, o_e, F, E, ROTARY
    )
    b_high, b_low = halves(scale * b_cov, PRECISION)
    i_wide = tl.cast(i_sg, tl.int64)
    b_dplain, b_dturned, b_dvalue, b_dcov = attend_backward_rows(
        p_q + i_b * s_qb + first * s_qn + tl.cast(i_h, tl.int64) * s_qh,
        p_do + i_b * s_gb + first * s_gn + tl.cast(i_h, tl.int64) * s_gh, p_turns + first * D,
        p_dq + ((i_b * tokens + first) * H + i_h) * D, p_value + i_wide * E, p_cov + i_wide * F * E,
        start, tl.minimum(start + rows, length), s_qn, s_qd, s_gn, s_gd, H * D, D, E, F, i_e, scale,
        b_plain, b_turned, b_value, b_high, b_low,
        MAP, GAIN, RELEASED, ROTARY, PRECISION, ROUND, BN, BD, BF, BE, E_BLOCKS, STAGES,
    )  # fmt: skip
    store_gradient(
        p_grad, i_sh * segments + i_seg, b_dplain, b_dturned, b_dvalue, b_dcov,
        o_s, o_d < D, o_e, F, E, i_e == 0, ROTARY,
    )  # fmt: skip
