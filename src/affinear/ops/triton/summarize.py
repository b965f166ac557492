"""Kernels of `summarize`: from keys and values to their state, and from the gradient of the state back to theirs."""

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import (
    channels,
    factors,
    load_block,
    load_turns,
    no_sum,
    operand,
    pin,
    store_block,
    times_features,
    times_state,
    token_product,
    token_sum,
    total,
    turn,
)
from .features import feature, feature_gradient
from .moments import LENGTHS, find_sequence, load_gradient, segment_rows, store_moments


@triton.jit
def visible_rows(p_mask, i_n, o_n, stop, s_m, MASKED: tl.constexpr):
    """Which rows of a block hold a key that takes part."""
    m_n = i_n + o_n < stop
    if MASKED:
        m_n = m_n & (tl.load(p_mask + tl.cast(i_n, tl.int64) * s_m + o_n * s_m, mask=m_n, other=0) != 0)
    return m_n


@triton.jit
def key_block(
    p_k, p_turns, i_n, o_n, m_n, s_kn, o_d, s_kd, D,
    MAP: tl.constexpr, ROTARY: tl.constexpr, FAST: tl.constexpr, PIN: tl.constexpr, BD: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Keys of a block, zero where none takes part, their features, the features turned, and by what."""
    o_c = tl.arange(0, BD)
    b_k = load_block(p_k + tl.cast(i_n, tl.int64) * s_kn, o_n, m_n, s_kn, o_c, s_kd, D, WHOLE).to(tl.float32)
    b_f = feature(b_k, o_c < D, MAP, False, BD == D, FAST)
    if PIN:
        b_f = pin(b_f)
    b_r = b_f
    b_cos = b_f
    b_sin = b_f
    if ROTARY:
        b_cos, b_sin = load_turns(p_turns + tl.cast(i_n, tl.int64) * D, o_n, m_n, o_d, D, WHOLE)
        b_r = turn(b_f, b_cos, b_sin)
    return b_k, b_f, b_r, b_cos, b_sin


@triton.jit
def summarize_block(
    p_k, p_v, p_mask, p_turns, i_n, start, stop, o_n, o_d, o_e, s_kn, s_kd, s_vn, s_vd, s_m, D, E,
    b_ref, b_value_ref, n, b_plain, b_keys, b_values, b_cov,
    MAP: tl.constexpr, ROTARY: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr, ROUND: tl.constexpr,
    PIN: tl.constexpr, BD: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Add one block to the sums of features plain and turned, of values, and of their products."""
    m_n = visible_rows(p_mask, i_n, o_n, stop, s_m, MASKED)
    _k, b_f, b_r, _cos, _sin = key_block(
        p_k, p_turns, i_n, o_n, m_n, s_kn, o_d, s_kd, D, MAP, ROTARY, PRECISION == "split", PIN, BD, WHOLE
    )
    b_v = load_block(p_v + tl.cast(i_n, tl.int64) * s_vn, o_n, m_n, s_vn, o_e, s_vd, E, WHOLE)
    if not WHOLE:
        b_f = tl.where(m_n[:, None], b_f, 0.0)
        b_r = tl.where(m_n[:, None], b_r, 0.0)
    # Told from the mean of the first block, what is rounded and summed is small. No answer depends on it.
    if i_n == start:
        share = 1 / tl.maximum(tl.sum(m_n.to(tl.float32), 0), 1.0)
        b_ref = tl.sum(b_r, 0) * share
        if PRECISION != "split":
            b_value_ref = tl.sum(b_v, 0) * share
    if PRECISION != "split":
        # Half-precision values are exact factors as they are; of wider ones, what they have in common would round.
        b_v = b_v - b_value_ref[None, :]
        if not WHOLE:
            b_v = tl.where(m_n[:, None], b_v, 0.0)
    b_c = b_r - b_ref[None, :]
    if not WHOLE:
        b_c = tl.where(m_n[:, None], b_c, 0.0)
    b_c = operand(b_c, ROUND)
    b_ones = operand(tl.full((b_r.shape[0],), 1.0, tl.float32), ROUND)
    b_cov = token_product(b_v, b_c, b_cov, PRECISION)
    b_keys = token_sum(b_ones, b_c, b_keys, PRECISION)
    b_values = token_sum(b_ones, b_v, b_values, PRECISION)
    if ROTARY:
        b_plain = token_sum(b_ones, operand(b_f, ROUND), b_plain, PRECISION)
    if MASKED:
        n += tl.sum(m_n.to(tl.float32), 0)
    return b_ref, b_value_ref, n, b_plain, b_keys, b_values, b_cov


@triton.jit
def summarize_rows(
    p_k, p_v, p_mask, p_turns, start, stop, s_kn, s_kd, s_vn, s_vd, s_m, D, E, i_e,
    MAP: tl.constexpr, ROTARY: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr, ROUND: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, PIN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Count, mean feature plain and turned, mean value and covariance of some rows."""
    o_n = tl.arange(0, BN)
    o_d, _o_s = channels(D, BD, BF)
    o_e = i_e * BE + tl.arange(0, BE)
    b_ref = tl.zeros((BF,), tl.float32)
    b_value_ref = tl.zeros((BE,), tl.float32)
    n = (stop - start).to(tl.float32)
    if MASKED:
        n *= 0
    b_plain = no_sum(BF)
    b_keys = no_sum(BF)
    b_values = no_sum(BE)
    b_cov = tl.zeros((BE, BF), tl.float32)  # of values and keys, turned over at the end
    whole = stop - (stop - start) % BN
    for i_n in tl.range(start, whole, BN, num_stages=STAGES):
        b_ref, b_value_ref, n, b_plain, b_keys, b_values, b_cov = summarize_block(
            p_k, p_v, p_mask, p_turns, i_n, start, stop, o_n, o_d, o_e, s_kn, s_kd, s_vn, s_vd, s_m, D, E,
            b_ref, b_value_ref, n, b_plain, b_keys, b_values, b_cov,
            MAP, ROTARY, MASKED, PRECISION, ROUND, PIN, BD, not MASKED,
        )  # fmt: skip
    if whole < stop:
        b_ref, b_value_ref, n, b_plain, b_keys, b_values, b_cov = summarize_block(
            p_k, p_v, p_mask, p_turns, whole, start, stop, o_n, o_d, o_e, s_kn, s_kd, s_vn, s_vd, s_m, D, E,
            b_ref, b_value_ref, n, b_plain, b_keys, b_values, b_cov,
            MAP, ROTARY, MASKED, PRECISION, ROUND, PIN, BD, False,
        )  # fmt: skip
    share = 1 / tl.maximum(n, 1.0)
    b_key = total(b_keys) * share
    b_value = total(b_values) * share
    # The mean of the rounded keys, not of the keys: a common part of the values then drops out exactly.
    b_covariance = tl.trans(b_cov * share) - b_key[:, None] * b_value[None, :]
    b_value += b_value_ref
    b_turned = tl.where(n > 0, b_key + b_ref, 0.0)
    b_plain_mean = b_turned
    if ROTARY:
        b_plain_mean = total(b_plain) * share
    return n, b_plain_mean, b_turned, b_value, b_covariance


@triton.jit(do_not_specialize=LENGTHS)
def summarize_kernel(
    p_k, p_v, p_mask, p_bounds, p_turns, p_count, p_plain, p_turned, p_value, p_cov,
    s_kb, s_kn, s_kh, s_kd, s_vb, s_vn, s_vh, s_vd, s_mb, s_mn, length, G, segments,
    MAP: tl.constexpr, ROTARY: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
    ROUND: tl.constexpr, D: tl.constexpr, E: tl.constexpr, F: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, PIN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The state of one segment of one sequence and head, and one block of its values."""
    i_sg, i_seg, i_e = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_b, first, length = find_sequence(p_bounds, i_sg // G, length, PACKED)
    i_g = (i_sg % G).to(tl.int64)
    rows = segment_rows(length, BN)
    start = i_seg * rows
    if i_seg > 0 and start >= length:
        return
    n, b_plain, b_turned, b_value, b_cov = summarize_rows(
        p_k + i_b * s_kb + first * s_kn + i_g * s_kh, p_v + i_b * s_vb + first * s_vn + i_g * s_vh,
        p_mask + i_b * s_mb, p_turns + first * D, start, tl.minimum(start + rows, length),
        s_kn, s_kd, s_vn, s_vd, s_mn, D, E, i_e, MAP, ROTARY, MASKED, PRECISION, ROUND, BN, BD, BF, BE, PIN,
        STAGES,
    )  # fmt: skip
    o_d, o_s = channels(D, BD, BF)
    store_moments(
        p_count, p_plain, p_turned, p_value, p_cov, i_sg * segments + i_seg, n, b_plain, b_turned, b_value, b_cov,
        o_s, o_d < D, i_e * BE + tl.arange(0, BE), F, E, i_e == 0, True, ROTARY,
    )  # fmt: skip


@triton.jit
def summarize_backward_block(
    p_k, p_v, p_mask, p_turns, p_value, p_dk, p_dv, p_grad, i_sg, i_n, stop, o_n, o_d, o_s,
    s_kn, s_kd, s_vn, s_vd, s_m, s_dk, s_dv, D, E, F,
    share, b_centre, b_dplain, b_dturned, b_dvalue, b_high, b_low, unit,
    MAP: tl.constexpr, ROTARY: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr, ROUND: tl.constexpr,
    FINE: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, E_BLOCKS: tl.constexpr, PIN: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Gradients of one block of keys and values."""
    m_n = visible_rows(p_mask, i_n, o_n, stop, s_m, MASKED)
    b_k, b_f, b_r, b_cos, b_sin = key_block(
        p_k, p_turns, i_n, o_n, m_n, s_kn, o_d, s_kd, D, MAP, ROTARY, PRECISION == "split", PIN, BD, WHOLE
    )
    b_df = tl.zeros(b_r.shape, tl.float32)
    for i_e in tl.static_range(E_BLOCKS):
        o_e = i_e * BE + tl.arange(0, BE)
        b_v = load_block(p_v + tl.cast(i_n, tl.int64) * s_vn, o_n, m_n, s_vn, o_e, s_vd, E, WHOLE)
        if E_BLOCKS > 1:
            _dplain, _dturned, b_dvalue, b_dcov = load_gradient(p_grad, i_sg, o_s, o_d < D, o_e, F, E, ROTARY)
            b_dvalue *= share
            b_high, b_low, unit = factors(b_dcov * share, PRECISION, FINE)
        if PRECISION != "split":
            b_v = b_v - tl.load(p_value + o_e, mask=o_e < E, other=0.0)[None, :]
        b_df = times_state(b_v, tl.trans(b_high), tl.trans(b_low), b_df, PRECISION, ROUND)
        b_dv = times_features(b_r - b_centre[None, :], b_high, b_low, unit, PRECISION, ROUND, FINE) + b_dvalue[None, :]
        if MASKED:
            b_dv = tl.where(m_n[:, None], b_dv, 0.0)
        store_block(p_dv + tl.cast(i_n, tl.int64) * s_dv, b_dv, o_n, i_n + o_n < stop, s_dv, o_e, E, WHOLE)
    b_df += b_dturned[None, :]
    if ROTARY:
        b_df = turn(b_df, b_cos, -b_sin) + b_dplain[None, :]
    b_dk = feature_gradient(b_k, b_f, b_df, MAP, False, PRECISION == "split")
    if MASKED:
        b_dk = tl.where(m_n[:, None], b_dk, 0.0)
    p_dk += tl.cast(i_n, tl.int64) * s_dk
    store_block(p_dk, b_dk, o_n, i_n + o_n < stop, s_dk, tl.arange(0, BD), D, WHOLE)


@triton.jit
def summarize_backward_rows(
    p_k, p_v, p_mask, p_turns, p_value, p_dk, p_dv, p_grad, i_sg, start, stop,
    s_kn, s_kd, s_vn, s_vd, s_m, s_dk, s_dv, D, E, F,
    share, b_centre, b_dplain, b_dturned, b_dvalue, b_high, b_low, unit,
    MAP: tl.constexpr, ROTARY: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr, ROUND: tl.constexpr,
    FINE: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, E_BLOCKS: tl.constexpr,
    PIN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of some keys and values from those of their state, which come divided by the count.

    Moving one token moves the means by one n-th, and the covariance as if the means stood still.
    """
    o_n = tl.arange(0, BN)
    o_d, o_s = channels(D, BD, BF)
    whole = stop - (stop - start) % BN
    # The remainder goes first: after it, only shared memory has to hold the covariance.
    if whole < stop:
        summarize_backward_block(
            p_k, p_v, p_mask, p_turns, p_value, p_dk, p_dv, p_grad, i_sg, whole, stop, o_n, o_d, o_s,
            s_kn, s_kd, s_vn, s_vd, s_m, s_dk, s_dv, D, E, F, share, b_centre, b_dplain, b_dturned, b_dvalue,
            b_high, b_low, unit, MAP, ROTARY, MASKED, PRECISION, ROUND, FINE, BD, BE, E_BLOCKS, PIN, False,
        )  # fmt: skip
    for i_n in tl.range(start, whole, BN, num_stages=STAGES):
        summarize_backward_block(
            p_k, p_v, p_mask, p_turns, p_value, p_dk, p_dv, p_grad, i_sg, i_n, stop, o_n, o_d, o_s,
            s_kn, s_kd, s_vn, s_vd, s_m, s_dk, s_dv, D, E, F, share, b_centre, b_dplain, b_dturned, b_dvalue,
            b_high, b_low, unit, MAP, ROTARY, MASKED, PRECISION, ROUND, FINE, BD, BE, E_BLOCKS, PIN, not MASKED,
        )  # fmt: skip


@triton.jit
def key_gradients(
    p_count, p_plain, p_turned, p_value, p_grad, i_sg, D, E, F, ROTARY: tl.constexpr, PRECISION: tl.constexpr,
    ROUND: tl.constexpr, FINE: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr,
    E_BLOCKS: tl.constexpr,
):  # fmt: skip
    """What `summarize_backward_rows` needs of one state and its gradient.

    Half-precision values keep their mean as factors; what it adds to the gradient of the keys is taken away here.
    """
    o_d, o_s = channels(D, BD, BF)
    m_f = o_d < D
    share = 1 / tl.maximum(tl.load(p_count + i_sg).to(tl.float32), 1.0)
    b_centre = tl.load((p_turned if ROTARY else p_plain) + tl.cast(i_sg, tl.int64) * F + o_s, mask=m_f, other=0.0)
    b_shift = tl.zeros((BF,), tl.float32)
    for i_e in tl.static_range(E_BLOCKS):
        o_e = i_e * BE + tl.arange(0, BE)
        b_mean = tl.load(p_value + tl.cast(i_sg, tl.int64) * E + o_e, mask=o_e < E, other=0.0)
        b_dplain, b_dturned, b_dvalue, b_dcov = load_gradient(p_grad, i_sg, o_s, m_f, o_e, F, E, ROTARY)
        b_high, b_low, unit = factors(b_dcov * share, PRECISION, FINE)
        if PRECISION == "split":
            # As it is rounded, so that a common part of the values drops out exactly, however large.
            b_seen = b_high.to(tl.float32) if ROUND else b_dcov * share
            b_shift += tl.sum(b_seen * b_mean[None, :], 1)
    if not ROTARY:  # then there is but one gradient of mean features, and the other is not looked at
        b_dturned = b_dplain
    return share, b_centre, b_dplain * share, b_dturned * share - b_shift, b_dvalue * share, b_high, b_low, unit


@triton.jit(do_not_specialize=LENGTHS)
def summarize_backward_kernel(
    p_k, p_v, p_mask, p_bounds, p_turns, p_count, p_plain, p_turned, p_value, p_grad, p_dk, p_dv,
    s_kb, s_kn, s_kh, s_kd, s_vb, s_vn, s_vh, s_vd, s_mb, s_mn, length, tokens, rows, G,
    MAP: tl.constexpr, ROTARY: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
    ROUND: tl.constexpr, FINE: tl.constexpr, D: tl.constexpr, E: tl.constexpr, F: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, E_BLOCKS: tl.constexpr,
    PIN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of `rows` keys and values of one sequence and head."""
    i_sg = tl.program_id(0)
    i_b, first, length = find_sequence(p_bounds, i_sg // G, length, PACKED)
    i_g = (i_sg % G).to(tl.int64)
    start = tl.program_id(1) * rows
    if start >= length:
        return
    share, b_centre, b_dplain, b_dturned, b_dvalue, b_high, b_low, unit = key_gradients(
        p_count, p_plain, p_turned, p_value, p_grad, i_sg, D, E, F, ROTARY, PRECISION, ROUND, FINE, BD, BF, BE,
        E_BLOCKS,
    )  # fmt: skip
    summarize_backward_rows(
        p_k + i_b * s_kb + first * s_kn + i_g * s_kh, p_v + i_b * s_vb + first * s_vn + i_g * s_vh,
        p_mask + i_b * s_mb, p_turns + first * D, p_value + tl.cast(i_sg, tl.int64) * E,
        p_dk + ((i_b * tokens + first) * G + i_g) * D, p_dv + ((i_b * tokens + first) * G + i_g) * E, p_grad, i_sg,
        start, tl.minimum(start + rows, length), s_kn, s_kd, s_vn, s_vd, s_mn, G * D, G * E, D, E, F,
        share, b_centre, b_dplain, b_dturned, b_dvalue, b_high, b_low, unit,
        MAP, ROTARY, MASKED, PRECISION, ROUND, FINE, BN, BD, BF, BE, E_BLOCKS, PIN, STAGES,
    )  # fmt: skip
