"""The feature maps on a block of tokens, with their gradients.

Where a map doubles the width, (BN, BD) channels make (BN, 2 BD) features: the first half holds those of the positive
channels (near ones, for the cosine map), the second half those of the negative (far) ones.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.target_info import is_hip

from ..mechanisms import NALA_OFFSET, NALA_PHASE, NALA_POWER
from .blocks import INTERPRETED, unit_of

# Constants stand to the right of blocks: the interpreter takes a constant times a block for a constant.
POWER: tl.constexpr = tl.constexpr(NALA_POWER)  # three: where it stands for the keys' power, they are multiplied out
OFFSET: tl.constexpr = tl.constexpr(NALA_OFFSET)
STEEPNESS: tl.constexpr = tl.constexpr(2 * NALA_PHASE)
QUARTER: tl.constexpr = tl.constexpr(math.pi / 2)
LN2: tl.constexpr = tl.constexpr(math.log(2))
SMALLEST: tl.constexpr = tl.constexpr(2.0**-126)  # of the normal float32 numbers
FLAT: tl.constexpr = tl.constexpr(64.0)  # a norm at which tanh is one and its slope is zero to the last bit


@triton.jit
def feature(b_x, m_d, MAP: tl.constexpr, QUERY: tl.constexpr, EVEN: tl.constexpr = False, FAST: tl.constexpr = False):
    """Features of a float32 block whose channels are those of `m_d`, zero elsewhere; an EVEN one has them all.

    FAST powers are good to six digits, which half precision does not tell from seven.
    """
    if MAP == "elu":
        b_f = tl.where(b_x > 0, b_x + 1, _exp(b_x))
        return b_f if EVEN else tl.where(m_d[None, :], b_f, 0.0)
    elif MAP == "relu":
        return _relu(b_x)
    elif MAP == "focused":
        return _focused(b_x)
    elif MAP == "nala":
        return _nala_query(b_x, FAST) if QUERY else _nala_key(b_x)
    elif MAP == "nala_cosine":
        return _cosine_query(b_x, FAST) if QUERY else _cosine_key(b_x)
    else:
        tl.static_assert(MAP == "identity")
        return b_x


@triton.jit
def feature_gradient(b_x, b_f, b_df, MAP: tl.constexpr, QUERY: tl.constexpr, FAST: tl.constexpr = False):
    """Gradient of a float32 block (BN, BD) from its features and their gradient, which is zero where no channel is."""
    if MAP == "elu":
        return b_df * tl.minimum(b_f, 1.0)
    elif MAP == "relu":
        return tl.where(b_x <= 0, 0.0, b_df)
    elif MAP == "focused":
        return _focused_gradient(b_x, b_df)
    elif MAP == "nala":
        return _nala_query_gradient(b_x, b_df, FAST) if QUERY else _nala_key_gradient(b_x, b_df)
    elif MAP == "nala_cosine":
        return _cosine_query_gradient(b_x, b_df, FAST) if QUERY else _cosine_key_gradient(b_x, b_df)
    else:
        tl.static_assert(MAP == "identity")
        return b_df


@triton.jit
def query_power(b_x, MAP: tl.constexpr, FAST: tl.constexpr):
    """What the two features of each channel of a float32 block of queries are made of, and their gradients too."""
    b_d, b_r, b_inverse = _direction(b_x)
    b_power, b_power_slope = _query_power(b_r)
    b_root, b_log = _root(tl.abs(b_d), b_power, FAST)
    b_near = b_d
    b_far = b_d
    b_slope = b_d
    if MAP == "nala_cosine":
        b_near, b_far, b_slope = _phase(b_d)
    return b_d, b_inverse, b_power, b_power_slope, b_root, b_log, b_near, b_far, b_slope


@triton.jit
def query_pair(b_parts, MAP: tl.constexpr):
    """The two features of each channel of a block of queries, from its `query_power`."""
    b_f = tl.abs(b_parts[0]) * b_parts[4]
    if MAP == "nala":
        return tl.where(b_parts[0] < 0, 0.0, b_f), tl.where(b_parts[0] < 0, b_f, 0.0)
    else:
        tl.static_assert(MAP == "nala_cosine")
        return b_f * b_parts[6], b_f * b_parts[7]


@triton.jit
def query_pair_gradient(b_first, b_second, b_parts, MAP: tl.constexpr):
    """Gradient of a float32 block of queries from those of the two features of each channel."""
    b_d, b_inverse, b_power, b_power_slope, b_root, b_log, b_near, b_far, b_slope = b_parts
    if MAP == "nala":
        b_df = tl.where(b_d < 0, b_second, b_first)
        return _signed_gradient(b_df, b_d, b_inverse, b_power, b_power_slope, b_root, b_log)
    else:
        return _phased_gradient(
            b_first, b_second, b_d, b_inverse, b_power, b_power_slope, b_root, b_log, b_near, b_far, b_slope
        )


@triton.jit
def _double(b_first, b_second):
    """Two blocks (BN, BD) side by side."""
    b_pairs = tl.permute(tl.join(b_first, b_second), (0, 2, 1))
    return tl.reshape(b_pairs, (b_first.shape[0], 2 * b_first.shape[1]))


@triton.jit
def _halve(b_x):
    """The two halves of a block (BN, 2 BD)."""
    return tl.split(tl.permute(tl.reshape(b_x, (b_x.shape[0], 2, b_x.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def _exp(b_x):
    """The exponential, where numbers below 2 ** -126 may be zero: half the instructions. Above one it may be one."""
    # The interpreter warns of what overflows, though nobody looks at it.
    return tl.exp(tl.where(b_x > 0, 0.0, b_x)) if INTERPRETED else libdevice.fast_expf(b_x)


@triton.jit
def _relu(b_x):
    """The positive part, and NaN where NaN was: it fails this comparison."""
    return tl.where(b_x < 0, 0.0, b_x)


@triton.jit
def _scaled(b_x):
    """Rows over a power of two near their largest magnitude, that power, and its inverse."""
    # Norms of what is left neither over- nor underflow.
    b_unit, b_inverse = unit_of(tl.max(tl.abs(b_x), 1, keep_dims=True))
    return b_x * b_inverse, b_unit, b_inverse


@triton.jit
def _focused_parts(b_x):
    """Scaled relu(x), its cube, its scale, and the squares of the norms of both, which are never zero."""
    b_c, b_unit, _ = _scaled(_relu(b_x))
    b_cube = b_c * b_c * b_c
    b_norm = tl.sum(b_c * b_c, 1, keep_dims=True)
    b_cube_norm = tl.sum(b_cube * b_cube, 1, keep_dims=True)
    return b_c, b_cube, b_unit, tl.maximum(b_norm, SMALLEST), tl.maximum(b_cube_norm, SMALLEST)


@triton.jit
def _focused(b_x):
    """The cube of relu(x), as long as relu(x)."""
    _, b_cube, b_unit, b_norm, b_cube_norm = _focused_parts(b_x)
    return b_cube * (b_unit * tl.sqrt(b_norm / b_cube_norm))


@triton.jit
def _focused_gradient(b_x, b_df):
    """Gradient of the focused map."""
    # With n and m the norms of c and of its cube: n / m (3 c^2 (df - c^3 s / m^2) + c s / n^2), where s = sum(c^3 df).
    b_c, b_cube, _, b_norm, b_cube_norm = _focused_parts(b_x)
    b_sum = tl.sum(b_cube * b_df, 1, keep_dims=True)
    b_across = b_df - b_cube * (b_sum / b_cube_norm)
    return tl.sqrt(b_norm / b_cube_norm) * (b_c * (3 * b_c * b_across + b_sum / b_norm))


@triton.jit
def _direction(b_x):
    """Rows brought to length one, their length before, and its inverse; zero rows stay zero."""
    b_c, b_unit, b_inverse = _scaled(b_x)
    b_square = tl.sum(b_c * b_c, 1, keep_dims=True)
    b_over = tl.rsqrt(tl.maximum(b_square, SMALLEST))
    b_over += b_over * (0.5 - 0.5 * b_square * b_over * b_over)  # to the last bit: powers multiply what it is off
    # A scaled row is no shorter than one unless it is zero, or as good as: then the inverse must still be finite.
    return b_c * b_over, b_unit * (b_square * b_over), tl.minimum(b_over, 1.0) * b_inverse


@triton.jit
def _query_power(b_r):
    """The power of queries of length r, and r ln(2) times its slope."""
    # Beyond, nothing changes; but the product of an endless length with no slope would be NaN.
    b_r = tl.minimum(b_r, FLAT)
    b_e = tl.exp(-2 * b_r)
    b_inverse = 1 / (1 + b_e)
    b_rest = 2 * b_e * b_inverse  # 1 - tanh(r)
    return b_rest * -POWER + POWER * (1 + OFFSET), b_r * b_rest * b_inverse * (2 * POWER * LN2)


@triton.jit
def _root(b_u, b_power, FAST: tl.constexpr):
    """Powers u ** (power - 1) of nonnegative numbers, and log2(u), which is finite at zero."""
    if INTERPRETED or not FAST or is_hip():  # AMD's library has no fast one
        b_log = tl.log2(b_u + SMALLEST)
        b_root = tl.exp2((b_power - 1) * b_log)
    else:
        b_log = libdevice.fast_log2f(b_u + SMALLEST)
        b_root = libdevice.exp2((b_power - 1) * b_log)
    return tl.where(b_u == 0, 0.0, b_root), b_log


@triton.jit
def _sine(b_s):
    """The sine of s quarter turns, for s from zero to one."""
    # tl.sin would be ready for any angle, by way of local memory and float64. This is s + s (1 - s^2) q(s^2), which is
    # exact at either end and, with q fitted for the least relative error, 6e-9 from the sine between them.
    b_t = b_s * b_s
    b_q = (0.004522112551689448 - 0.00015128080328304926 * b_t) * b_t - 0.07516735550821897
    return b_s + b_s * ((1 - b_t) * (0.5707963174075402 + b_q * b_t))


@triton.jit
def _phase(b_d):
    """The sines of the near and the far phase, and the slope of the near one by the direction, less their signs."""
    b_e = tl.exp(b_d * -STEEPNESS)  # at most e^40, since no direction is longer than one
    b_near = 1 / (1 + b_e)
    b_far = b_e * b_near  # 1 - b_near, without the subtraction
    b_slope = b_near * b_far * (STEEPNESS * QUARTER)
    return _sine(b_near), _sine(b_far), b_slope


@triton.jit
def _nala_query(b_x, FAST: tl.constexpr):
    """The direction's magnitude to a power that grows with r, in the half of its sign."""
    b_d, b_r, _inverse = _direction(b_x)
    b_power, _slope = _query_power(b_r)
    b_u = tl.abs(b_d)
    b_root, _log = _root(b_u, b_power, FAST)
    b_f = b_u * b_root
    return _double(tl.where(b_x < 0, 0.0, b_f), tl.where(b_x < 0, b_f, 0.0))


