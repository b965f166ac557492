"""Causal attention: a scan over chunks of tokens, in segments that run side by side.

A program walks through one segment of one key head. It carries the moments of all keys before its chunk, answers the
chunk's queries from them and from explicit weights of the chunk's own keys, and takes the chunk in. Where a sequence
has several segments, they are first summed up on their own, and merged from first to last: the bits of a sequence do
not depend on what else is in the batch.

Keys and values are told from the means before the chunk: what is rounded and summed is small, nothing of the future is
in it, and the scores of all keys before the chunk sum to nothing. The first chunk is computed without rounding: there a
few keys share all the weight, and so would their errors.

A later token does not reach an earlier row, whatever it holds. Weights of zero do not undo NaN, so where the moments of
a segment came out wild its rows before the first wild token are answered again, as if the segment ended there.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import blocks
from .blocks import (
    anew,
    channels,
    gain,
    halves,
    load_block,
    load_turns,
    mean_weight,
    no_sum,
    operand,
    product,
    store_block,
    times_state,
    token_product,
    token_sum,
    total,
    turn,
)
from .features import feature
from .moments import load_moments, merge_moments, store_moments
from .rules import Rule
from .sizes import cdiv, next_power_of_2
from .starting import is_roomy, on
from .statistics import Statistics

FITS = 128 * 128  # numbers of a state that one program can hold beside its tokens
SEQUENCES: tl.constexpr = tl.constexpr(256)  # looked through at a time
FEW: tl.constexpr = tl.constexpr(16)  # tokens in a chunk where nothing is rounded
LARGEST: tl.constexpr = tl.constexpr(3.4028234663852886e38)  # of the float32 numbers
TAME: tl.constexpr = tl.constexpr(1e37)  # up to here the difference of two numbers is finite, and so are sums of a few


class Nothing(NamedTuple):
    """What kernels read in place of `Statistics` where there are none."""

    count: None = None
    key_mean: None = None
    value_mean: None = None
    covariance: None = None
    rotated_key_mean: None = None


NOTHING = Nothing()


class Tokens(NamedTuple):
    """What the kernels of one call read: tensors, their strides, and sizes. Kernels call it `x`.

    Attributes:
        p_q: Queries, (B, N, H, D).
        p_k: Keys, (B, N, G, D).
        p_v: Values, (B, N, G, E).
        p_do: Gradient of the answers, (B, N, H, E), or None.
        p_mask: Which keys take part, (B, N), as bytes, or None.
        p_bounds: Where packed sequences begin and end, (S + 1,), or None.
        p_turns: Cosines and sines, (N, D), or None.
        s_qb: Strides, of each tensor in turn.
        scale: Factor of all scores.
        S_odd: Twice the sequences, and three: see `sequences_of`.
        N_odd: Twice the tokens of a batch entry, and three: see `length_of`.
        H: Query heads.
        G: Key heads.
        D: Channels of a key.
        E: Channels of a value.
        F: Features of a key.
    """

    p_q: Tensor
    p_k: Tensor
    p_v: Tensor
    p_do: Tensor | None
    p_mask: Tensor | None
    p_bounds: Tensor | None
    p_turns: Tensor | None
    s_qb: int
    s_qn: int
    s_qh: int
    s_qd: int
    s_kb: int
    s_kn: int
    s_kh: int
    s_kd: int
    s_vb: int
    s_vn: int
    s_vh: int
    s_vd: int
    s_gb: int
    s_gn: int
    s_gh: int
    s_gd: int
    s_mb: int
    s_mn: int
    scale: float
    S_odd: int
    N_odd: int
    H: int
    G: int
    D: int
    E: int
    F: int


# Where things are


@triton.jit
def length_of(x):
    """Tokens of a batch entry, which come as an odd number: Triton builds a kernel anew for one that 16 divides."""
    return x.N_odd // 2 - 1


@triton.jit
def sequences_of(x):
    """Sequences, likewise."""
    return x.S_odd // 2 - 1


@triton.jit
def find_segment(x, i_t, SEGMENT: tl.constexpr):
    """Of slot `i_t`: its sequence, where that lies (batch entry, first token), its length, where the segment begins.

    Packed sequence s has its slots from `bounds[s] // SEGMENT + s` on: enough of them, and known without a scan.
    """
    if x.p_bounds is None:
        number = tl.maximum(tl.cdiv(length_of(x), SEGMENT), 1)
        i_s = i_t // number
        i_b = tl.cast(i_s, tl.int64)
        first = i_b * 0
        length = tl.cast(length_of(x), tl.int32)
        begin = i_t % number * SEGMENT
    else:
        i_s = i_t * 0 - 1
        for i in range(0, sequences_of(x), SEQUENCES):
            o_s = i + tl.arange(0, SEQUENCES)
            b_first = tl.load(x.p_bounds + o_s, mask=o_s < sequences_of(x), other=0).to(tl.int64)
            i_s += tl.sum(((b_first // SEGMENT + o_s <= i_t) & (o_s < sequences_of(x))).to(tl.int32), 0)
        first = tl.load(x.p_bounds + i_s).to(tl.int64)
        i_b = first * 0
        length = (tl.load(x.p_bounds + i_s + 1).to(tl.int64) - first).to(tl.int32)
        begin = (i_t - (first // SEGMENT + i_s)).to(tl.int32) * SEGMENT
    return i_s, i_b, first, length, begin


@triton.jit
def find_slots(x, i_s, SEGMENT: tl.constexpr):
    """Slot of the first segment of a sequence, and the number of its segments."""
    if x.p_bounds is None:
        number = tl.maximum(tl.cdiv(length_of(x), SEGMENT), 1)
        slot = tl.cast(i_s, tl.int64) * number
    else:
        first = tl.load(x.p_bounds + i_s).to(tl.int64)
        slot = first // SEGMENT + i_s
        number = tl.maximum(tl.cdiv(tl.load(x.p_bounds + i_s + 1).to(tl.int64) - first, SEGMENT), 1).to(tl.int32)
    return slot, number


@triton.jit
def find_keys(x, i_b, i_n, o_n, m_n):
    """Which of the rows `m_n` hold a key that takes part."""
    if x.p_mask is not None:
        p_mask = x.p_mask + i_b * x.s_mb + tl.cast(i_n, tl.int64) * x.s_mn
        m_n = m_n & (tl.load(p_mask + o_n * x.s_mn, mask=m_n, other=0) != 0)
    return m_n


@triton.jit
def number_of(x, m_k, rows):
    """How many of a chunk's keys take part, where `rows` are left from its first on."""
    return tl.minimum(rows, m_k.shape[0]) if x.p_mask is None else tl.sum(m_k.to(tl.int32), 0)


