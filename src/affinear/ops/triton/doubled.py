"""The backward pass of `attend` for maps that double the width: the two features of a channel as two blocks.

One block twice as wide would be put together, moved and taken apart again for every product, and half of what NaLa's
map leaves in it is zeros. Two blocks share the channel's logarithm, its power and, by its sign, its gradient. Nor does
one program hold both a state of that size and the sums of its gradient: one kernel goes over the queries with the state
and leaves a few numbers of each, another one goes over them with the sums. Both are for bfloat16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attend import load_queries
from .blocks import (
    beside,
    dot,
    gain,
    load_block,
    mean_weight,
    no_sum,
    operand,
    store_block,
    token_product,
    token_sum,
    total,
    turn,
    unpack_turns,
)
from .features import query_pair, query_pair_gradient, query_power
from .moments import LENGTHS, find_sequence, load_moments, segment_rows, store_gradient


@triton.jit
def note(p_notes, o_n, m_n, b_x, place: tl.constexpr, s_note):
    """Leave a number of every query of a block."""
    tl.store(p_notes + place * tl.cast(s_note, tl.int64) + o_n, b_x, mask=m_n)


@triton.jit
def paired_query_block(
    p_q, p_do, p_turns, p_dq, p_notes, i_n, stop, o_n, s_qn, s_qd, s_gn, s_gd, s_dq, s_note, D, E, scale,
    b_plain, b_plain2, b_turned, b_turned2, b_value, b_high, b_high2,
    MAP: tl.constexpr, GAIN: tl.constexpr, RELEASED: tl.constexpr, ROTARY: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Write the gradient of one block of queries, and what the gradient of the state needs of them."""
    m_n = i_n + o_n < stop
    b_q, b_turns = load_queries(p_q, p_turns, i_n, o_n, m_n, tl.arange(0, BD), s_qn, s_qd, D, ROTARY, BD, WHOLE)
    b_q = b_q.to(tl.float32)
    b_do = load_block(p_do + tl.cast(i_n, tl.int64) * s_gn, o_n, m_n, s_gn, tl.arange(0, BE), s_gd, E, WHOLE)
    b_zero = tl.zeros(b_q.shape, tl.float32)
    b_df = dot(b_do, tl.trans(b_high), b_zero, "split")
    b_df2 = dot(b_do, tl.trans(b_high2), b_zero, "split")
    b_q = beside(b_q, b_df)
    b_parts = query_power(b_q, MAP, True)
    if MAP == "nala" and not ROTARY:
        # One feature of a channel is zero, and nobody asks for its gradient: both go as one.
        b_r = tl.abs(b_parts[0]) * b_parts[4]
        b_means = tl.where(b_parts[0] < 0, b_plain2[None, :], b_plain[None, :])
        b_df = tl.where(b_parts[0] < 0, b_df2, b_df)
        b_z = scale * tl.sum(b_r * b_means, 1)
        b_along = tl.sum(b_r * b_df, 1)
    else:
        b_f, b_f2 = query_pair(b_parts, MAP)
        b_z = scale * tl.sum(b_f * b_plain[None, :] + b_f2 * b_plain2[None, :], 1)
        b_r = b_f
        b_r2 = b_f2
        if ROTARY:
            b_cos, b_sin = unpack_turns(b_turns)
            b_r = turn(b_f, b_cos, b_sin)
            b_r2 = turn(b_f2, b_cos, b_sin)
        b_along = tl.sum(b_r * b_df + b_r2 * b_df2, 1)
    b_gain, b_slope = gain(b_z, GAIN, RELEASED)
    b_dz = b_slope * b_along
    b_added = tl.zeros_like(b_z)
    if RELEASED:
        if ROTARY:
            b_added = scale * tl.sum(b_r * b_turned[None, :] + b_r2 * b_turned2[None, :], 1) - b_z
        b_mean = tl.sum(b_do.to(tl.float32) * b_value[None, :], 1)
        b_weight, b_by_z, b_by_added = mean_weight(b_z, b_added, GAIN)
        b_dz += b_by_z * b_mean
        note(p_notes + i_n, o_n, m_n, b_weight, 2, s_note)
        if ROTARY:
            b_dadded = scale * b_by_added * b_mean
            b_dz -= b_by_added * b_mean
            note(p_notes + i_n, o_n, m_n, b_dadded, 3, s_note)
    b_dz *= scale
    note(p_notes + i_n, o_n, m_n, b_gain, 0, s_note)
    note(p_notes + i_n, o_n, m_n, b_dz, 1, s_note)
    if MAP == "nala" and not ROTARY:
        b_df = b_gain[:, None] * b_df + b_dz[:, None] * b_means
        b_df2 = b_df
    else:
        b_df = b_gain[:, None] * b_df
        b_df2 = b_gain[:, None] * b_df2
        if ROTARY:
            if RELEASED:
                b_df += b_dadded[:, None] * b_turned[None, :]
                b_df2 += b_dadded[:, None] * b_turned2[None, :]
            b_df = turn(b_df, b_cos, -b_sin)
            b_df2 = turn(b_df2, b_cos, -b_sin)
        b_df += b_dz[:, None] * b_plain[None, :]
        b_df2 += b_dz[:, None] * b_plain2[None, :]
    b_dq = query_pair_gradient(b_df, b_df2, b_parts, MAP)
    store_block(p_dq + tl.cast(i_n, tl.int64) * s_dq, b_dq, o_n, m_n, s_dq, tl.arange(0, BD), D, WHOLE)