@triton.jit
def _nala_query_gradient(b_x, b_df, FAST: tl.constexpr):
    """Gradient of the query map."""
    b_d, b_r, b_inverse = _direction(b_x)
    b_power, b_power_slope = _query_power(b_r)
    b_root, b_log = _root(tl.abs(b_d), b_power, FAST)
    b_positive, b_negative = _halve(b_df)
    b_df = tl.where(b_x < 0, b_negative, b_positive)
    return _signed_gradient(b_df, b_d, b_inverse, b_power, b_power_slope, b_root, b_log)


@triton.jit
def _signed_gradient(b_df, b_d, b_inverse, b_power, b_power_slope, b_root, b_log):
    """Gradient of the query map by that of the feature of each channel's sign."""
    # f = u^p, with u = |d| and d = x / r.
    b_u = tl.abs(b_d)
    b_df = b_root * b_df
    b_sum = tl.sum(b_u * b_df * (b_power_slope * b_log - b_power), 1, keep_dims=True)
    return (_with_sign(b_df, b_d) * b_power + b_sum * b_d) * b_inverse


@triton.jit
def _with_sign(b_x, b_signs):
    """Numbers that change sign where `b_signs` are negative: by their bits, for which nothing is compared."""
    b_bits = b_signs.to(tl.int32, bitcast=True) & -0x80000000
    return (b_x.to(tl.int32, bitcast=True) ^ b_bits).to(tl.float32, bitcast=True)


