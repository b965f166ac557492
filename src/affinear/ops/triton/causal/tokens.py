"""Tokens of a chunk: loads, features, and products of whole chunks."""

from __future__ import annotations

import triton
import triton.language as tl

from .. import blocks
from ..blocks import halves, load_block, load_turns, operand, product, turn
from ..features import feature


@triton.jit
def load_positions(x, i_n, o_n, m_n, o_d):
    """Cosines and sines of a block of rows; anything without rotary positions."""
    if x.p_turns is not None:
        b_cos, b_sin = load_turns(x.p_turns + i_n * x.D, o_n, m_n, o_d, x.D)
    else:
        b_cos = m_n
        b_sin = m_n
    return b_cos, b_sin


@triton.jit
def features_of(
    x, b_x, b_cos, b_sin, MAP: tl.constexpr, QUERY: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr
):
    """Features of a float32 block (BC, BD), plain and turned, (BC, BF); an EVEN one has no column without a channel."""
    b_f = feature(b_x, tl.arange(0, b_x.shape[1]) < x.D, MAP, QUERY, EVEN, PRECISION == "split")
    b_r = b_f
    if x.p_turns is not None:
        b_r = turn(b_f, b_cos, b_sin)
    return b_f, b_r


@triton.jit
def load_query(x, i_b, i_n, i_h, o_n, m_n, BD: tl.constexpr):
    """A block of queries."""
    p_q = x.p_q + i_b * x.s_qb + i_n * x.s_qn + i_h * x.s_qh
    return load_block(p_q, o_n, m_n, x.s_qn, tl.arange(0, BD), x.s_qd, x.D).to(tl.float32)


@triton.jit
def load_key(x, i_b, i_n, i_g, o_n, m_n, BD: tl.constexpr):
    """A block of keys."""
    p_k = x.p_k + i_b * x.s_kb + i_n * x.s_kn + i_g * x.s_kh
    return load_block(p_k, o_n, m_n, x.s_kn, tl.arange(0, BD), x.s_kd, x.D).to(tl.float32)


@triton.jit
def load_value(x, i_b, i_n, i_g, o_n, m_n, o_e):
    """A block of values, in their own type."""
    p_v = x.p_v + i_b * x.s_vb + i_n * x.s_vn + i_g * x.s_vh
    return load_block(p_v, o_n, m_n, x.s_vn, o_e, x.s_vd, x.E)


@triton.jit
def centre(b_x, m_n, b_mean):
    """Rows told from a mean, zero where nothing takes part."""
    return tl.where(m_n[:, None], b_x - b_mean[None, :], 0.0)


@triton.jit
def row_product(b_a, b_b, b_acc, PRECISION: tl.constexpr):
    """`b_acc + b_a @ b_b`; bfloat16 blocks are taken as they are."""
    if PRECISION != "split":
        b_acc = blocks.dot(b_a.to(tl.float32), b_b.to(tl.float32), b_acc, PRECISION)
    elif b_a.dtype == tl.bfloat16 and b_b.dtype == tl.bfloat16:
        b_acc = blocks.dot(b_a, b_b, b_acc, PRECISION)
    else:
        b_high, b_low = halves(b_b, PRECISION)
        b_acc = product(b_a, b_high, b_low, b_acc, PRECISION)
    return b_acc


@triton.jit
def row_sums(b_x, b_weight, PRECISION: tl.constexpr, ROUND: tl.constexpr):
    """`b_x @ b_weight` for a block and a vector; by the matrix units where the block is rounded for them anyway."""
    if ROUND:
        b_high, b_low = halves(tl.broadcast_to(b_weight[None, :], (16, b_x.shape[1])), PRECISION)
        b_zero = tl.zeros((b_x.shape[0], 16), tl.float32)
        b_sum = tl.max(product(operand(b_x, True), tl.trans(b_high), tl.trans(b_low), b_zero, PRECISION), 1)
    else:
        b_sum = tl.sum(b_x.to(tl.float32) * b_weight[None, :], 1)
    return b_sum
