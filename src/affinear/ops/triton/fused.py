"""Short sequences in one launch: a program per sequence and key head, which keeps the state on the chip."""

from __future__ import annotations

import triton
import triton.language as tl

from .attend import attend_rows
from .blocks import channels, factors
from .moments import LENGTHS, store_moments
from .summarize import summarize_rows


@triton.jit(do_not_specialize=LENGTHS)
def attention_kernel(
    p_q, p_k, p_v, p_mask, p_turns, p_o, p_count, p_plain, p_turned, p_value, p_cov,
    s_qb, s_qn, s_qh, s_qd, s_kb, s_kn, s_kh, s_kd, s_vb, s_vn, s_vh, s_vd, s_mb, s_mn,
    length_q, length_k, scale, H, G,
    MAP: tl.constexpr, GAIN: tl.constexpr, RELEASED: tl.constexpr, ROTARY: tl.constexpr, MASKED: tl.constexpr,
    KEEP: tl.constexpr, PRECISION: tl.constexpr, ROUND: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, F: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, PIN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Summarize the keys of one sequence and head, then answer its queries; KEEP the state for the backward pass."""
    i_sg = tl.program_id(0)
    i_b, i_g = (i_sg // G).to(tl.int64), (i_sg % G).to(tl.int64)
    o_d, o_s = channels(D, BD, BF)
    o_e = tl.arange(0, BE)
    n, b_plain, b_turned, b_value, b_cov = summarize_rows(
        p_k + i_b * s_kb + i_g * s_kh, p_v + i_b * s_vb + i_g * s_vh, p_mask + i_b * s_mb, p_turns,
        length_k * 0, length_k, s_kn, s_kd, s_vn, s_vd, s_mn, D, E, 0,
        MAP, ROTARY, MASKED, PRECISION, ROUND, BN, BD, BF, BE, PIN, STAGES,
    )  # fmt: skip
    if KEEP:
        store_moments(
            p_count, p_plain, p_turned, p_value, p_cov, i_sg, n, b_plain, b_turned, b_value, b_cov,
            o_s, o_d < D, o_e, F, E, True, True, ROTARY,
        )  # fmt: skip
    b_high, b_low, unit = factors(scale * b_cov, PRECISION, False)
    for i_h in range(i_sg % G * (H // G), (i_sg % G + 1) * (H // G)):
        attend_rows(
            p_q + i_b * s_qb + tl.cast(i_h, tl.int64) * s_qh, p_o + (i_b * length_q * H + i_h) * E, p_turns,
            length_q * 0, length_q, s_qn, s_qd, H * E, D, E, 0, scale, b_plain, b_turned, b_value, b_high, b_low, unit,
            MAP, GAIN, RELEASED, ROTARY, PRECISION, ROUND, False, BN, BD, BF, BE, STAGES,
        )  # fmt: skip