@triton.jit
def _nala_key(b_x):
    """The cube of the magnitude of x, in the half of its sign."""
    b_f = b_x * b_x * b_x
    return _double(tl.where(b_x < 0, 0.0, b_f), tl.where(b_x < 0, -b_f, 0.0))


@triton.jit
def _nala_key_gradient(b_x, b_df):
    """Gradient of the key map."""
    b_positive, b_negative = _halve(b_df)
    return tl.where(b_x < 0, -b_negative, b_positive) * (b_x * b_x * POWER)


@triton.jit
def _cosine_query(b_x, FAST: tl.constexpr):
    """The direction's magnitude to a power that grows with r, times the sine of each half's phase."""
    b_d, b_r, _inverse = _direction(b_x)
    b_power, _slope = _query_power(b_r)
    b_root, _log = _root(tl.abs(b_d), b_power, FAST)
    b_near, b_far, _phase_slope = _phase(b_d)
    b_f = tl.abs(b_d) * b_root
    return _double(b_f * b_near, b_f * b_far)


@triton.jit
def _cosine_query_gradient(b_x, b_df, FAST: tl.constexpr):
    """Gradient of the query map with a phase."""
    b_d, b_r, b_inverse = _direction(b_x)
    b_power, b_power_slope = _query_power(b_r)
    b_root, b_log = _root(tl.abs(b_d), b_power, FAST)
    b_near, b_far, b_slope = _phase(b_d)
    b_dnear, b_dfar = _halve(b_df)
    return _phased_gradient(
        b_dnear, b_dfar, b_d, b_inverse, b_power, b_power_slope, b_root, b_log, b_near, b_far, b_slope
    )