@triton.jit
def find_first_key(x, i_b, begin, stop, SEGMENT: tl.constexpr):
    """The first key of a segment that takes part, or a row past its end."""
    if x.p_mask is not None:
        o_n = tl.arange(0, SEGMENT)
        m_n = find_keys(x, i_b, begin, o_n, begin + o_n < stop)
        begin += tl.min(tl.where(m_n, o_n, SEGMENT), 0)
    return begin


@triton.jit
def find_exact(n, begin, stop, i_n, ROUND: tl.constexpr, BC: tl.constexpr):
    """End of the chunks that are not to be rounded: that of the first key `i_n`, if at most a small state is before."""
    exact = begin
    if ROUND:
        # Rows that are not rounded have another reference in the backward pass: no earlier segment may see them.
        few = (n == 0) | ((begin == 0) & (n < BC))
        exact = tl.where(few, tl.minimum(begin + ((i_n - begin) // BC + 1) * BC, stop), begin)
    return exact


@triton.jit
def find_rows(x, i_b, i_n, o_n, end, key_end):
    """Rows of a chunk before `end`, those with a key that takes part, and both once more for loads, keys to `key_end`.

    Loads are sent ahead of their chunk: a condition that they shared with the rest would be carried along in registers.
    """
    m_n = o_n < end - i_n
    m_k = find_keys(x, i_b, i_n, o_n, m_n)
    m_n_load = i_n + o_n < end
    m_k_load = i_n + o_n < key_end
    if x.p_mask is not None:
        m_k_load = m_k_load & m_k
    return m_n, m_k, m_n_load, m_k_load


# What is not finite


@triton.jit
def any_beyond(b_x, MOST: tl.constexpr):
    """Whether a block holds NaN or a magnitude beyond `MOST`."""
    b_wild = tl.where(tl.abs(b_x) <= MOST, 0, 1)
    if len(b_x.shape) == 2:
        b_wild = tl.max(b_wild, 1)
    return tl.max(b_wild, 0) > 0


@triton.jit
def find_wild(
    x, i_b, i_g, first, begin, stop, o_e,
    MAP: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """The first of some rows with a key or a value that is not tame, or `stop`."""
    o_n = tl.arange(0, BC)
    found = stop
    for i_n in range(begin, stop, BC):
        m_k = find_keys(x, i_b, i_n, o_n, i_n + o_n < stop)
        b_k = load_key(x, i_b, first + i_n, i_g, o_n, m_k, BD)
        b_f = feature(b_k, tl.arange(0, BD) < x.D, MAP, False, EVEN, PRECISION == "split")
        b_v = load_value(x, i_b, first + i_n, i_g, o_n, m_k, o_e).to(tl.float32)
        b_wild = tl.max(tl.where(tl.abs(b_f) <= TAME, 0, 1), 1) + tl.max(tl.where(tl.abs(b_v) <= TAME, 0, 1), 1)
        found = tl.minimum(found, tl.min(tl.where(m_k & (b_wild > 0), i_n + o_n, stop), 0))
    return found


# Tokens


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


# The past


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


# Segments


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


# Answers


@triton.jit
def count_keys(x, n, o_n, m_k):
    """One over the number of keys that each row sees; zero where there are none."""
    if x.p_mask is not None:
        b_n = n.to(tl.float32) + tl.cumsum(m_k.to(tl.int32), 0).to(tl.float32)
        b_share = tl.where(b_n > 0, 1 / tl.maximum(b_n, 1.0), 0.0)
    else:
        b_share = 1 / (n.to(tl.float32) + (1 + o_n).to(tl.float32))
    return b_share


@triton.jit
def find_pairs(x, o_n, m_k, zero):
    """Which keys of a chunk each of its queries sees. No query of the sequence sees what lies past its end."""
    m_see = o_n[:, None] + zero >= o_n[None, :]
    if x.p_mask is not None:
        m_see = m_see & m_k[None, :]
    return m_see


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


# Launches


class Shape(NamedTuple):
    """Block shapes and launch options for heads of one width; nothing of the batch is in them.

    Attributes:
        chunk: Tokens in a chunk.
        channels: Channels of a key, rounded up to a power of two.
        features: Features, `channels` or twice that.
        values: Channels of a value in a block.
        blocks: Blocks that hold all of a value.
        segment: Tokens in a segment.
        warps: Warps of a program.
        stages: Chunks in flight.
    """

    chunk: int
    channels: int
    features: int
    values: int
    blocks: int
    segment: int
    warps: int
    stages: int


@cache
def shape_for(
    head_dim: int,
    value_dim: int,
    features: int,
    itemsize: int,
    segment: int | None = None,
    roomy: bool = True,
    forward: bool = True,
    rounds: bool = True,
) -> Shape:
    """Shapes for heads of this width whose map makes so many features of a channel; a segment suits any chip."""
    width, values = (max(16, next_power_of_2(x)) for x in (head_dim, value_dim))
    wide = width * features
    narrow = wide * values <= 64 * 64
    # Products in float32 are spelled out, one multiplication after the other: smaller blocks keep them in registers.
    fits = FITS // 4 if itemsize == 4 else FITS if roomy else FITS // 2
    tall = fits == FITS and wide <= 128
    chunk = 64 if tall else 32 if fits == FITS and wide == 256 else 16
    # As ptxas 12.8 assembles them, chunks of 64 rows whose factors come in halves go wrong: see docs/kernels.md.
    if tall and not rounds:
        chunk = 32
    # Of two groups of four warps each would compute a whole chunk: they share out rows, and 64 is what one group takes.
    # The backward pass has more to keep than one can hold.
    few = narrow or (forward and tall)
    values = min(values, max(16, fits // wide), 64 if few else values)
    return Shape(
        chunk=chunk,
        channels=width,
        features=wide,
        values=values,
        blocks=cdiv(value_dim, values),
        segment=segment or (1024 if narrow else 2048),
        warps=4 if few and itemsize == 2 else 8,
        stages=2 if wide <= 256 else 1,
    )


class Plan(NamedTuple):
    """What the launches of a call share.

    Attributes:
        shape: Block shapes.
        x: Tokens.
        sequences: How many there are.
        slots: Room for segments, of all sequences.
        several: Whether a sequence can have more than one.
        constants: What the kernels are compiled for.
    """

    shape: Shape
    x: Tokens
    sequences: int
    slots: int
    several: bool
    constants: dict[str, Any]

    @property
    def programs(self) -> int:
        """One for each key head of every slot."""
        return self.slots * self.x.G


def plan_for(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad: Tensor | None,
    rule: Rule,
    scale: float,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    turns: Tensor | None,
    precision: str,
    segment: int | None,
) -> Plan:
    """Everything that follows from shapes alone."""
    batch, length, heads, width = query.shape
    groups, values = value.shape[2:]
    rounds = query.dtype == torch.bfloat16
    shape = shape_for(width, values, rule.blocks, query.element_size(), segment, is_roomy(), grad is None, rounds)
    if cu_seqlens is None:
        sequences, slots = batch, batch * max(-(-length // shape.segment), 1)
    else:
        sequences = cu_seqlens.shape[0] - 1
        slots = length // shape.segment + sequences
    x = Tokens(
        query, key, value, grad, None if key_mask is None else key_mask.view(torch.uint8), cu_seqlens, turns,
        *query.stride(), *key.stride(), *value.stride(), *((0, 0, 0, 0) if grad is None else grad.stride()),
        *((0, 0) if key_mask is None else key_mask.stride()),
        scale, 2 * sequences + 3, 2 * length + 3, heads, groups, width, values, width * rule.blocks,
    )  # fmt: skip
    constants = {
        "MAP": rule.map,
        "EVEN": width == shape.channels,
        "PRECISION": precision,
        "ROUND": rounds,
        "SEGMENT": shape.segment,
        "BC": shape.chunk,
        "BD": shape.channels,
        "BF": shape.features,
        "BE": shape.values,
        "num_warps": shape.warps,
        "num_stages": shape.stages,
    }
    return Plan(shape, x, sequences, slots, length > shape.segment, constants)


def new_statistics(plan: Plan, number: int, covariance: Tensor | None = None) -> Statistics:
    """Room for some states, the covariances in what is there for them, if anything is."""
    x = plan.x

    def empty(*shape: int) -> Tensor:
        return torch.empty(number, x.G, *shape, dtype=torch.float32, device=x.p_q.device)

    return Statistics(
        count=torch.empty(number, x.G, dtype=torch.int64, device=x.p_q.device),
        key_mean=empty(x.F),
        value_mean=empty(x.E),
        covariance=empty(x.F, x.E) if covariance is None else covariance,
        rotated_key_mean=None if x.p_turns is None else empty(x.F),
    )


def new_results(plan: Plan) -> tuple[Tensor, Statistics, tuple[Tensor, ...]]:
    """What `forward` returns, with nothing in it yet."""
    query, value = plan.x.p_q, plan.x.p_v
    out = torch.empty(*query.shape[:3], value.shape[3], dtype=query.dtype, device=query.device)
    saved = new_statistics(plan, plan.slots) if plan.several else ()
    return out, new_statistics(plan, plan.sequences), tuple(x for x in saved if x is not None)


def past_of(saved: tuple[Tensor, ...], initial: Statistics | None) -> Statistics | Nothing:
    """What the segments start from: the states before each if there are several, else those given, if any."""
    return Statistics(*saved[:4], saved[4] if len(saved) > 4 else None) if saved else initial or NOTHING


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rule: Rule,
    scale: float,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    turns: Tensor | None,
    initial: Statistics | None,
    precision: str,
    segment: int | None = None,
) -> tuple[Tensor, Statistics, tuple[Tensor, ...]]:
    """Answers to queries that see the keys up to their own, the state after all of them, and what `backward` wants.

    Args:
        query: (B, N, H, D), any strides, as all tokens.
        key: (B, N, G, D), where G divides H.
        value: (B, N, G, E).
        rule: The mechanism.
        scale: Factor of all scores.
        key_mask: (B, N), True where a key takes part.
        cu_seqlens: (S + 1,), bounds of packed sequences; the batch is then one.
        turns: (N, D), cosines and sines of channel pairs side by side.
        initial: State before the first token of every sequence.
        precision: How products are taken: "split" for half precision, "tf32" or "ieee".
        segment: Tokens that one program walks through, a power of two; None is what suits the width.
    """
    plan = plan_for(query, key, value, None, rule, scale, key_mask, cu_seqlens, turns, precision, segment)
    out, final, saved = new_results(plan)
    past, x, shape = past_of(saved, initial), plan.x, plan.shape
    grid = plan.programs, shape.blocks
    if plan.several:
        # Most of a state is its covariance: what came before a segment takes the place of the segment's own.
        parts = new_statistics(plan, plan.slots, past.covariance)
        on(sum_segments_kernel, grid)(x, parts, **plan.constants)
        rows, columns = 16, min(shape.values, 128)
        on(merge_segments_kernel, (plan.sequences * x.G, cdiv(x.F, rows), cdiv(x.E, columns)))(
            x, parts, initial or NOTHING, past, SEGMENT=shape.segment, BR=rows, BE=columns, num_warps=4
        )
    on(causal_kernel, grid)(
        x, past, final, out, GAIN=rule.gain, RELEASED=rule.released, SEVERAL=plan.several, GROUP=x.H // x.G,
        **plan.constants,
    )  # fmt: skip
    return out, final, saved
