"""Kernels of a depthwise convolution over maps with channels last, with what is added to it and what gates it.

A program makes R rows of a strip, BW columns and BC channels. Every input row is loaded once per column of the kernel,
shifted, and serves all the output rows that it touches: K loads an element, not K * K.
"""

# ruff: noqa: RUF005, a kernel knows no star

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def shifted(p_row, h, o_w, o_c, s_w, H, W, C, J: tl.constexpr):
    """One row of a strip, J columns to the right; zeros beyond the map."""
    o_j = o_w + J
    inside = ((o_j >= 0) & (o_j < W) & (h >= 0) & (h < H))[:, None] & (o_c < C)[None, :]
    return tl.load(p_row + o_j[:, None] * s_w + o_c[None, :], mask=inside, other=0.0)


@triton.jit
def with_row(rows, p_x, h, o_w, o_c, s_h, s_w, H, W, C, K: tl.constexpr):
    """The rows so far, and the next one, K times shifted."""
    for j in tl.static_range(K):
        rows = rows + (shifted(p_x + tl.cast(h, tl.int64) * s_h, h, o_w, o_c, s_w, H, W, C, j - K // 2),)
    return rows


@triton.jit
def load_taps(p_w, o_c, C, K: tl.constexpr, FLIP: tl.constexpr):
    """The K * K numbers of every channel, in float32; from last to first if FLIP."""
    taps = ()
    for t in tl.static_range(K * K):
        place = K * K - 1 - t if FLIP else t
        taps = taps + (tl.load(p_w + o_c * (K * K) + place, mask=o_c < C, other=0.0).to(tl.float32),)
    return taps


@triton.jit
def convolve(rows, taps, b_bias, r: tl.constexpr, K: tl.constexpr):
    """Output row r from the input rows r to r + K - 1."""
    b_y = rows[r * K].to(tl.float32) * taps[0][None, :] + b_bias[None, :]
    for t in tl.static_range(1, K * K):
        b_y += rows[(r + t // K) * K + t % K].to(tl.float32) * taps[t][None, :]
    return b_y


@triton.jit(do_not_specialize=["H", "W"])
def depthwise_kernel(
    p_x, p_w, p_bias, p_add, p_gate, p_grad, p_out, p_out_add,
    s_xb, s_xh, s_xw, s_ab, s_ah, s_aw, s_gb, s_gh, s_gw, s_db, s_dh, s_dw, H, W, C,
    K: tl.constexpr, FLIP: tl.constexpr, BIAS: tl.constexpr, SELF: tl.constexpr, ADD: tl.constexpr,
    GATE: tl.constexpr, GRAD: tl.constexpr, R: tl.constexpr, BW: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """(added + convolution) * gate; with GRAD, the gradients of the gate and of what is added instead.

    SELF adds the input itself. FLIP turns the kernel around, which is how gradients go through a convolution.
    """
    c_blocks = tl.cdiv(C, BC)
    i_b, first = tl.program_id(2).to(tl.int64), tl.program_id(1) * R
    o_w = tl.program_id(0) // c_blocks * BW + tl.arange(0, BW)
    o_c = tl.program_id(0) % c_blocks * BC + tl.arange(0, BC)
    m_wc = (o_w < W)[:, None] & (o_c < C)[None, :]
    p_x += i_b * s_xb
    taps = load_taps(p_w, o_c, C, K, FLIP)
    b_bias = tl.zeros((BC,), tl.float32)
    if BIAS:
        b_bias += tl.load(p_bias + o_c, mask=o_c < C, other=0.0).to(tl.float32)
    rows = ()
    for r in tl.static_range(K):
        rows = with_row(rows, p_x, first + r - K // 2, o_w, o_c, s_xh, s_xw, H, W, C, K)
    for r in tl.static_range(R):
        h = first + r
        m = m_wc & (h < H)
        # The next row is on its way while this one is summed.
        if r + 1 < R:
            rows = with_row(rows, p_x, h + 1 + K // 2, o_w, o_c, s_xh, s_xw, H, W, C, K)
        b_y = convolve(rows, taps, b_bias, r, K)
        if SELF:
            b_y += rows[(r + K // 2) * K + K // 2].to(tl.float32)
        if ADD:
            o_a = i_b * s_ab + tl.cast(h, tl.int64) * s_ah + o_w[:, None] * s_aw + o_c[None, :]
            b_y += tl.load(p_add + o_a, mask=m, other=0.0).to(tl.float32)
        if GATE:
            o_g = i_b * s_gb + tl.cast(h, tl.int64) * s_gh + o_w[:, None] * s_gw + o_c[None, :]
            b_g = tl.load(p_gate + o_g, mask=m, other=0.0).to(tl.float32)
        o_out = ((i_b * H + h) * W + o_w[:, None]) * C + o_c[None, :]
        if GRAD:
            o_d = i_b * s_db + tl.cast(h, tl.int64) * s_dh + o_w[:, None] * s_dw + o_c[None, :]
            b_d = tl.load(p_grad + o_d, mask=m, other=0.0).to(tl.float32)
            tl.store(p_out_add + o_out, (b_d * b_g).to(p_out_add.dtype.element_ty), mask=m)
            b_y = b_y * b_d
        elif GATE:
            b_y = b_y * b_g
        tl.store(p_out + o_out, b_y.to(p_out.dtype.element_ty), mask=m)


@triton.jit
def add_products(sums, rows, grads, R: tl.constexpr, K: tl.constexpr):
    """Sums of products of shifted inputs and gradients, tap by tap, with R more rows in each; last, of gradients."""
    new = ()
    for t in tl.static_range(K * K):
        b_s = sums[t]
        for r in tl.static_range(R):
            b_s += rows[(r + t // K) * K + t % K].to(tl.float32) * grads[r].to(tl.float32)
        new = new + (b_s,)
    b_s = sums[K * K]
    for r in tl.static_range(R):
        b_s += grads[r].to(tl.float32)
    return new + (b_s,)


@triton.jit(do_not_specialize=["B", "H", "W"])
def taps_gradient_kernel(
    p_x, p_grad, p_parts, s_xb, s_xh, s_xw, s_gb, s_gh, s_gw, B, H, W, C,
    K: tl.constexpr, R: tl.constexpr, BW: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """What one share of the strips says of the kernel and the bias: K * K + 1 rows of channels."""
    o_c = tl.program_id(0) * BC + tl.arange(0, BC)
    m_c = o_c < C
    h_blocks, w_blocks = tl.cdiv(H, R), tl.cdiv(W, BW)
    sums = ()
    for _t in tl.static_range(K * K + 1):
        sums = sums + (tl.zeros((BW, BC), tl.float32),)
    for strip in range(tl.program_id(1), B * h_blocks * w_blocks, tl.num_programs(1)):
        i_b = (strip // (h_blocks * w_blocks)).to(tl.int64)
        first = strip // w_blocks % h_blocks * R
        o_w = strip % w_blocks * BW + tl.arange(0, BW)
        rows = ()
        for r in tl.static_range(R + K - 1):
            rows = with_row(rows, p_x + i_b * s_xb, first + r - K // 2, o_w, o_c, s_xh, s_xw, H, W, C, K)
        grads = ()
        for r in tl.static_range(R):
            h = first + r
            p_g = p_grad + i_b * s_gb + tl.cast(h, tl.int64) * s_gh
            grads = grads + (shifted(p_g, h, o_w, o_c, s_gw, H, W, C, 0),)
        sums = add_products(sums, rows, grads, R, K)
    p_parts += tl.program_id(1).to(tl.int64) * (K * K + 1) * C
    for t in tl.static_range(K * K + 1):
        tl.store(p_parts + t * C + o_c, tl.sum(sums[t], 0), mask=m_c)


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