@triton.jit
def _phased_gradient(b_dnear, b_dfar, b_d, b_inverse, b_power, b_power_slope, b_root, b_log, b_near, b_far, b_slope):
    """Gradient of the query map with a phase by those of its two features."""
    # f = |d|^p w(d) in either half, with slope sign(d) |d|^(p - 1) (p w + d w') by d.
    b_wave = b_near * b_dnear + b_far * b_dfar
    b_turn = b_d * b_slope * (b_far * b_dnear - b_near * b_dfar)
    b_root = tl.where(b_d < 0, -b_root, b_root)
    b_by_d = b_root * (b_power * b_wave + b_turn)
    b_sum = tl.sum(b_d * (b_root * b_power_slope * b_log * b_wave - b_by_d), 1, keep_dims=True)
    return (b_by_d + b_sum * b_d) * b_inverse


@triton.jit
def _cosine_key(b_x):
    """The cube of the magnitude of x, times the sine of each half's phase."""
    b_d, _r, _inverse = _direction(b_x)
    b_near, b_far, _slope = _phase(b_d)
    b_f = tl.abs(b_x) * b_x * b_x
    return _double(b_f * b_near, b_f * b_far)


@triton.jit
def _cosine_key_gradient(b_x, b_df):
    """Gradient of the key map with a phase."""
    # f = |x|^3 w(d) in either half, and |x|^3 / r = x |x| d, which neither divides nor underflows as the cube does.
    b_d, _r, _inverse = _direction(b_x)
    b_near, b_far, b_slope = _phase(b_d)
    b_dnear, b_dfar = _halve(b_df)
    b_cube = b_x * tl.abs(b_x)
    b_turn = b_d * b_slope * (b_far * b_dnear - b_near * b_dfar) * b_cube
    b_sum = tl.sum(b_d * b_turn, 1, keep_dims=True)
    return (b_near * b_dnear + b_far * b_dfar) * b_cube * POWER + b_turn - b_sum * b_d
