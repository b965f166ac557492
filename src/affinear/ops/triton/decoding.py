"""Decoding: one more token for every sequence, answered from its state, which takes the token in on the way."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .blocks import channels, gain, load_block, load_turns, mean_weight, turn
from .features import feature
from .rules import Rule
from .sizes import cdiv, next_power_of_2
from .starting import on
from .statistics import Rest, Statistics

AREA = 8192  # numbers of a covariance that a program holds at a time
NOTHING = Rest()


@triton.jit
def token_features(p_x, s_d, p_turns, o_d, D, MAP: tl.constexpr, QUERY: tl.constexpr, BD: tl.constexpr):
    """Features of one token, plain and turned, (BF,) each."""
    o_n = tl.arange(0, 1)
    o_c = tl.arange(0, BD)
    b_f = feature(load_block(p_x, o_n, o_n == 0, 0, o_c, s_d, D).to(tl.float32), o_c < D, MAP, QUERY)
    b_r = b_f
    if p_turns is not None:
        b_cos, b_sin = load_turns(p_turns, o_n, o_n == 0, o_d, D)
        b_r = turn(b_f, b_cos, b_sin)
    return tl.sum(b_f, 0), tl.sum(b_r, 0)


@triton.jit
def load_rest(p_rest, o, mask, some):
    """What has been rounded off so far; nothing where nobody knows."""
    b_rest = 0.0
    if p_rest is not None:
        b_rest = tl.where(some, tl.load(p_rest + o, mask=mask, other=0.0), 0.0)
    return b_rest


@triton.jit
def store_rest(p_rest, o, mask, b_x, b_step, b_total):
    """Keep what x + step has and its rounded sum lacks, whichever is larger; nothing where that is not finite."""
    if p_rest is not None:
        b_second = b_total - b_x
        b_rest = (b_x - (b_total - b_second)) + (b_step - b_second)
        tl.store(p_rest + o, tl.where(tl.abs(b_rest) < float("inf"), b_rest, 0.0), mask=mask)


@triton.jit
def decode_kernel(
    p_q, p_k, p_v, p_turns, p_o, old, new, old_rest, new_rest, s_q, s_k, s_v, scale, G, D, E, F,
    MAP: tl.constexpr, GAIN: tl.constexpr, RELEASED: tl.constexpr, GROUP: tl.constexpr,
    BD: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Take one key and value into a state, and answer the queries of its key head.

    A program has a state to itself: old and new may lie in the same place. A mean moves towards the token by a share of
    the way, and what rounding takes off the sum is kept for the next step, as `ops.state.merge` does it.
    """
    i_b, i_g = (tl.program_id(0) // G).to(tl.int64), (tl.program_id(0) % G).to(tl.int64)
    i = i_b * G + i_g
    o_d, o_s = channels(D, BD, BF)
    m_f = o_d < D
    count = tl.load(old.count + i) + 1
    share = 1 / count.to(tl.float32)
    # What was not there has no mean, whatever the memory says. Loads do not wait to learn that.
    some = count > 1
    b_plain = tl.where(some, tl.load(old.key_mean + i * F + o_s, mask=m_f, other=0.0), 0.0)
    b_turned = b_plain
    b_f, b_r = token_features(p_k + i_b * s_k[0] + i_g * s_k[2], s_k[3], p_turns, o_d, D, MAP, False, BD)
    if p_turns is not None:
        b_turned = tl.where(some, tl.load(old.rotated_key_mean + i * F + o_s, mask=m_f, other=0.0), 0.0)
    o_key = i * F + o_s
    b_rest = load_rest(old_rest.key_mean, o_key, m_f, some)
    b_old = b_plain
    b_way = b_f - b_old - b_rest
    b_move = share * b_way + b_rest
    b_plain = b_old + b_move
    b_step = b_way
    b_old_turned = b_turned
    b_move_turned = b_move
    if p_turns is not None:
        b_rest = load_rest(old_rest.rotated_key_mean, o_key, m_f, some)
        b_step = b_r - b_old_turned - b_rest
        b_move_turned = share * b_step + b_rest
    b_turned = b_old_turned + b_move_turned
    for i_e in tl.static_range(BLOCKS):
        o_e = i_e * BE + tl.arange(0, BE)
        m_e = o_e < E
        b_v = tl.load(p_v + i_b * s_v[0] + i_g * s_v[2] + o_e * s_v[3], mask=m_e, other=0.0).to(tl.float32)
        b_value = tl.where(some, tl.load(old.value_mean + i * E + o_e, mask=m_e, other=0.0), 0.0)
        o_cov = i * F * E + o_s[:, None] * E + o_e[None, :]
        m_cov = m_f[:, None] & m_e[None, :]
        b_cov = tl.where(some, tl.load(old.covariance + o_cov, mask=m_cov, other=0.0), 0.0)
        b_rest_value = load_rest(old_rest.value_mean, i * E + o_e, m_e, some)
        b_rest_cov = load_rest(old_rest.covariance, o_cov, m_cov, some)
        b_away = b_v - b_value - b_rest_value
        b_move_value = share * b_away + b_rest_value
        b_moved = b_value + b_move_value
        b_apart = b_step[:, None] * ((1 - share) * b_away)[None, :] - b_cov - b_rest_cov
        b_move_cov = share * b_apart + b_rest_cov
        b_cov_moved = b_cov + b_move_cov
        # Every thread has read what another one is about to write.
        tl.debug_barrier()
        tl.store(new.covariance + o_cov, b_cov_moved, mask=m_cov)
        tl.store(new.value_mean + i * E + o_e, b_moved, mask=m_e)
        store_rest(new_rest.covariance, o_cov, m_cov, b_cov, b_move_cov, b_cov_moved)
        store_rest(new_rest.value_mean, i * E + o_e, m_e, b_value, b_move_value, b_moved)
        b_cov, b_value = b_cov_moved, b_moved
        for j_h in range(GROUP):
            i_h = i_g * GROUP + j_h
            b_qf, b_qr = token_features(p_q + i_b * s_q[0] + i_h * s_q[2], s_q[3], p_turns, o_d, D, MAP, True, BD)
            b_z = scale * tl.sum(b_qf * b_plain, 0)
            b_gain, _by_z = gain(b_z, GAIN, RELEASED)
            b_o = scale * b_gain * tl.sum(b_qr[:, None] * b_cov, 0)
            if RELEASED:
                b_added = scale * tl.sum(b_qr * b_turned - b_qf * b_plain, 0)
                b_weight, _by_z, _by_added = mean_weight(b_z, b_added, GAIN)
                b_o += b_weight * b_value
            else:
                b_o += b_value
            p_row = p_o + (i_b * (G * GROUP) + i_h) * E + o_e
            tl.store(p_row, b_o.to(p_o.dtype.element_ty), mask=m_e)
    tl.store(new.key_mean + o_key, b_plain, mask=m_f)
    store_rest(new_rest.key_mean, o_key, m_f, b_old, b_move, b_plain)
    if p_turns is not None:
        tl.store(new.rotated_key_mean + o_key, b_turned, mask=m_f)
        store_rest(new_rest.rotated_key_mean, o_key, m_f, b_old_turned, b_move_turned, b_turned)
    tl.store(new.count + i, count)


def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Statistics,
    rule: Rule,
    scale: float,
    turns: Tensor | None,
    in_place: bool,
    rest: Rest = NOTHING,
    keep: bool = False,
) -> tuple[Tensor, Statistics, Rest]:
    """Answers to one query of every sequence, which sees its own key, and the states after it. No gradients.

    Args:
        query: (B, 1, H, D), any strides.
        key: (B, 1, G, D), where G divides H.
        value: (B, 1, G, E).
        state: Before the token.
        rule: The mechanism.
        scale: Factor of all scores.
        turns: (1, D), cosines and sines of channel pairs side by side at this position.
        in_place: Whether to write over `state` and `rest`, which are then what is returned.
        rest: What was rounded off the state before.
        keep: Whether to keep it, of the means, where the state comes without any. That of the covariance, which is as
            large as the state, is kept where it was kept before.
    """
    batch, _one, heads, width = query.shape
    groups, values = value.shape[2:]
    out = torch.empty(batch, 1, heads, values, dtype=query.dtype, device=query.device)
    new = state if in_place else Statistics(*(None if x is None else torch.empty_like(x) for x in state))
    new_rest = rest if in_place else Rest(*_kept(state, rest, keep))
    rounded = max(16, next_power_of_2(width))
    features = rounded * rule.blocks
    block = min(max(16, next_power_of_2(values)), max(16, AREA // features))
    on(decode_kernel, (batch * groups,))(
        query, key, value, turns, out, state, new, rest, new_rest, query.stride(), key.stride(), value.stride(),
        scale, groups, width, values, width * rule.blocks,
        MAP=rule.map, GAIN=rule.gain, RELEASED=rule.released, GROUP=heads // groups,
        BD=rounded, BF=features, BE=block, BLOCKS=cdiv(values, block), num_warps=4,
    )  # fmt: skip
    return out, new, new_rest


def _kept(state: Statistics, rest: Rest, keep: bool) -> list[Tensor | None]:
    """New memory for what is rounded off, in the order of `Rest`."""
    means = (state.key_mean, state.value_mean, None, state.rotated_key_mean)
    like = [x if x is not None or not keep else mean for x, mean in zip(rest, means, strict=True)]
    return [None if x is None else torch.empty_like(x) for x in like]
