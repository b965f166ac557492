"""What every kernel does with a block of tokens: load it, turn it, multiply it, weigh it.

A block is (BN, BF) numbers, tokens by channels. BF is the head width rounded up to a power of two, BD, or twice that
where a feature map doubles the width: each channel then stands in both halves. Rows and channels past the end are zero.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs
from triton.language.target_info import is_hip

# The interpreter multiplies bfloat16 wrongly; there the rounded numbers are multiplied in float32, which is the same.
INTERPRETED: tl.constexpr = tl.constexpr(knobs.runtime.interpret)
GUARD: tl.constexpr = tl.constexpr(1e-12)  # as in affinear.ops.mechanisms
EPSILON: tl.constexpr = tl.constexpr(1e-6)
FINE_UNIT: tl.constexpr = tl.constexpr(2.0**14)  # twice this is still a float16


@triton.jit
def load_block(p_x, o_n, m_n, s_n, o_d, s_d, D, WHOLE: tl.constexpr = False):
    """Rows `o_n` (where `m_n`) and channels `o_d` (below D) of the tokens at `p_x`, zero elsewhere.

    WHOLE blocks have all their rows, and no use for `m_n`; a constant D then tells whether they have all channels too.
    """
    p_x = p_x + o_n[:, None] * s_n + o_d[None, :] * s_d
    if not WHOLE:
        b_x = tl.load(p_x, mask=m_n[:, None] & (o_d < D)[None, :], other=0.0)
    elif o_d.shape[0] == D:
        b_x = tl.load(p_x)
    else:
        b_x = tl.load(p_x, mask=(o_d < D)[None, :], other=0.0)
    return b_x


@triton.jit
def store_block(p_x, b_x, o_n, m_n, s_n, o_d, D, WHOLE: tl.constexpr = False):
    """Write a block to tokens whose channels lie side by side; as `load_block`."""
    p_x = p_x + o_n[:, None] * s_n + o_d[None, :]
    b_x = b_x.to(p_x.dtype.element_ty)
    if not WHOLE:
        tl.store(p_x, b_x, mask=m_n[:, None] & (o_d < D)[None, :])
    elif o_d.shape[0] == D:
        tl.store(p_x, b_x)
    else:
        tl.store(p_x, b_x, mask=(o_d < D)[None, :])


@triton.jit
def load_turns(p_turns, o_n, m_n, o_d, D, WHOLE: tl.constexpr = False):
    """Cosines and sines of channel pairs, (BN, BF / 2) each, from one packed table (N, D): cos, sin, cos, sin, ..."""
    return unpack_turns(load_block(p_turns, o_n, m_n, D, o_d, 1, D, WHOLE))


@triton.jit
def unpack_turns(b_turns):
    """Cosines and sines from a block of the packed table."""
    return tl.split(tl.reshape(b_turns.to(tl.float32), (b_turns.shape[0], b_turns.shape[1] // 2, 2)))


@triton.jit
def channels(D, BD: tl.constexpr, BF: tl.constexpr):
    """Which channel each column of a block holds, and where its feature lies among the D or 2 D of a state."""
    o_f = tl.arange(0, BF)
    o_d = o_f % BD
    return o_d, o_f // BD * D + o_d


@triton.jit
def turn(b_x, b_cos, b_sin):
    """Turn adjacent channels (BN, BF) by the angles whose cosines and sines are (BN, BF / 2)."""
    b_even, b_odd = tl.split(tl.reshape(b_x, (b_x.shape[0], b_x.shape[1] // 2, 2)))
    b_pairs = tl.join(b_even * b_cos - b_odd * b_sin, b_odd * b_cos + b_even * b_sin)
    return tl.reshape(b_pairs, (b_x.shape[0], b_x.shape[1]))


@triton.jit
def pin(b_x):
    """The block itself, which the compiler may then move but not compute again."""
    if INTERPRETED or is_hip():  # the instruction is NVIDIA's
        return b_x
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [b_x], dtype=tl.float32, is_pure=False, pack=1)


@triton.jit
def beside(b_x, b_y):
    """The block itself, dealt out to threads as the product `b_y` is: what is computed of both is then never moved."""
    if INTERPRETED or is_hip():
        return b_x
    else:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r,r", [b_x, b_y], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def anew(i):
    """The number itself, of which the compiler does not know that it has seen it."""
    if INTERPRETED or is_hip():
        return i
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [i], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def operand(b_x, ROUND: tl.constexpr):
    """Computed numbers as a factor of a product: rounded once where the tokens are bfloat16, as they are elsewhere."""
    return b_x.to(tl.bfloat16) if ROUND else b_x


@triton.jit
def halves(b_x, PRECISION: tl.constexpr):
    """Two bfloat16 blocks whose sum has the first 16 bits of a float32 one; under other precisions the block twice."""
    if PRECISION == "split":
        b_x = b_x.to(tl.float32)
        b_high = b_x.to(tl.bfloat16)
        b_low = (b_x - b_high.to(tl.float32)).to(tl.bfloat16)
    else:
        b_high = b_x
        b_low = b_x
    return b_high, b_low


@triton.jit
def unit_of(b_most):
    """A power of two near these magnitudes, and its inverse: multiplying by it rounds nothing."""
    # Only exponents differ. Within these limits both are normal numbers, for zero magnitudes too.
    b_bits = b_most.to(tl.int32, bitcast=True) & 0x7F800000
    b_bits = tl.minimum(tl.maximum(b_bits, 0x00800000), 0x7E800000)
    return b_bits.to(tl.float32, bitcast=True), (0x7F000000 - b_bits).to(tl.float32, bitcast=True)


@triton.jit
def factors(b_x, PRECISION: tl.constexpr, FINE: tl.constexpr):
    """A state as a second factor: its halves, and one; FINE, the upper half, the state over a unit, and that unit.

    FINE numbers are float16, with three more bits than bfloat16. See `times_state` and `times_features`.
    """
    b_high, b_low = halves(b_x, PRECISION)
    unit = 1.0
    if FINE:
        unit, inverse = unit_of(tl.max(tl.max(tl.abs(b_x), 1), 0))
        b_low = (b_x * inverse).to(tl.float16)
    return b_high, b_low, unit


@triton.jit
def dot(b_a, b_b, b_acc, PRECISION: tl.constexpr):
    """One product of matrix units, added to float32 sums."""
    if PRECISION != "split":
        b_acc = tl.dot(b_a, b_b, b_acc, input_precision=PRECISION)
    elif INTERPRETED:
        b_acc = tl.dot(b_a.to(tl.float32), b_b.to(tl.float32), b_acc, input_precision="ieee")
    else:
        b_acc = tl.dot(b_a, b_b, b_acc)
    return b_acc


@triton.jit
def product(b_a, b_high, b_low, b_acc, PRECISION: tl.constexpr):
    """`b_acc + b_a @ (b_high + b_low)`, the second factor from `halves`; a bfloat16 first factor is taken as it is."""
    if PRECISION != "split":
        b_acc = dot(b_a.to(tl.float32), b_high, b_acc, PRECISION)
    elif b_a.dtype == tl.bfloat16:
        b_acc = dot(b_a, b_low, b_acc, PRECISION)
        b_acc = dot(b_a, b_high, b_acc, PRECISION)
    else:
        b_a_high, b_a_low = halves(b_a, PRECISION)
        b_acc = dot(b_a_low, b_high, b_acc, PRECISION)
        b_acc = dot(b_a_high, b_low, b_acc, PRECISION)
        b_acc = dot(b_a_high, b_high, b_acc, PRECISION)
    return b_acc


@triton.jit
def times_state(b_x, b_high, b_low, b_acc, PRECISION: tl.constexpr, ROUND: tl.constexpr):
    """`b_acc` and the product of tokens, as they were loaded, with a state from `halves` or `factors`.

    What comes of it are gradients: where they are rounded to 8 bits in the end, the first 8 of the state will do.
    """
    return dot(b_x, b_high, b_acc, PRECISION) if ROUND else product(b_x, b_high, b_low, b_acc, PRECISION)


@triton.jit
def times_features(
    b_f, b_high, b_low, unit, PRECISION: tl.constexpr, ROUND: tl.constexpr, FINE: tl.constexpr,
    BOUNDED: tl.constexpr = False,
):  # fmt: skip
    """The product of computed numbers with a state from `factors`, FINE or not; BOUNDED numbers are at most two."""
    b_zero = tl.zeros((b_f.shape[0], b_high.shape[1]), tl.float32)
    if FINE and BOUNDED:
        return dot((b_f * FINE_UNIT).to(tl.float16), b_low, b_zero, PRECISION) * (unit / FINE_UNIT)
    elif FINE:
        b_unit, b_inverse = unit_of(tl.max(tl.abs(b_f), 1, keep_dims=True))
        return dot((b_f * b_inverse).to(tl.float16), b_low, b_zero, PRECISION) * (b_unit * unit)
    else:
        return product(operand(b_f, ROUND), b_high, b_low, b_zero, PRECISION)


@triton.jit
def token_product(b_a, b_b, b_acc, PRECISION: tl.constexpr):
    """`b_acc + b_a^T @ b_b`, summed over the tokens of two blocks (BN, ...); bfloat16 blocks are taken as they are.

    Tokens as they were loaded should come first: they are read where they lie, and only the second block is moved.
    """
    if PRECISION != "split":
        # Blocks are summed on their own before they are added: many small sums round less than a long one.
        b_sum = tl.zeros(b_acc.shape, tl.float32)
        b_acc += dot(tl.trans(b_a.to(tl.float32)), b_b.to(tl.float32), b_sum, PRECISION)
    elif b_a.dtype == tl.bfloat16 and b_b.dtype == tl.bfloat16:
        b_acc = dot(tl.trans(b_a), b_b, b_acc, PRECISION)
    else:
        b_a_high, b_a_low = halves(b_a, PRECISION)
        b_b_high, b_b_low = halves(b_b, PRECISION)
        b_acc = dot(tl.trans(b_a_low), b_b_high, b_acc, PRECISION)
        b_acc = dot(tl.trans(b_a_high), b_b_low, b_acc, PRECISION)
        b_acc = dot(tl.trans(b_a_high), b_b_high, b_acc, PRECISION)
    return b_acc


@triton.jit
def token_sum(b_weight, b_x, b_acc, PRECISION: tl.constexpr):
    """`b_acc + sum of b_weight * b_x` over tokens, by the matrix units: the 16 rows of (16, ...) are all the same."""
    if PRECISION != "split":
        b_acc += tl.sum(b_weight.to(tl.float32)[:, None] * b_x.to(tl.float32), 0)[None, :]
    else:
        b_weight = tl.broadcast_to(b_weight[:, None], (b_x.shape[0], 16))
        b_acc = token_product(b_weight, b_x, b_acc, PRECISION)
    return b_acc


@triton.jit
def no_sum(WIDTH: tl.constexpr):
    """What `token_sum` starts from."""
    return tl.zeros((16, WIDTH), tl.float32)


@triton.jit
def total(b_acc):
    """What `token_sum` has summed."""
    return tl.max(b_acc, 0)


@triton.jit
def gain(b_z, GAIN: tl.constexpr, RELEASED: tl.constexpr):
    """The gain of z and its derivative. GAIN is "one", "reciprocal" or "one_plus_reciprocal"."""
    if GAIN == "one":
        b_gain = tl.full(b_z.shape, 1.0, tl.float32)
        b_slope = tl.zeros(b_z.shape, tl.float32)
    else:
        b_gain = 1 / (b_z + EPSILON if RELEASED else tl.maximum(b_z, GUARD))
        b_slope = -b_gain * b_gain
        if not RELEASED:
            b_slope = tl.where(b_z >= GUARD, b_slope, 0.0)
        if GAIN == "one_plus_reciprocal":
            b_gain += 1
    return b_gain, b_slope


@triton.jit
def mean_weight(b_z, b_added, GAIN: tl.constexpr):
    """Weight of the mean value in the released networks, and its derivatives by z and by what rotation added to it."""
    b_inverse = 1 / (b_z + EPSILON)
    b_by_z = (EPSILON - b_added) * b_inverse * b_inverse
    b_by_added = 1 + b_inverse if GAIN == "one_plus_reciprocal" else b_inverse
    return b_z * b_inverse + b_added * b_by_added, b_by_z, b_by_added
