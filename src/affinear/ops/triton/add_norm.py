"""Kernels of a sum and its layer norm: a row of channels is loaded once, added, normalised and written twice.

A program holds BM whole rows, BC channels wide. Backwards it walks over blocks of rows, as many programs as fit the
chip at once, and sums what each row says of the weights; what all programs say is added up after it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def normalised(b_x, m_c, C, eps):
    """Rows without their mean, over their deviation, zero beyond C; and one over the deviation."""
    b_mean = tl.sum(b_x, 1) / C
    b_off = tl.where(m_c, b_x - b_mean[:, None], 0.0)
    b_over = tl.rsqrt(tl.sum(b_off * b_off, 1) / C + eps)
    return b_off * b_over[:, None], b_over


@triton.jit(do_not_specialize=["rows"])
def add_norm_kernel(
    p_x, p_other, p_w, p_bias, p_sum, p_out, rows, C, eps, BM: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """The sum, rounded, and the norm of what was rounded."""
    o_m = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    o_c = tl.arange(0, BC)
    m_c = (o_c < C)[None, :]
    m = (o_m < rows)[:, None] & m_c
    o = o_m[:, None] * C + o_c[None, :]
    b_x = tl.load(p_x + o, mask=m, other=0.0).to(tl.float32)
    b_other = tl.load(p_other + o, mask=m, other=0.0).to(tl.float32)
    b_sum = (b_x + b_other).to(p_sum.dtype.element_ty)
    tl.store(p_sum + o, b_sum, mask=m)
    b_out, _ = normalised(b_sum.to(tl.float32), m_c, C, eps)
    b_w = tl.load(p_w + o_c, mask=o_c < C, other=0.0).to(tl.float32)
    b_bias = tl.load(p_bias + o_c, mask=o_c < C, other=0.0).to(tl.float32)
    tl.store(p_out + o, (b_out * b_w[None, :] + b_bias[None, :]).to(p_out.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["rows"])
def add_norm_gradient_kernel(
    p_sum, p_w, p_grad, p_grad_sum, p_out, p_parts, rows, C, eps,
    BOTH: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The gradient of what was added, from the norm's and, if BOTH, the sum's; and this program's of the weights.

    Of the weights there are two rows of channels: what multiplies, and what is added.
    """
    o_c = tl.arange(0, BC)
    m_c = (o_c < C)[None, :]
    b_w = tl.load(p_w + o_c, mask=o_c < C, other=0.0).to(tl.float32)
    b_grad_w, b_grad_bias = tl.zeros((BM, BC), tl.float32), tl.zeros((BM, BC), tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(rows, BM), tl.num_programs(0)):
        o_m = tl.cast(block, tl.int64) * BM + tl.arange(0, BM)
        m = (o_m < rows)[:, None] & m_c
        o = o_m[:, None] * C + o_c[None, :]
        b_sum = tl.load(p_sum + o, mask=m, other=0.0).to(tl.float32)
        b_grad = tl.load(p_grad + o, mask=m, other=0.0).to(tl.float32)
        b_row, b_over = normalised(b_sum, m_c, C, eps)
        b_grad_w += b_grad * b_row
        b_grad_bias += b_grad
        b_grad *= b_w[None, :]
        b_mean, b_along = tl.sum(b_grad, 1) / C, tl.sum(b_grad * b_row, 1) / C
        b_out = (b_grad - b_mean[:, None] - b_row * b_along[:, None]) * b_over[:, None]
        if BOTH:
            b_out += tl.load(p_grad_sum + o, mask=m, other=0.0).to(tl.float32)
        tl.store(p_out + o, b_out.to(p_out.dtype.element_ty), mask=m)
    p_parts += tl.program_id(0) * 2 * C
    tl.store(p_parts + o_c, tl.sum(b_grad_w, 0), mask=o_c < C)
    tl.store(p_parts + C + o_c, tl.sum(b_grad_bias, 0), mask=o_c < C)
