"""Kernels of a depthwise convolution over maps with channels last, with what is added to it and what gates it.

A program is one warp. It walks along R rows of a map, U columns at a time, for P strips side by side and BC channels,
two numbers a thread: P * BC is 64. Each column of the rows and their surroundings is loaded once and kept while the
kernel passes over it, so that products and not loads are most of the work.
"""

# ruff: noqa: RUF005, a kernel knows no star

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def with_column(columns, p_x, first, o_w, o_c, s_h, s_w, H, W, C, ROWS: tl.constexpr):
    """The columns so far, and one more: ROWS numbers of every strip and channel from row `first` on, zero beyond."""
    m_wc = ((o_w >= 0) & (o_w < W))[:, None] & (o_c < C)[None, :]
    o_x = o_w[:, None] * s_w + o_c[None, :]
    for r in tl.static_range(ROWS):
        h = first + r
        p_row = p_x + tl.cast(h, tl.int64) * s_h
        b_x = tl.load(p_row + o_x, mask=m_wc & (h >= 0) & (h < H), other=0.0)
        columns = columns + (b_x.to(tl.float32),)
    return columns


@triton.jit
def load_taps(p_w, o_c, C, K: tl.constexpr, FLIP: tl.constexpr):
    """The K * K numbers of every channel, in float32; from last to first if FLIP."""
    # Read as they lie, K * K side by side, and then dealt out: tap by tap, every channel would be a line of memory.
    BT: tl.constexpr = 16 if K == 3 else 32 if K == 5 else 64
    o_t = tl.arange(0, BT)
    place = K * K - 1 - o_t if FLIP else o_t
    m_ct = (o_c < C)[:, None] & (o_t < K * K)[None, :]
    taps = (tl.load(p_w + o_c[:, None] * (K * K) + place[None, :], mask=m_ct, other=0.0).to(tl.float32),)
    for level in tl.static_range(4 if K == 3 else 5 if K == 5 else 6):
        halved = ()
        for i in tl.static_range(2**level):
            b_pairs = tl.reshape(taps[i], (o_c.shape[0], 2, BT // 2 ** (level + 1)))
            b_first, b_second = tl.split(tl.permute(b_pairs, (0, 2, 1)))
            halved = halved + (b_first, b_second)
        taps = halved
    rows = ()
    for t in tl.static_range(K * K):
        rows = rows + (tl.reshape(taps[t], (1, o_c.shape[0])),)
    return rows


@triton.jit
def convolve(columns, taps, b_bias, u: tl.constexpr, r: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr):
    """The answer in column u and row r, from the columns u to u + K - 1 and the rows r to r + K - 1."""
    b_y = columns[u * ROWS + r] * taps[0] + b_bias
    for t in tl.static_range(1, K * K):
        b_y += columns[(u + t % K) * ROWS + r + t // K] * taps[t]
    return b_y


@triton.jit(do_not_specialize=["H", "W", "span"])
def depthwise_kernel(
    p_x, p_w, p_bias, p_add, p_gate, p_grad, p_out, p_out_add,
    s_xb, s_xh, s_xw, s_ab, s_ah, s_aw, s_gb, s_gh, s_gw, s_db, s_dh, s_dw, H, W, C, span,
    K: tl.constexpr, FLIP: tl.constexpr, BIAS: tl.constexpr, SELF: tl.constexpr, ADD: tl.constexpr,
    GATE: tl.constexpr, GRAD: tl.constexpr, R: tl.constexpr, U: tl.constexpr, P: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """(added + convolution) * gate; with GRAD, the gradients of the gate and of what is added instead.

    SELF adds the input itself. FLIP turns the kernel around, which is how gradients go through a convolution.
    """
    ROWS: tl.constexpr = R + K - 1
    c_blocks = tl.cdiv(C, BC)
    i_b, first = tl.program_id(2).to(tl.int64), tl.program_id(1) * R
    o_p = (tl.program_id(0) // c_blocks * P + tl.arange(0, P)) * span
    o_c = tl.program_id(0) % c_blocks * BC + tl.arange(0, BC)
    p_x += i_b * s_xb
    taps = load_taps(p_w, o_c, C, K, FLIP)
    b_bias = tl.zeros((1, BC), tl.float32)
    if BIAS:
        b_bias += tl.load(p_bias + o_c, mask=o_c < C, other=0.0).to(tl.float32)[None, :]
    columns = ()
    for u in tl.static_range(K - 1):
        columns = with_column(columns, p_x, first - K // 2, o_p + u - K // 2, o_c, s_xh, s_xw, H, W, C, ROWS)
    for i in range(0, span, U):
        o_w = o_p + i
        columns = with_column(columns, p_x, first - K // 2, o_w + K // 2, o_c, s_xh, s_xw, H, W, C, ROWS)
        for u in tl.static_range(U):
            # The next column is on its way while this one is summed.
            if u + 1 < U:
                columns = with_column(
                    columns, p_x, first - K // 2, o_w + u + 1 + K // 2, o_c, s_xh, s_xw, H, W, C, ROWS
                )
            m_wc = (o_w + u < tl.minimum(o_p + span, W))[:, None] & (o_c < C)[None, :]
            for r in tl.static_range(R):
                h = first + r
                m = m_wc & (h < H)
                b_y = convolve(columns, taps, b_bias, u, r, K, ROWS)
                if SELF:
                    b_y += columns[(u + K // 2) * ROWS + r + K // 2]
                if ADD:
                    p_row = p_add + i_b * s_ab + tl.cast(h, tl.int64) * s_ah
                    o_a = (o_w + u)[:, None] * s_aw + o_c[None, :]
                    b_y += tl.load(p_row + o_a, mask=m, other=0.0).to(tl.float32)
                if GATE:
                    p_row = p_gate + i_b * s_gb + tl.cast(h, tl.int64) * s_gh
                    o_g = (o_w + u)[:, None] * s_gw + o_c[None, :]
                    b_g = tl.load(p_row + o_g, mask=m, other=0.0).to(tl.float32)
                o_row = (i_b * H + h) * W * C
                o_out = (o_w + u)[:, None] * C + o_c[None, :]
                if GRAD:
                    p_row = p_grad + i_b * s_db + tl.cast(h, tl.int64) * s_dh
                    o_d = (o_w + u)[:, None] * s_dw + o_c[None, :]
                    b_d = tl.load(p_row + o_d, mask=m, other=0.0).to(tl.float32)
                    tl.store(p_out_add + o_row + o_out, (b_d * b_g).to(p_out_add.dtype.element_ty), mask=m)
                    b_y = b_y * b_d
                elif GATE:
                    b_y = b_y * b_g
                tl.store(p_out + o_row + o_out, b_y.to(p_out.dtype.element_ty), mask=m)
        kept = ()
        for t in tl.static_range((K - 1) * ROWS):
            kept = kept + (columns[U * ROWS + t],)
        columns = kept


@triton.jit
def add_products(sums, columns, grads, u: tl.constexpr, R: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr):
    """Sums of products of shifted inputs and gradients, tap by tap, with a column more in each; last, of gradients."""
    new = ()
    for t in tl.static_range(K * K):
        b_s = sums[t]
        for r in tl.static_range(R):
            b_s += columns[(u + t % K) * ROWS + r + t // K] * grads[u * R + r]
        new = new + (b_s,)
    b_s = sums[K * K]
    for r in tl.static_range(R):
        b_s += grads[u * R + r]
    return new + (b_s,)


@triton.jit
def strip_sums(
    sums, p_x, p_grad, first, o_p, o_c, s_xh, s_xw, s_gh, s_gw, H, W, C, span,
    K: tl.constexpr, R: tl.constexpr, U: tl.constexpr,
):  # fmt: skip
    """What R rows of one strip add to the sums of products."""
    ROWS: tl.constexpr = R + K - 1
    columns = ()
    for u in tl.static_range(K - 1):
        columns = with_column(columns, p_x, first - K // 2, o_p + u - K // 2, o_c, s_xh, s_xw, H, W, C, ROWS)
    for i in range(0, span, U):
        o_w = o_p + i
        stop = tl.minimum(o_p + span, W)
        grads = with_column((), p_grad, first, o_w, o_c, s_gh, s_gw, H, stop, C, R)
        columns = with_column(columns, p_x, first - K // 2, o_w + K // 2, o_c, s_xh, s_xw, H, W, C, ROWS)
        for u in tl.static_range(U):
            if u + 1 < U:
                grads = with_column(grads, p_grad, first, o_w + u + 1, o_c, s_gh, s_gw, H, stop, C, R)
                columns = with_column(
                    columns, p_x, first - K // 2, o_w + u + 1 + K // 2, o_c, s_xh, s_xw, H, W, C, ROWS
                )
            sums = add_products(sums, columns, grads, u, R, K, ROWS)
        kept = ()
        for t in tl.static_range((K - 1) * ROWS):
            kept = kept + (columns[U * ROWS + t],)
        columns = kept
    return sums


@triton.jit(do_not_specialize=["B", "H", "W", "span"])
def taps_gradient_kernel(
    p_x, p_grad, p_parts, s_xb, s_xh, s_xw, s_gb, s_gh, s_gw, B, H, W, C, span,
    K: tl.constexpr, R: tl.constexpr, U: tl.constexpr, P: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """What one share of the strips says of the kernel and the bias: K * K + 1 rows of channels."""
    o_c = tl.program_id(0) * BC + tl.arange(0, BC)
    h_blocks, w_blocks = tl.cdiv(H, R), tl.cdiv(W, span * P)
    sums = ()
    for _t in tl.static_range(K * K + 1):
        sums = sums + (tl.zeros((P, BC), tl.float32),)
    for strip in range(tl.program_id(1), B * h_blocks * w_blocks, tl.num_programs(1)):
        i_b = (strip // (h_blocks * w_blocks)).to(tl.int64)
        sums = strip_sums(
            sums, p_x + i_b * s_xb, p_grad + i_b * s_gb, strip // w_blocks % h_blocks * R,
            (strip % w_blocks * P + tl.arange(0, P)) * span, o_c, s_xh, s_xw, s_gh, s_gw, H, W, C, span, K, R, U,
        )  # fmt: skip
    p_parts += tl.program_id(1).to(tl.int64) * (K * K + 1) * C
    for t in tl.static_range(K * K + 1):
        tl.store(p_parts + t * C + o_c, tl.sum(sums[t], 0), mask=o_c < C)


@triton.jit
def taps_total_kernel(p_parts, p_w, p_bias, shares, C, K: tl.constexpr, BS: tl.constexpr, BC: tl.constexpr):
    """The sum of all shares, from first to last: the gradient of the kernel as (C, K * K), and of the bias."""
    t = tl.program_id(0)
    o_c = tl.program_id(1) * BC + tl.arange(0, BC)
    o_s = tl.arange(0, BS)
    b_sum = tl.zeros((BS, BC), tl.float32)
    for i in range(0, shares, BS):
        m = (i + o_s < shares)[:, None] & (o_c < C)[None, :]
        b_sum += tl.load(p_parts + ((i + o_s)[:, None] * (K * K + 1) + t) * C + o_c[None, :], mask=m, other=0.0)
    b_total = tl.sum(b_sum, 0)
    if t < K * K:
        tl.store(p_w + o_c * (K * K) + t, b_total.to(p_w.dtype.element_ty), mask=o_c < C)
    else:
        tl.store(p_bias + o_c, b_total.to(p_bias.dtype.element_ty), mask=o_c < C)
