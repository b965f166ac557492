"""Gradients of causal attention: queries in a scan forwards, keys and values in a scan backwards.

The first scan needs the past, as the answers did; it leaves a few numbers of every row that the second one wants. The
second needs the future: sums over all later queries, in which keys and values are told from references that all of a
sequence shares, so that little is lost when they are rounded. Where a sequence has several segments, those sums are
first taken segment by segment, and added from last to first.

Nothing of the future is in the references either. Rows that see a wild token get NaN, and rows of a segment past the
last one with a gradient are left out if one of them is wild: a gradient of zero goes back as zero.

All of it is linear in the gradient of the answers. Where a state is too wide for one program its blocks of values come
one after the other, each adding to what the ones before left.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .blocks import (
    INTERPRETED,
    channels,
    gain,
    halves,
    load_block,
    mean_weight,
    no_sum,
    operand,
    store_block,
    times_state,
    token_product,
    token_sum,
    total,
    turn,
)
from .causal import (
    FEW,
    LARGEST,
    NOTHING,
    Plan,
    absorb,
    any_beyond,
    centre,
    count_keys,
    features_of,
    find_exact,
    find_first_key,
    find_pairs,
    find_rows,
    find_segment,
    find_slots,
    find_wild,
    length_of,
    load_first,
    load_key,
    load_keys,
    load_positions,
    load_query,
    load_value,
    number_of,
    open_past,
    past_of,
    plan_for,
    row_product,
)
from .features import feature_gradient
from .rules import Rule
from .sizes import cdiv
from .starting import on
from .statistics import Statistics

# What is kept of every row, as told from the references: factor of a score, weight of a key that scores nothing, what
# every turned feature of its chunk gets, over that factor, what those before get, and, where features are turned, what
# every plain one gets. Rounded chunks have their values as they are, told from nothing; what is before them does not.
ROWS: tl.constexpr = tl.constexpr(5)
TALL: tl.constexpr = tl.constexpr(64)  # rows of a chunk that the matrix units of a Hopper take at a time
WIDE = 1024  # numbers that one program adds up


# What both directions share


@triton.jit
def load_gradient(x, i_b, i_n, i_h, o_n, m_n, o_e):
    """A block of the gradient of the answers."""
    p_do = x.p_do + i_b * x.s_gb + i_n * x.s_gn + i_h * x.s_gh
    return load_block(p_do, o_n, m_n, x.s_gn, o_e, x.s_gd, x.E)


@triton.jit
def load_means(x, state, i, o_d, o_s, o_e):
    """Mean feature, turned if features are, and mean value of entry `i` of a state."""
    i = tl.cast(i, tl.int64)
    p_key = state.key_mean
    if x.p_turns is not None:
        p_key = state.rotated_key_mean
    b_key = tl.load(p_key + i * x.F + o_s, mask=o_d < x.D, other=0.0)
    return b_key, tl.load(state.value_mean + i * x.E + o_e, mask=o_e < x.E, other=0.0)


@triton.jit
def load_references(
    x, initial, final, i, i_b, i_g, first, length, o_d, o_s, o_e,
    MAP: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, ROUND: tl.constexpr,
    SEGMENT: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """What the second scan tells keys and values from; whether the state in the end is wild.

    It is the means before the tokens. Where there are none, it is the first key and value, or, where keys are rounded,
    the mean of the first few of those that are not: those that are lie nearer to it. Small chunks, whose values meet
    the state in two halves, tell them from nothing.
    """
    b_key, b_value = load_means(x, final, i, o_d, o_s, o_e)
    wild = any_beyond(b_key, LARGEST) | any_beyond(b_value, LARGEST)
    stop = tl.minimum(SEGMENT, length)
    i_n = find_first_key(x, i_b, 0, stop, SEGMENT)
    rows = tl.minimum(BC - i_n % BC, stop - i_n) if ROUND else tl.minimum(stop - i_n, 1)
    _plain, b_turned, b_first = load_first(x, i_b, first, i_n, i_g, rows, o_d, o_e, MAP, EVEN, PRECISION, BD)
    b_key = tl.where(i_n < stop, b_turned, b_key)
    b_value = tl.where(i_n < stop, b_first, b_value)
    if initial.count is not None:
        some = tl.load(initial.count + i) > 0
        b_key_before, b_value_before = load_means(x, initial, i, o_d, o_s, o_e)
        b_key = tl.where(some, b_key_before, b_key)
        b_value = tl.where(some, b_value_before, b_value)
    if ROUND and BC < TALL:
        b_value = tl.zeros_like(b_value)
    b_key = tl.where(tl.abs(b_key) <= LARGEST, b_key, 0.0)
    b_value = tl.where(tl.abs(b_value) <= LARGEST, b_value, 0.0)
    return b_key, b_value, wild


@triton.jit
def rows_at(x, p_rows, i_b, i_n, i_h):
    """Where the kept numbers of a row lie, (B, H, ROWS, N)."""
    return p_rows + (i_b * x.H + i_h) * ROWS * length_of(x) + i_n


@triton.jit
def unturn(x, b_f, b_r, b_cos, b_sin):
    """Gradient of features from those of plain and turned ones."""
    if x.p_turns is not None:
        b_f += turn(b_r, b_cos, -b_sin)
    else:
        b_f = b_r
    return b_f


@triton.jit
def of_keys(x, b_x, m_k):
    """Rows of keys that take part, zero elsewhere; past the end of a sequence nobody looks."""
    if x.p_mask is not None:
        b_x = tl.where(m_k[:, None], b_x, 0.0)
    return b_x


@triton.jit
def store_token_gradient(
    x, p_dx, p_sum, i_row, H, b_x, b_f, b_df, o_n, m_n, m_k, o_d, o_s,
    MAP: tl.constexpr, QUERY: tl.constexpr, PRECISION: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """From the gradient of features to that of tokens, or to a sum that further blocks of values add to."""
    if not (FIRST and LAST):
        p_sum += i_row * x.F + o_n[:, None] * (H * x.F) + o_s[None, :]
        m_sum = m_n[:, None] & (o_d < x.D)[None, :]
    if not FIRST:
        b_df += tl.load(p_sum, mask=m_sum, other=0.0)
    if LAST:
        b_dx = feature_gradient(b_x, b_f, b_df, MAP, QUERY, PRECISION == "split")
        if not QUERY:
            b_dx = of_keys(x, b_dx, m_k)
        store_block(p_dx + i_row * x.D, b_dx, o_n, m_n, H * x.D, tl.arange(0, b_x.shape[1]), x.D)
    else:
        tl.store(p_sum, b_df, mask=m_sum)


# Queries


@triton.jit
def _add_two(a, b, other_a, other_b):
    """Two sums at once."""
    return a + other_a, b + other_b


@triton.jit
def sum_two(b_a, b_b):
    """Sums of the rows of two blocks: together they wait for each other once, not twice."""
    if INTERPRETED:
        return tl.sum(b_a, 1), tl.sum(b_b, 1)
    else:
        return tl.reduce((b_a, b_b), 1, _add_two)


@triton.jit
def _add_three(a, b, c, other_a, other_b, other_c):
    """Three sums at once."""
    return a + other_a, b + other_b, c + other_c


@triton.jit
def sum_three(b_a, b_b, b_c):
    """Sums of the rows of three blocks, likewise."""
    if INTERPRETED:
        return tl.sum(b_a, 1), tl.sum(b_b, 1), tl.sum(b_c, 1)
    else:
        return tl.reduce((b_a, b_b, b_c), 1, _add_three)


@triton.jit
def query_gradient(
    x, p_rows, b_f, b_r, b_do, b_kf, b_kr, b_v, o_n, m_n, m_see, b_share, b_plain, b_turned, b_value, b_scatter,
    b_key_mean, b_value_mean, GAIN: tl.constexpr, RELEASED: tl.constexpr, PRECISION: tl.constexpr,
    ROUND: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Gradients of the features of a chunk's queries, plain and turned; what keys will want of the rows is written."""
    b_zero = tl.zeros((m_see.shape[0], b_kr.shape[1]), tl.float32)
    b_wide = b_do.to(tl.float32)
    b_past, b_apart = sum_two(b_wide * b_value[None, :], b_wide * (b_value - b_value_mean)[None, :])
    b_p = row_product(b_do, tl.trans(b_v), tl.zeros(m_see.shape, tl.float32), PRECISION)
    if ROUND:
        b_p -= b_past[:, None]
    b_p = tl.where(m_see, b_p, 0.0)
    b_mean = tl.sum(b_p, 1) * b_share
    b_p = operand(tl.where(m_see, b_p - b_mean[:, None], 0.0), ROUND)
    b_high, b_low = halves(b_scatter, PRECISION)
    b_dr = times_state(b_do, b_high, b_low, b_zero, PRECISION, ROUND)
    b_dr += row_product(b_p, b_kr, b_zero, PRECISION)

    # Running means: the sum over the keys in sight is a product with ones and zeros.
    b_one = operand(m_see.to(tl.float32), PRECISION == "split")
    b_seen = b_plain[None, :] + b_share[:, None] * row_product(b_one, b_kf, b_zero, PRECISION)
    b_turned_seen = b_seen
    if x.p_turns is not None:
        b_turned_seen = b_turned[None, :] + b_share[:, None] * row_product(b_one, b_kr, b_zero, PRECISION)
    b_seen_score, b_away_score, b_dgain = sum_three(
        b_f * b_seen, b_r * (b_turned_seen - b_key_mean[None, :]), b_r * b_dr
    )
    b_z = x.scale * b_seen_score
    b_gain, b_by_z = gain(b_z, GAIN, RELEASED)
    b_slope = x.scale * b_gain * b_share
    b_dz = b_by_z * x.scale * b_share * b_dgain
    b_level = tl.where(b_share > 0, 1.0, 0.0)
    b_dadded = tl.zeros_like(b_z)
    if RELEASED:
        b_added = tl.zeros_like(b_z)
        if x.p_turns is not None:
            b_added = x.scale * tl.sum(b_r * b_turned_seen - b_f * b_seen, 1)
        b_weight, b_by_z, b_by_added = mean_weight(b_z, b_added, GAIN)
        b_dlevel = b_level * (b_past + b_mean)
        b_level *= b_weight
        b_dz += b_by_z * b_dlevel
        if x.p_turns is not None:
            b_dadded = b_by_added * b_dlevel
    b_df = (x.scale * (b_dz - b_dadded))[:, None] * b_seen
    b_weight = b_level * b_share - b_slope * b_away_score
    b_dr = b_slope[:, None] * b_dr
    if RELEASED and x.p_turns is not None:
        b_dr += (x.scale * b_dadded)[:, None] * b_turned_seen
    if x.p_turns is None:
        b_dr += b_df

    b_lift = x.scale * b_share * (b_dz - b_dadded)
    b_pull = x.scale * b_share * b_dadded
    if x.p_turns is None:
        b_pull += b_lift
    b_pull = tl.where(b_slope != 0, b_pull / tl.where(b_slope != 0, b_slope, 1.0), 0.0)
    b_later = b_pull - (b_apart + b_mean)
    b_pull = b_pull - (b_past + b_mean) if ROUND else b_later
    p_rows += o_n
    if not FIRST:
        b_pull += tl.load(p_rows + 2 * length_of(x), mask=m_n, other=0.0)
        b_later += tl.load(p_rows + 3 * length_of(x), mask=m_n, other=0.0)
    tl.store(p_rows, b_slope, mask=m_n)
    tl.store(p_rows + length_of(x), b_weight, mask=m_n)
    tl.store(p_rows + 2 * length_of(x), b_pull, mask=m_n)
    tl.store(p_rows + 3 * length_of(x), b_later, mask=m_n)
    if x.p_turns is not None:
        if not FIRST:
            b_lift += tl.load(p_rows + 4 * length_of(x), mask=m_n, other=0.0)
        tl.store(p_rows + 4 * length_of(x), b_lift, mask=m_n)
    return b_df, b_dr


