"""Rotary tables as the kernels read them: one table in place of two, half as wide in sum."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .sizes import cdiv, next_power_of_2
from .starting import start


@triton.jit(do_not_specialize=["N"])
def turns_kernel(p_cos, p_sin, p_turns, s_cn, s_cd, s_sn, s_sd, N, D: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr):
    """Lay the cosine and the sine of every channel pair side by side."""
    o_n = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)[:, None]
    o_p = tl.arange(0, BP)[None, :]
    m_x = (o_n < N) & (o_p < D // 2)
    b_cos = tl.load(p_cos + o_n * s_cn + 2 * o_p * s_cd, mask=m_x, other=0.0)
    b_sin = tl.load(p_sin + o_n * s_sn + 2 * o_p * s_sd, mask=m_x, other=0.0)
    p_turns += o_n * D + 2 * o_p
    tl.store(p_turns, b_cos.to(p_turns.dtype.element_ty), mask=m_x)
    tl.store(p_turns + 1, b_sin.to(p_turns.dtype.element_ty), mask=m_x)


def pack_turns(cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    """One table (N, D), cos, sin, cos, sin, ..., from two (N, D) that hold each pair's angle twice."""
    length, width = cos.shape
    turns = torch.empty(length, width, dtype=dtype, device=cos.device)
    start(
        turns_kernel, (cdiv(length, 32), 1, 1), (cos, sin, turns), (*cos.stride(), *sin.stride(), length),
        D=width, BN=32, BP=next_power_of_2(width // 2),
    )  # fmt: skip
    return turns
