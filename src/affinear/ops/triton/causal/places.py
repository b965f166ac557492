"""Where things are: segments of sequences, the rows of a chunk, the keys among them that take part."""

from __future__ import annotations

import triton
import triton.language as tl

SEQUENCES: tl.constexpr = tl.constexpr(256)  # looked through at a time
FEW: tl.constexpr = tl.constexpr(16)  # tokens in a chunk where nothing is rounded


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


@triton.jit
def find_pairs(x, o_n, m_k, zero):
    """Which keys of a chunk each of its queries sees. No query of the sequence sees what lies past its end."""
    m_see = o_n[:, None] + zero >= o_n[None, :]
    if x.p_mask is not None:
        m_see = m_see & m_k[None, :]
    return m_see


@triton.jit
def count_keys(x, n, o_n, m_k):
    """One over the number of keys that each row sees; zero where there are none."""
    if x.p_mask is not None:
        b_n = n.to(tl.float32) + tl.cumsum(m_k.to(tl.int32), 0).to(tl.float32)
        b_share = tl.where(b_n > 0, 1 / tl.maximum(b_n, 1.0), 0.0)
    else:
        b_share = 1 / (n.to(tl.float32) + (1 + o_n).to(tl.float32))
    return b_share