@triton.jit
def query_rows(
    x, p_dq, p_sum, p_rows, i_b, i_g, first, begin, stop, end, key_end, o_d, o_s, o_e,
    n, b_plain, b_turned, b_value, b_scatter, b_first, b_key_mean, b_value_mean,
    MAP: tl.constexpr, EVEN: tl.constexpr, GAIN: tl.constexpr, RELEASED: tl.constexpr, PRECISION: tl.constexpr,
    ROUND: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, GROUP: tl.constexpr,
    BC: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries of the chunks that begin before `stop`, of a segment up to `end`.

    Keys and values from `key_end` on are left out, and rows from there on get NaN.
    """
    o_n = tl.arange(0, BC)
    for i_n in range(begin, stop, BC):
        i_r = first + i_n
        m_n, m_k, m_n_load, m_k_load = find_rows(x, i_b, i_n, o_n, end, key_end)
        b_cos, b_sin = load_positions(x, i_r, o_n, m_n_load, o_d)
        number = number_of(x, m_k, end - i_n)
        b_kf, b_kr, b_v, b_dkf, b_dkr, b_dv, b_ref = load_keys(
            x, i_b, i_r, i_g, o_n, m_k_load, m_k, o_e, b_cos, b_sin, n, number, b_plain, b_turned, b_value, b_first,
            MAP, EVEN, PRECISION, ROUND, BD,
        )  # fmt: skip
        m_see = find_pairs(x, o_n, m_k, 0)
        b_share = tl.where(o_n < key_end - i_n, count_keys(x, n, o_n, m_k), float("nan"))
        for j_h in range(GROUP):
            i_h = i_g * GROUP + j_h
            b_q = load_query(x, i_b, i_r, i_h, o_n, m_n_load, BD)
            b_do = load_gradient(x, i_b, i_r, i_h, o_n, m_n_load, o_e)
            b_f, b_r = features_of(x, b_q, b_cos, b_sin, MAP, True, EVEN, PRECISION)
            b_df, b_dr = query_gradient(
                x, rows_at(x, p_rows, i_b, i_r, i_h), b_f, b_r, b_do, b_kf, b_kr, b_v, o_n, m_n, m_see, b_share,
                b_plain, b_turned, b_ref, b_scatter, b_key_mean, b_value_mean,
                GAIN, RELEASED, PRECISION, ROUND, FIRST,
            )  # fmt: skip
            store_token_gradient(
                x, p_dq, p_sum, (i_b * length_of(x) + i_r) * x.H + i_h, x.H, b_q, b_f,
                unturn(x, b_df, b_dr, b_cos, b_sin),
                o_n, m_n, m_n, o_d, o_s, MAP, True, PRECISION, FIRST, LAST,
            )  # fmt: skip
        n, b_plain, b_turned, b_value, b_scatter = absorb(
            x, n, number, b_plain, b_turned, b_value, b_scatter, m_k, b_kr, b_v, b_dkf, b_dkr, b_dv, PRECISION, ROUND
        )
    return n, b_plain, b_turned, b_value, b_scatter


@triton.jit
def query_kernel(
    x, past, initial, final, p_dq, p_sum, p_rows, i_e,
    MAP: tl.constexpr, EVEN: tl.constexpr, GAIN: tl.constexpr, RELEASED: tl.constexpr, PRECISION: tl.constexpr,
    ROUND: tl.constexpr, SEVERAL: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
    GROUP: tl.constexpr, SEGMENT: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries of one segment that share a key head, as far as one block of the values tells."""
    i_t, i_g = tl.program_id(0) // x.G, (tl.program_id(0) % x.G).to(tl.int64)
    i_s, i_b, first, length, begin = find_segment(x, i_t, SEGMENT)
    if begin >= length:
        return
    stop = tl.minimum(begin + SEGMENT, length)
    o_d, o_s = channels(x.D, BD, BF)
    o_e = i_e * BE + tl.arange(0, BE)
    i = (i_t if SEVERAL else i_s) * x.G + i_g
    n, b_plain, b_turned, b_value, b_scatter, b_first, exact = open_past(
        x, past, i, i_b, i_g, first, begin, stop, o_d, o_s, o_e, past.count is not None,
        MAP, EVEN, PRECISION, ROUND, SEGMENT, BC, BD, BF, BE,
    )  # fmt: skip
    b_key_mean, b_value_mean, wild = load_references(
        x, initial, final, i_s * x.G + i_g, i_b, i_g, first, length, o_d, o_s, o_e,
        MAP, EVEN, PRECISION, ROUND, SEGMENT, BC, BD,
    )  # fmt: skip
    key_end = stop
    if wild:
        key_end = find_wild(x, i_b, i_g, first, begin, stop, o_e, MAP, EVEN, PRECISION, FEW, BD)
    if ROUND:
        n, b_plain, b_turned, b_value, b_scatter = query_rows(
            x, p_dq, p_sum, p_rows, i_b, i_g, first, begin, exact, stop, key_end, o_d, o_s, o_e,
            n, b_plain, b_turned, b_value, b_scatter, b_first, tl.zeros_like(b_key_mean), tl.zeros_like(b_value_mean),
            MAP, EVEN, GAIN, RELEASED, PRECISION, False, FIRST, LAST, GROUP, FEW, BD,
        )  # fmt: skip
    query_rows(
        x, p_dq, p_sum, p_rows, i_b, i_g, first, exact, stop, stop, key_end, o_d, o_s, o_e,
        n, b_plain, b_turned, b_value, b_scatter, b_first, b_key_mean, b_value_mean,
        MAP, EVEN, GAIN, RELEASED, PRECISION, ROUND, FIRST, LAST, GROUP, BC, BD,
    )  # fmt: skip


# The future


@triton.jit
def load_rows(x, p_rows, o_n, m_n, FIRST: tl.constexpr):
    """What is kept of a chunk's rows. Only the first block of values counts what is no product with values."""
    p_rows += o_n
    b_slope = tl.load(p_rows, mask=m_n, other=0.0)
    b_level = tl.load(p_rows + length_of(x), mask=m_n, other=0.0)
    b_pull = tl.zeros_like(b_slope)
    b_later = tl.zeros_like(b_slope)
    b_lift = tl.zeros_like(b_slope)
    if FIRST:
        b_pull = tl.load(p_rows + 2 * length_of(x), mask=m_n, other=0.0)
        b_later = tl.load(p_rows + 3 * length_of(x), mask=m_n, other=0.0)
        if x.p_turns is not None:
            b_lift = tl.load(p_rows + 4 * length_of(x), mask=m_n, other=0.0)
    return b_slope, b_level, b_pull, b_later, b_lift


@triton.jit
def find_live(
    x, p_rows, i_b, i_g, first, begin, stop,
    GROUP: tl.constexpr, SEGMENT: tl.constexpr, BC: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """End of the rows of a segment that are to be looked at: the last one with a gradient, if any row is wild."""
    o_s = tl.arange(0, SEGMENT)
    wild = begin < 0
    for j_h in range(GROUP):
        p_row = rows_at(x, p_rows, i_b, first + begin, i_g * GROUP + j_h) + o_s
        for i in tl.static_range(1, ROWS - 1):  # a wild slope or lift shows in these three
            wild = wild | any_beyond(tl.load(p_row + i * length_of(x), mask=begin + o_s < stop, other=0.0), LARGEST)
    end = stop
    if wild:
        end = begin
        o_n = tl.arange(0, BC)
        for i_n in range(begin, stop, BC):
            for i in range(GROUP * tl.cdiv(x.E, BE)):
                o_e = i // GROUP * BE + tl.arange(0, BE)
                b_do = load_gradient(x, i_b, first + i_n, i_g * GROUP + i % GROUP, o_n, i_n + o_n < stop, o_e)
                m_live = tl.max((b_do.to(tl.float32) != 0).to(tl.int32), 1) > 0
                end = tl.maximum(end, tl.max(tl.where(m_live, i_n + o_n + 1, begin), 0))
    return end


@triton.jit
def weighted_sum(b_weight, b_x, PRECISION: tl.constexpr, ROUND: tl.constexpr):
    """Sum of a block's rows by their weights; by the matrix units where the block is bfloat16 and tall."""
    if ROUND and b_x.shape[0] >= TALL:
        b_high, b_low = halves(b_weight, PRECISION)
        b_sum = total(token_sum(b_high, b_x, token_sum(b_low, b_x, no_sum(b_x.shape[1]), PRECISION), PRECISION))
    else:
        b_sum = tl.sum(b_weight[:, None] * b_x.to(tl.float32), 0)
    return b_sum


@triton.jit
def foresee(
    x, b_sum, b_turned, b_plain, b_value, b_f, b_r, b_scaled, b_do, b_slope, b_level, b_later, b_lift,
    PRECISION: tl.constexpr, ROUND: tl.constexpr, OF_KEYS: tl.constexpr, OF_VALUES: tl.constexpr,
):  # fmt: skip
    """Add the queries of a chunk to what earlier keys will get: sum (BE, BF), and what does not depend on them.

    Turned features times their slopes come as `b_scaled`, too.
    """
    b_sum = token_product(b_do, b_scaled, b_sum, PRECISION)
    if OF_KEYS:
        if b_scaled.shape[0] < TALL:
            # What values have in common cancels between this and the sum above: one rounding is in both.
            b_turned += tl.sum(b_later[:, None] * b_scaled.to(tl.float32), 0)
        else:
            b_turned += tl.sum((b_slope * b_later)[:, None] * b_r, 0)
        if x.p_turns is not None:
            b_plain += tl.sum(b_lift[:, None] * b_f, 0)
    if OF_VALUES:
        b_value += weighted_sum(b_level, b_do, PRECISION, ROUND)
    return b_sum, b_turned, b_plain, b_value


@triton.jit
def sums_at(x, p_sums, i, o_d, o_s, o_e):
    """Pointers to the parts of row `i` of such sums, and which of them are there."""
    p_sum = p_sums + tl.cast(i, tl.int64) * (x.E * x.F + 2 * x.F + x.E)
    p_turned = p_sum + x.E * x.F + o_s
    m_sum = (o_e < x.E)[:, None] & (o_d < x.D)[None, :]
    return p_sum + o_e[:, None] * x.F + o_s[None, :], p_turned, p_turned + x.F, p_sum + (x.E + 2) * x.F + o_e, m_sum


@triton.jit
def sum_queries_kernel(
    x, p_rows, p_sums,
    MAP: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, ROUND: tl.constexpr,
    GROUP: tl.constexpr, SEGMENT: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """What the queries of every segment have for earlier keys, but for the first of each sequence, which has none."""
    i_t, i_g, i_e = tl.program_id(0) // x.G, (tl.program_id(0) % x.G).to(tl.int64), tl.program_id(1)
    _s, i_b, first, length, begin = find_segment(x, i_t, SEGMENT)
    if (begin >= length) | (begin == 0):
        return
    o_n = tl.arange(0, BC)
    o_d, o_s = channels(x.D, BD, BF)
    o_e = i_e * BE + tl.arange(0, BE)
    b_sum = tl.zeros((BE, BF), tl.float32)
    b_turned = tl.zeros((BF,), tl.float32)
    b_plain = tl.zeros((BF,), tl.float32)
    b_value = tl.zeros((BE,), tl.float32)
    stop = tl.minimum(begin + SEGMENT, length)
    live = find_live(x, p_rows, i_b, i_g, first, begin, stop, GROUP, SEGMENT, FEW, BE)
    for i_n in range(begin, live, BC):
        i_r = first + i_n
        m_n = i_n + o_n < live
        b_cos, b_sin = load_positions(x, i_r, o_n, m_n, o_d)
        for j_h in range(GROUP):
            i_h = i_g * GROUP + j_h
            b_q = load_query(x, i_b, i_r, i_h, o_n, m_n, BD)
            b_do = load_gradient(x, i_b, i_r, i_h, o_n, m_n, o_e)
            b_f, b_r = features_of(x, b_q, b_cos, b_sin, MAP, True, EVEN, PRECISION)
            p_row = rows_at(x, p_rows, i_b, i_r, i_h)
            b_slope, b_level, _pull, b_later, b_lift = load_rows(x, p_row, o_n, m_n, True)
            b_sum, b_turned, b_plain, b_value = foresee(
                x, b_sum, b_turned, b_plain, b_value, b_f, b_r, operand(b_slope[:, None] * b_r, ROUND), b_do,
                b_slope, b_level, b_later, b_lift, PRECISION, ROUND, True, True,
            )  # fmt: skip
    p_sum, p_turned, p_plain, p_value, m_sum = sums_at(x, p_sums, i_t * x.G + i_g, o_d, o_s, o_e)
    tl.store(p_sum, b_sum, mask=m_sum)
    tl.store(p_turned, b_turned, mask=(o_d < x.D) & (i_e == 0))
    tl.store(p_plain, b_plain, mask=(o_d < x.D) & (i_e == 0))
    tl.store(p_value, b_value, mask=o_e < x.E)


@triton.jit
def add_segments_kernel(x, p_sums, SEGMENT: tl.constexpr, BW: tl.constexpr):
    """Sums over all later segments in place of those of each segment, of one sequence and head."""
    i_sg, i_w = tl.program_id(0), tl.program_id(1)
    slot, number = find_slots(x, i_sg // x.G, SEGMENT)
    width = x.E * x.F + 2 * x.F + x.E
    o_w = i_w * BW + tl.arange(0, BW)
    m_w = o_w < width
    b_sum = tl.zeros((BW,), tl.float32)
    for i in range(number):
        i_seg = number - 1 - i
        p_own = p_sums + ((slot + i_seg) * x.G + i_sg % x.G) * width + o_w
        b_own = tl.load(p_own, mask=m_w & (i_seg > 0), other=0.0)
        tl.store(p_own, b_sum, mask=m_w)
        b_sum += b_own


# Keys and values


@triton.jit
def open_future(
    x, p_sums, dfinal, final, i_t, i_s, i_g, o_d, o_s, o_e, b_key_mean, b_value_mean,
    SEVERAL: tl.constexpr, FIRST: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """What the keys of a segment get from later segments and from the state in the end."""
    b_sum = tl.zeros((BE, BF), tl.float32)
    b_turned = tl.zeros((BF,), tl.float32)
    b_plain = tl.zeros((BF,), tl.float32)
    b_value = tl.zeros((BE,), tl.float32)
    m_f, m_e = o_d < x.D, o_e < x.E
    if SEVERAL:
        p_sum, p_turned, p_plain, p_value, m_sum = sums_at(x, p_sums, i_t * x.G + i_g, o_d, o_s, o_e)
        b_sum = tl.load(p_sum, mask=m_sum, other=0.0)
        b_value = tl.load(p_value, mask=m_e, other=0.0)
        if FIRST:
            b_turned = tl.load(p_turned, mask=m_f, other=0.0)
            b_plain = tl.load(p_plain, mask=m_f, other=0.0)
    if dfinal.covariance is not None:
        i = tl.cast(i_s * x.G + i_g, tl.int64)
        n = tl.load(final.count + i)
        share = tl.where(n > 0, 1 / tl.maximum(n, 1).to(tl.float32), 0.0)
        b_key, b_mean = load_means(x, final, i, o_d, o_s, o_e)
        p_cov = dfinal.covariance + i * x.F * x.E + o_s[None, :] * x.E + o_e[:, None]
        b_dcov = share * tl.load(p_cov, mask=m_e[:, None] & m_f[None, :], other=0.0)
        b_sum += b_dcov
        # A state that nobody asked for may be wild.
        b_turned -= tl.sum(tl.where(b_dcov != 0, b_dcov * (b_mean - b_value_mean)[:, None], 0.0), 0)
        b_value -= tl.sum(tl.where(b_dcov != 0, b_dcov * (b_key - b_key_mean)[None, :], 0.0), 1)
        b_value += share * tl.load(dfinal.value_mean + i * x.E + o_e, mask=m_e, other=0.0)
        if FIRST:
            b_mean = share * tl.load(dfinal.key_mean + i * x.F + o_s, mask=m_f, other=0.0)
            if x.p_turns is not None:
                b_plain += b_mean
                b_mean = share * tl.load(dfinal.rotated_key_mean + i * x.F + o_s, mask=m_f, other=0.0)
            b_turned += b_mean
    return b_sum, b_turned, b_plain, b_value


@triton.jit
def add_own(b_dx, b_x, b_a, b_b, b_level, m_seen, PRECISION: tl.constexpr, ROUND: tl.constexpr):
    """Add to the gradients of a chunk's keys or values what its own queries have for them: (x a^T + level) b.

    Pairs are keys by queries: what comes of one product is then the first factor of the next as it lies.
    """
    b_w = row_product(b_x, tl.trans(b_a), tl.zeros(m_seen.shape, tl.float32), PRECISION)
    b_w = tl.where(m_seen, b_level[None, :] + b_w, 0.0)
    return row_product(operand(b_w, ROUND), b_b, b_dx, PRECISION)


@triton.jit
def key_rows(
    x, p_dk, p_dv, p_partial, p_rows, i_b, i_g, first, begin, stop, end, live, o_d, o_s, o_e,
    b_sum, b_turned, b_plain, b_value, b_key_mean, b_value_mean,
    MAP: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, ROUND: tl.constexpr,
    AS_THEY_ARE: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, OF_KEYS: tl.constexpr,
    GROUP: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Gradients of keys, or else of values, from `begin` to `stop`, last chunk first, of a segment up to `end`.

    Its queries up to `live` have a part in them.

    Those of keys come from values and those of values from keys, by the same sum of all later queries.
    """
    # Two groups of warps both compute a product that another one adds to. So tall chunks meet the state in one product,
    # with values told from their mean; and, where the state is wide, apart from what their own queries give.
    ONCE: tl.constexpr = ROUND and BC >= TALL
    APART: tl.constexpr = b_sum.shape[0] * b_sum.shape[1] > 64 * 64 and BC >= TALL
    o_n = tl.arange(0, BC)
    m_seen = o_n[:, None] <= o_n[None, :]
    number = tl.cdiv(stop - begin, BC)
    for i in range(number):
        i_n = begin + (number - 1 - i) * BC
        i_r = first + i_n
        i_row = (i_b * length_of(x) + i_r) * x.G + i_g
        m_n, m_k, m_n_load, m_k_load = find_rows(x, i_b, i_n, o_n, end, end)
        m_live = i_n + o_n < live
        b_cos, b_sin = load_positions(x, i_r, o_n, m_n_load, o_d)
        b_high, b_low = halves(b_sum, PRECISION)
        if OF_KEYS:
            b_x = load_value(x, i_b, i_r, i_g, o_n, m_k_load, o_e)
            if not AS_THEY_ARE:
                b_x = centre(b_x.to(tl.float32), m_k, b_value_mean)
            b_common = b_turned
            if ONCE:
                b_common -= weighted_sum(b_value_mean, b_high, PRECISION, True)
        else:
            b_k = load_key(x, i_b, i_r, i_g, o_n, m_k_load, BD)
            _f, b_r = features_of(x, b_k, b_cos, b_sin, MAP, False, EVEN, PRECISION)
            b_x = operand(centre(b_r, m_k, b_key_mean), ROUND)
            b_common = b_value
            b_high = tl.trans(b_high)
            b_low = tl.trans(b_low)
        b_df = tl.zeros((BC, b_plain.shape[0]), tl.float32) + b_plain[None, :]
        b_later = tl.zeros((BC, b_common.shape[0]), tl.float32) + b_common[None, :]
        b_dx = tl.zeros_like(b_later) if APART else times_state(b_x, b_high, b_low, b_later, PRECISION, ONCE)
        for j_h in range(GROUP):
            i_h = i_g * GROUP + j_h
            b_q = load_query(x, i_b, i_r, i_h, o_n, m_live, BD)
            b_do = load_gradient(x, i_b, i_r, i_h, o_n, m_live, o_e)
            b_f, b_r = features_of(x, b_q, b_cos, b_sin, MAP, True, EVEN, PRECISION)
            p_row = rows_at(x, p_rows, i_b, i_r, i_h)
            b_slope, b_level, b_pull, b_later_pull, b_lift = load_rows(x, p_row, o_n, m_live, FIRST)
            b_scaled = operand(b_slope[:, None] * b_r, ROUND)
            if OF_KEYS:
                b_dx = add_own(b_dx, b_x, b_do, b_scaled, b_pull, m_seen, PRECISION, ROUND)
                if x.p_turns is not None:
                    b_w = operand(tl.where(m_seen, b_lift[None, :], 0.0), ROUND)
                    b_df = row_product(b_w, operand(b_f, ROUND), b_df, PRECISION)
            else:
                b_dx = add_own(b_dx, b_x, b_scaled, b_do, b_level, m_seen, PRECISION, ROUND)
            b_sum, b_turned, b_plain, b_value = foresee(
                x, b_sum, b_turned, b_plain, b_value, b_f, b_r, b_scaled, b_do, b_slope, b_level, b_later_pull, b_lift,
                PRECISION, ROUND, OF_KEYS, not OF_KEYS,
            )  # fmt: skip
        if APART:
            b_dx += times_state(b_x, b_high, b_low, b_later, PRECISION, ONCE)
        if OF_KEYS:
            b_k = load_key(x, i_b, i_r, i_g, o_n, m_k_load, BD)
            b_f, _r = features_of(x, b_k, b_cos, b_sin, MAP, False, EVEN, PRECISION)
            store_token_gradient(
                x, p_dk, p_partial, i_row, x.G, b_k, b_f, unturn(x, b_df, b_dx, b_cos, b_sin),
                o_n, m_n, m_k, o_d, o_s, MAP, False, PRECISION, FIRST, LAST,
            )  # fmt: skip
        else:
            store_block(p_dv + i_row * x.E, of_keys(x, b_dx, m_k), o_n, m_n, x.G * x.E, o_e, x.E)
    return b_sum, b_turned, b_plain, b_value


@triton.jit
def store_initial_gradient(
    x, initial, dinitial, i, here, b_sum, b_turned, b_plain, b_value, b_key_mean, b_value_mean, o_d, o_s, o_e,
    FIRST: tl.constexpr, OF_KEYS: tl.constexpr,
):  # fmt: skip
    """Gradient of entry `i` of the state before all tokens, if here, which acts as so many tokens at its means."""
    i = tl.cast(i, tl.int64)
    m_f, m_e = here & (o_d < x.D), here & (o_e < x.E)
    n = tl.load(initial.count + i).to(tl.float32)
    b_key, b_mean = load_means(x, initial, i, o_d, o_s, o_e)
    if OF_KEYS:
        b_turned = n * (b_turned + tl.sum(b_sum * (b_mean - b_value_mean)[:, None], 0))
        p_dkey = dinitial.key_mean
        if x.p_turns is not None:
            p_dkey = dinitial.rotated_key_mean
        p_dkey += i * x.F + o_s
        if not FIRST:
            b_turned += tl.load(p_dkey, mask=m_f, other=0.0)
        tl.store(p_dkey, b_turned, mask=m_f)
        if FIRST and x.p_turns is not None:
            tl.store(dinitial.key_mean + i * x.F + o_s, n * b_plain, mask=m_f)
    else:
        b_value += tl.sum(b_sum * (b_key - b_key_mean)[None, :], 1)
        tl.store(dinitial.value_mean + i * x.E + o_e, n * b_value, mask=m_e)
        p_cov = dinitial.covariance + i * x.F * x.E + o_s[None, :] * x.E + o_e[:, None]
        tl.store(p_cov, n * b_sum, mask=m_e[:, None] & m_f[None, :])


@triton.jit
def key_kernel(
    x, past, initial, final, dfinal, dinitial, p_dk, p_dv, p_partial, p_rows, p_sums, i_e,
    MAP: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, ROUND: tl.constexpr,
    SEVERAL: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, OF_KEYS: tl.constexpr,
    GROUP: tl.constexpr, SEGMENT: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Gradients of the keys or else the values of one segment, one block of the values, and of the state before."""
    i_t, i_g = tl.program_id(0) // x.G, (tl.program_id(0) % x.G).to(tl.int64)
    i_s, i_b, first, length, begin = find_segment(x, i_t, SEGMENT)
    if (begin >= length) & (begin > 0):
        return
    stop = tl.minimum(begin + SEGMENT, length)
    o_d, o_s = channels(x.D, BD, BF)
    o_e = i_e * BE + tl.arange(0, BE)
    n = first * 0
    if past.count is not None:
        n = tl.load(past.count + (i_t if SEVERAL else i_s) * x.G + i_g)
    exact = find_exact(n, begin, stop, find_first_key(x, i_b, begin, stop, SEGMENT), ROUND, BC)
    b_key_mean, b_value_mean, _wild = load_references(
        x, initial, final, i_s * x.G + i_g, i_b, i_g, first, length, o_d, o_s, o_e,
        MAP, EVEN, PRECISION, ROUND, SEGMENT, BC, BD,
    )  # fmt: skip
    live = find_live(x, p_rows, i_b, i_g, first, begin, stop, GROUP, SEGMENT, FEW, BE)
    b_sum, b_turned, b_plain, b_value = open_future(
        x, p_sums, dfinal, final, i_t, i_s, i_g, o_d, o_s, o_e, b_key_mean, b_value_mean, SEVERAL, FIRST, BF, BE
    )
    b_sum, b_turned, b_plain, b_value = key_rows(
        x, p_dk, p_dv, p_partial, p_rows, i_b, i_g, first, exact, stop, stop, live, o_d, o_s, o_e,
        b_sum, b_turned, b_plain, b_value, b_key_mean, b_value_mean,
        MAP, EVEN, PRECISION, ROUND, ROUND, FIRST, LAST, OF_KEYS, GROUP, BC, BD,
    )  # fmt: skip
    if ROUND:
        # The few first rows are not rounded, and told from nothing; so is then all that they are added to.
        b_value -= tl.sum(b_sum * b_key_mean[None, :], 1)
        b_turned -= tl.sum(b_sum * b_value_mean[:, None], 0)
        b_key_mean = tl.zeros_like(b_key_mean)
        b_value_mean = tl.zeros_like(b_value_mean)
        b_sum, b_turned, b_plain, b_value = key_rows(
            x, p_dk, p_dv, p_partial, p_rows, i_b, i_g, first, begin, exact, stop, live, o_d, o_s, o_e,
            b_sum, b_turned, b_plain, b_value, b_key_mean, b_value_mean,
            MAP, EVEN, PRECISION, False, True, FIRST, LAST, OF_KEYS, GROUP, FEW, BD,
        )  # fmt: skip
    if dinitial.covariance is not None:
        store_initial_gradient(
            x, initial, dinitial, i_s * x.G + i_g, begin == 0, b_sum, b_turned, b_plain, b_value,
            b_key_mean, b_value_mean, o_d, o_s, o_e, FIRST, OF_KEYS,
        )  # fmt: skip


# Launches


def new_partial(plan: Plan, like: Tensor) -> Tensor | None:
    """Room for gradients of features that blocks of values add up, where there are several."""
    if plan.shape.blocks == 1:
        return None
    return torch.empty(*like.shape[:3], plan.x.F, dtype=torch.float32, device=like.device)


def backward(
    grad_out: Tensor,
    grad_final: Statistics | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rule: Rule,
    scale: float,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    turns: Tensor | None,
    initial: Statistics | None,
    final: Statistics,
    saved: tuple[Tensor, ...],
    precision: str,
    segment: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Statistics | None]:
    """Gradients of queries, keys, values and the initial state, from those of the answers and of the final state.

    Args:
        grad_out: (B, N, H, E), any strides.
        grad_final: Gradient of the final state, its count ignored, or None.
        query: As for `forward`, and so are all others up to `initial`.
        key: See there.
        value: See there.
        rule: See there.
        scale: See there.
        key_mask: See there.
        cu_seqlens: See there.
        turns: See there.
        initial: See there.
        final: What `forward` returned, as is `saved`.
        saved: See there.
        precision: As for `forward`.
        segment: As for `forward`.
    """
    plan = plan_for(query, key, value, grad_out, rule, scale, key_mask, cu_seqlens, turns, precision, segment)
    x, shape, past = plan.x, plan.shape, past_of(saved, initial)
    grad_query, grad_key, grad_value = (
        torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (query, key, value)
    )
    grad_initial = None
    if initial is not None:
        empty = (None if t is None else torch.empty_like(t) for t in initial[1:])
        grad_initial = Statistics(initial.count, *empty)
    rows = torch.empty(query.shape[0], x.H, ROWS.value, query.shape[1], dtype=torch.float32, device=query.device)
    constants = {"GROUP": x.H // x.G, **plan.constants}
    partial = new_partial(plan, query)
    for i in range(shape.blocks):
        on(query_kernel, (plan.programs,))(
            x, past, initial or NOTHING, final, grad_query, partial, rows, i, GAIN=rule.gain, RELEASED=rule.released,
            SEVERAL=plan.several, FIRST=i == 0, LAST=i == shape.blocks - 1, **constants,
        )  # fmt: skip
    sums = None
    if plan.several:
        width = x.E * x.F + 2 * x.F + x.E
        sums = torch.empty(plan.programs, width, dtype=torch.float32, device=query.device)
        on(sum_queries_kernel, (plan.programs, shape.blocks))(x, rows, sums, **constants)
        on(add_segments_kernel, (plan.sequences * x.G, cdiv(width, WIDE)))(x, sums, SEGMENT=shape.segment, BW=WIDE)
    partial = new_partial(plan, key)
    # One after the other: the registers of a program have no room for both gradients beside the state.
    for of_keys in (True, False):
        for i in range(shape.blocks):
            on(key_kernel, (plan.programs,))(
                x, past, initial or NOTHING, final, grad_final or NOTHING, grad_initial or NOTHING,
                grad_key, grad_value, partial, rows, sums, i, SEVERAL=plan.several,
                FIRST=i == 0, LAST=i == shape.blocks - 1, OF_KEYS=of_keys, **constants,
            )  # fmt: skip
    return grad_query, grad_key, grad_value, grad_initial
