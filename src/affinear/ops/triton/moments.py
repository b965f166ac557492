"""States inside kernels: where sequences and their segments lie, and how the moments of segments are kept and merged.

A sequence is cut into segments by its length alone. Every segment is summed on its own and segments are merged from
first to last, whether one program does it all or many share the work: the bits do not depend on the batch.
"""

from __future__ import annotations

import triton
import triton.language as tl

SEGMENT: tl.constexpr = tl.constexpr(2048)  # tokens; enough that a state weighs little beside them
FEW_SEGMENTS: tl.constexpr = tl.constexpr(4)  # so many a short sequence may have, each a quarter as long at least
MOST_SEGMENTS: tl.constexpr = tl.constexpr(32)  # longer sequences have longer segments

# Triton builds a kernel anew where a number becomes one, or divisible by 16: not for these, which vary by the call.
LENGTHS = ["length", "length_q", "length_k", "tokens", "rows", "segments", "number", "s_mb", "s_mn"]


@triton.jit
def segment_rows(length, BN: tl.constexpr):
    """Tokens in a segment of a sequence of this length: equal shares in whole blocks."""
    number = tl.minimum(tl.maximum(tl.cdiv(length, SEGMENT), FEW_SEGMENTS), tl.cdiv(length, SEGMENT // 4))
    number = tl.minimum(tl.maximum(number, 1), MOST_SEGMENTS)
    return tl.maximum(tl.cdiv(tl.cdiv(length, number), BN), 1) * BN


@triton.jit
def find_sequence(p_bounds, i_s, length, PACKED: tl.constexpr):
    """Batch entry of a sequence, its first token there, and its length."""
    if PACKED:
        first = tl.load(p_bounds + i_s).to(tl.int64)
        return tl.cast(i_s, tl.int64) * 0, first, (tl.load(p_bounds + i_s + 1).to(tl.int64) - first).to(tl.int32)
    return tl.cast(i_s, tl.int64), tl.cast(i_s, tl.int64) * 0, length


@triton.jit
def merge_moments(n, b_plain, b_turned, b_value, b_cov, n2, b_plain2, b_turned2, b_value2, b_cov2):
    """The moments of two disjoint sets of tokens; as `affinear.ops.state.merge`."""
    share = n2 / tl.maximum(n + n2, 1.0)
    b_turn = b_turned2 - b_turned
    b_step = b_value2 - b_value
    # Which products and sums round as one is said here, lest compilers decide otherwise in every kernel.
    b_cov = add_product(share, b_cov2 - b_cov, b_cov)
    b_cov = add_product(((1 - share) * b_turn)[:, None], (share * b_step)[None, :], b_cov)
    b_plain = add_product(share, b_plain2 - b_plain, b_plain)
    return n + n2, b_plain, add_product(share, b_turn, b_turned), add_product(share, b_step, b_value), b_cov


@triton.jit
def add_product(a, b, b_x):
    """`a * b + b_x`, rounded once, for factors that broadcast."""
    return tl.fma(tl.broadcast_to(a, b_x.shape), tl.broadcast_to(b, b_x.shape), b_x)


@triton.jit
def load_moments(p_count, p_plain, p_turned, p_value, p_cov, i, o_s, m_f, o_e, F, E, ROTARY: tl.constexpr):
    """Entry `i` of a state: count, mean feature plain and turned, mean value, covariance."""
    i = tl.cast(i, tl.int64)
    m_e = o_e < E
    n = tl.load(p_count + i).to(tl.float32)
    b_plain = tl.load(p_plain + i * F + o_s, mask=m_f, other=0.0)
    b_turned = b_plain
    if ROTARY:
        b_turned = tl.load(p_turned + i * F + o_s, mask=m_f, other=0.0)
    b_value = tl.load(p_value + i * E + o_e, mask=m_e, other=0.0)
    b_cov = tl.load(p_cov + i * F * E + o_s[:, None] * E + o_e[None, :], mask=m_f[:, None] & m_e[None, :], other=0.0)
    return n, b_plain, b_turned, b_value, b_cov


@triton.jit
def load_merged(
    p_count, p_plain, p_turned, p_value, p_cov, i, number, o_s, m_f, o_e, F, E,
    BF: tl.constexpr, BE: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    """What `number` entries of a state from `i` on make together, merged from first to last."""
    n = 0.0
    b_plain = tl.zeros((BF,), tl.float32)
    b_turned = tl.zeros((BF,), tl.float32)
    b_value = tl.zeros((BE,), tl.float32)
    b_cov = tl.zeros((BF, BE), tl.float32)
    for j in range(number):
        n2, b_plain2, b_turned2, b_value2, b_cov2 = load_moments(
            p_count, p_plain, p_turned, p_value, p_cov, i + j, o_s, m_f, o_e, F, E, ROTARY
        )
        n, b_plain, b_turned, b_value, b_cov = merge_moments(
            n, b_plain, b_turned, b_value, b_cov, n2, b_plain2, b_turned2, b_value2, b_cov2
        )
    return n, b_plain, b_turned, b_value, b_cov


@triton.jit
def store_moments(
    p_count, p_plain, p_turned, p_value, p_cov, i, n, b_plain, b_turned, b_value, b_cov, o_s, m_f, o_e, F, E,
    OF_KEYS, OF_VALUES, ROTARY: tl.constexpr,
):  # fmt: skip
    """Write entry `i` of a state; means that several programs share are written by one of them."""
    i = tl.cast(i, tl.int64)
    m_e = o_e < E
    tl.store(p_cov + i * F * E + o_s[:, None] * E + o_e[None, :], b_cov, mask=m_f[:, None] & m_e[None, :])
    tl.store(p_value + i * E + o_e, b_value, mask=m_e & OF_VALUES)
    tl.store(p_plain + i * F + o_s, b_plain, mask=m_f & OF_KEYS)
    if ROTARY:
        tl.store(p_turned + i * F + o_s, b_turned, mask=m_f & OF_KEYS)
    tl.store(p_count + i, tl.cast(n, tl.int64), mask=OF_KEYS & OF_VALUES)


@triton.jit
def load_gradient(p_grad, i, o_s, m_f, o_e, F, E, ROTARY: tl.constexpr):
    """Row `i` of gradients of states: of the mean feature plain, turned if there is one, mean value, covariance."""
    turned = F if ROTARY else 0
    p_grad += tl.cast(i, tl.int64) * (F + turned + E + F * E)
    m_e = o_e < E
    b_plain = tl.load(p_grad + o_s, mask=m_f, other=0.0)
    b_turned = tl.load(p_grad + turned + o_s, mask=m_f, other=0.0)
    p_grad += F + turned
    b_value = tl.load(p_grad + o_e, mask=m_e, other=0.0)
    m_cov = m_f[:, None] & m_e[None, :]
    b_cov = tl.load(p_grad + E + o_s[:, None] * E + o_e[None, :], mask=m_cov, other=0.0)
    return b_plain, b_turned, b_value, b_cov


@triton.jit
def store_gradient(p_grad, i, b_plain, b_turned, b_value, b_cov, o_s, m_f, o_e, F, E, first, ROTARY: tl.constexpr):
    """Write row `i` of gradients of states; what several programs share, only the first of them."""
    turned = F if ROTARY else 0
    p_grad += tl.cast(i, tl.int64) * (F + turned + E + F * E)
    tl.store(p_grad + o_s, b_plain, mask=m_f & first)
    if ROTARY:
        tl.store(p_grad + F + o_s, b_turned, mask=m_f & first)
    p_grad += F + turned
    tl.store(p_grad + o_e, b_value, mask=o_e < E)
    tl.store(p_grad + E + o_s[:, None] * E + o_e[None, :], b_cov, mask=m_f[:, None] & (o_e < E)[None, :])


@triton.jit(do_not_specialize=LENGTHS)
def merge_kernel(
    p_counts, p_plains, p_turneds, p_values, p_covs, p_count, p_plain, p_turned, p_value, p_cov, p_bounds,
    length, G, F, E, segments, ROTARY: tl.constexpr, PACKED: tl.constexpr,
    BN: tl.constexpr, BR: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Merge the segments of one sequence and head, a block of the covariance each program."""
    i_sg, i_r, i_e = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    _b, _first, length = find_sequence(p_bounds, i_sg // G, length, PACKED)
    number = tl.maximum(tl.cdiv(length, segment_rows(length, BN)), 1)
    o_s = i_r * BR + tl.arange(0, BR)
    o_e = i_e * BE + tl.arange(0, BE)
    n, b_plain, b_turned, b_value, b_cov = load_merged(
        p_counts, p_plains, p_turneds, p_values, p_covs, i_sg * segments, number, o_s, o_s < F, o_e, F, E,
        BR, BE, ROTARY,
    )  # fmt: skip
    store_moments(
        p_count, p_plain, p_turned, p_value, p_cov, i_sg, n, b_plain, b_turned, b_value, b_cov,
        o_s, o_s < F, o_e, F, E, i_e == 0, i_r == 0, ROTARY,
    )  # fmt: skip


@triton.jit(do_not_specialize=LENGTHS)
def add_kernel(p_parts, p_sum, number, width, BW: tl.constexpr):
    """Add up the gradients (number, width) that the segments of one state left, from first to last."""
    i_s, i_w = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_w = i_w * BW + tl.arange(0, BW)
    p_part = p_parts + i_s * number * width + o_w
    b_sum = tl.load(p_part, mask=o_w < width, other=0.0)
    for _ in range(1, number):
        p_part += width
        b_sum += tl.load(p_part, mask=o_w < width, other=0.0)
    tl.store(p_sum + i_s * width + o_w, b_sum, mask=o_w < width)