@triton.jit(do_not_specialize=[*LENGTHS, "s_note"])
def paired_query_kernel(
    p_q, p_do, p_bounds, p_turns, p_count, p_plain, p_turned, p_value, p_cov, p_dq, p_notes,
    s_qb, s_qn, s_qh, s_qd, s_gb, s_gn, s_gh, s_gd, length, tokens, rows, s_note, scale, H, G,
    MAP: tl.constexpr, GAIN: tl.constexpr, RELEASED: tl.constexpr, ROTARY: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr, ROUND: tl.constexpr, D: tl.constexpr, E: tl.constexpr, F: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of `rows` queries of one sequence and head; of each, the gain and three more numbers are noted."""
    i_s, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    i_b, first, length = find_sequence(p_bounds, i_s, length, PACKED)
    start = tl.program_id(1) * rows
    if start >= length:
        return
    stop = tl.minimum(start + rows, length)
    i_sg = i_s * G + i_h // (H // G)
    o_d = tl.arange(0, BD)
    o_e = tl.arange(0, BE)
    _n, b_plain, b_turned, b_value, b_cov = load_moments(
        p_count, p_plain, p_turned, p_value, p_cov, i_sg, o_d, o_d < D, o_e, F, E, ROTARY
    )
    b_high = (scale * b_cov).to(tl.bfloat16)
    _n, b_plain2, b_turned2, _value, b_cov = load_moments(
        p_count, p_plain, p_turned, p_value, p_cov, i_sg, D + o_d, o_d < D, o_e, F, E, ROTARY
    )
    b_high2 = (scale * b_cov).to(tl.bfloat16)
    p_q += i_b * s_qb + first * s_qn + tl.cast(i_h, tl.int64) * s_qh
    p_do += i_b * s_gb + first * s_gn + tl.cast(i_h, tl.int64) * s_gh
    p_turns += first * D
    p_dq += ((i_b * tokens + first) * H + i_h) * D
    p_notes += tl.cast(i_h, tl.int64) * (s_note // H) + i_b * tokens + first
    o_n = tl.arange(0, BN)
    whole = stop - (stop - start) % BN
    # The remainder goes first: after it, only shared memory has to hold the covariance.
    if whole < stop:
        paired_query_block(
            p_q, p_do, p_turns, p_dq, p_notes, whole, stop, o_n, s_qn, s_qd, s_gn, s_gd, H * D, s_note, D, E, scale,
            b_plain, b_plain2, b_turned, b_turned2, b_value, b_high, b_high2,
            MAP, GAIN, RELEASED, ROTARY, BD, BE, False,
        )  # fmt: skip
    for i_n in tl.range(start, whole, BN, num_stages=STAGES):
        paired_query_block(
            p_q, p_do, p_turns, p_dq, p_notes, i_n, stop, o_n, s_qn, s_qd, s_gn, s_gd, H * D, s_note, D, E, scale,
            b_plain, b_plain2, b_turned, b_turned2, b_value, b_high, b_high2,
            MAP, GAIN, RELEASED, ROTARY, BD, BE, True,
        )  # fmt: skip


@triton.jit
def paired_state_block(
    p_q, p_do, p_turns, p_notes, i_n, stop, o_n, s_qn, s_qd, s_gn, s_gd, s_note, D, E,
    b_dplain, b_dplain2, b_dturned, b_dturned2, b_dvalue, b_dcov, b_dcov2,
    MAP: tl.constexpr, RELEASED: tl.constexpr, ROTARY: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Add what one block of queries says of the state."""
    m_n = i_n + o_n < stop
    b_q, b_turns = load_queries(p_q, p_turns, i_n, o_n, m_n, tl.arange(0, BD), s_qn, s_qd, D, ROTARY, BD, WHOLE)
    b_do = load_block(p_do + tl.cast(i_n, tl.int64) * s_gn, o_n, m_n, s_gn, tl.arange(0, BE), s_gd, E, WHOLE)
    p_notes += i_n + o_n
    s_note = tl.cast(s_note, tl.int64)
    b_gain = tl.load(p_notes, mask=m_n, other=1.0)
    b_share = tl.load(p_notes + s_note, mask=m_n, other=0.0)
    b_q = b_q.to(tl.float32)
    b_f, b_f2 = query_pair(query_power(b_q, MAP, True), MAP)
    if ROTARY:
        b_cos, b_sin = unpack_turns(b_turns)
        b_x = operand(b_gain[:, None] * turn(b_f, b_cos, b_sin), True)
        b_x2 = operand(b_gain[:, None] * turn(b_f2, b_cos, b_sin), True)
        b_dplain = token_sum(operand(b_share, True), operand(b_f, True), b_dplain, "split")
        b_dplain2 = token_sum(operand(b_share, True), operand(b_f2, True), b_dplain2, "split")
    else:
        b_x = operand(b_gain[:, None] * b_f, True)
        b_x2 = operand(b_gain[:, None] * b_f2, True)
        b_share = operand(b_share / b_gain, True)
        b_dplain = token_sum(b_share, b_x, b_dplain, "split")
        b_dplain2 = token_sum(b_share, b_x2, b_dplain2, "split")
    b_dcov = token_product(b_do, b_x, b_dcov, "split")
    b_dcov2 = token_product(b_do, b_x2, b_dcov2, "split")
    b_weight = tl.full((o_n.shape[0],), 1.0, tl.float32)
    if RELEASED:
        b_weight = tl.load(p_notes + 2 * s_note, mask=m_n, other=0.0)
        if ROTARY:
            b_dadded = operand(tl.load(p_notes + 3 * s_note, mask=m_n, other=0.0) / b_gain, True)
            b_dturned = token_sum(b_dadded, b_x, b_dturned, "split")
            b_dturned2 = token_sum(b_dadded, b_x2, b_dturned2, "split")
    b_dvalue = token_sum(operand(b_weight, True), b_do, b_dvalue, "split")
    return b_dplain, b_dplain2, b_dturned, b_dturned2, b_dvalue, b_dcov, b_dcov2


@triton.jit(do_not_specialize=[*LENGTHS, "s_note"])
def paired_state_kernel(
    p_q, p_do, p_bounds, p_turns, p_notes, p_grad,
    s_qb, s_qn, s_qh, s_qd, s_gb, s_gn, s_gh, s_gd, length, tokens, segments, s_note, scale, H,
    MAP: tl.constexpr, RELEASED: tl.constexpr, ROTARY: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr, ROUND: tl.constexpr, D: tl.constexpr, E: tl.constexpr, F: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradient of the state as far as one segment of queries of one sequence and head sees it."""
    i_sh, i_seg = tl.program_id(0), tl.program_id(1)
    i_s, i_h = i_sh // H, i_sh % H
    i_b, first, length = find_sequence(p_bounds, i_s, length, PACKED)
    rows = segment_rows(length, BN)
    start = i_seg * rows
    stop = tl.minimum(start + rows, length)
    p_q += i_b * s_qb + first * s_qn + tl.cast(i_h, tl.int64) * s_qh
    p_do += i_b * s_gb + first * s_gn + tl.cast(i_h, tl.int64) * s_gh
    p_turns += first * D
    p_notes += tl.cast(i_h, tl.int64) * (s_note // H) + i_b * tokens + first
    o_n = tl.arange(0, BN)
    b_dplain = no_sum(BD)
    b_dplain2 = no_sum(BD)
    b_dturned = no_sum(BD)
    b_dturned2 = no_sum(BD)
    b_dvalue = no_sum(BE)
    b_dcov = tl.zeros((BE, BD), tl.float32)  # of values and keys, turned over at the end
    b_dcov2 = tl.zeros((BE, BD), tl.float32)
    whole = stop - (stop - start) % BN
    for i_n in tl.range(start, whole, BN, num_stages=STAGES):
        b_dplain, b_dplain2, b_dturned, b_dturned2, b_dvalue, b_dcov, b_dcov2 = paired_state_block(
            p_q, p_do, p_turns, p_notes, i_n, stop, o_n, s_qn, s_qd, s_gn, s_gd, s_note, D, E,
            b_dplain, b_dplain2, b_dturned, b_dturned2, b_dvalue, b_dcov, b_dcov2,
            MAP, RELEASED, ROTARY, BD, BE, True,
        )  # fmt: skip
    if whole < stop:
        b_dplain, b_dplain2, b_dturned, b_dturned2, b_dvalue, b_dcov, b_dcov2 = paired_state_block(
            p_q, p_do, p_turns, p_notes, whole, stop, o_n, s_qn, s_qd, s_gn, s_gd, s_note, D, E,
            b_dplain, b_dplain2, b_dturned, b_dturned2, b_dvalue, b_dcov, b_dcov2,
            MAP, RELEASED, ROTARY, BD, BE, False,
        )  # fmt: skip
    o_d = tl.arange(0, BD)
    o_e = tl.arange(0, BE)
    i_row = i_sh * segments + i_seg
    store_gradient(
        p_grad, i_row, total(b_dplain), total(b_dturned), total(b_dvalue), scale * tl.trans(b_dcov),
        o_d, o_d < D, o_e, F, E, True, ROTARY,
    )  # fmt: skip
    store_gradient(
        p_grad, i_row, total(b_dplain2), total(b_dturned2), total(b_dvalue), scale * tl.trans(b_dcov2),
        D + o_d, o_d < D, o_e, F, E, True, ROTARY,
    )  # fmt: skip
