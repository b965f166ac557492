"""Linear time and memory in plain torch: CPU, MPS, anything. Inputs are float32 or float64.

Inside, heads come before tokens: (B, H, N, D), and (B, H, T, C, D) in chunks. Queries that share a key head lie side by
side as rows of one matrix, so that grouped heads cost no copies of keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from .mechanisms import Mechanism
from .packing import Chunks, packed_chunks, plain_chunks, visibility
from .rotary import Rotary, rotate
from .state import State, fraction, merge, where

CHUNK = 64  # tokens; scores within a chunk then cost as much as the states between chunks


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mechanism: Mechanism,
    scale: float,
    causal: bool,
    key_mask: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    rotary: Rotary | None,
    initial_state: State | None,
    return_state: bool,
) -> tuple[Tensor, State | None]:
    """Answers (B, N, H, E), and the state of all keys if asked for."""
    if mechanism.gain is None:
        if rotary is not None:
            query, key = rotate(query, rotary), rotate(key, rotary)
        visible = None
        if key_mask is not None or cu_seqlens_k is not None:
            visible = visibility(query, key, causal, key_mask, cu_seqlens_q, cu_seqlens_k)
        return softmax(query, key, value, scale, visible, causal), None
    if causal:
        out, state = causal_attention(
            query, key, value, mechanism, scale, key_mask, cu_seqlens_k, rotary, initial_state
        )
        return out, state if return_state else None
    state = summarize(key, value, mechanism=mechanism, key_mask=key_mask, cu_seqlens=cu_seqlens_k, rotary=rotary)
    if initial_state is not None:
        state = merge(initial_state, state)
    out = attend(query, state, scale=scale, cu_seqlens=cu_seqlens_q, rotary=rotary)
    return out, state if return_state else None


def summarize(
    key: Tensor,
    value: Tensor,
    *,
    mechanism: Mechanism,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    rotary: Rotary | None = None,
    chunk: int = CHUNK,
) -> State:
    """The state of keys (B, M, H, D) and values (B, M, H, E)."""
    if cu_seqlens is None:
        features, rotated, value = _keys_and_values(key, value, mechanism, key_mask, rotary)
        filled = None if key_mask is None else key_mask[:, None]
        return _moments(features, rotated, value, filled, mechanism)
    chunks = _chunks(key, chunk, cu_seqlens)
    features, rotated, value = _keys_and_values(key, value, mechanism, None, rotary, chunks)
    return _merge_sequences(_moments(features, rotated, value, chunks.filled, mechanism), chunks)


def attend(
    query: Tensor,
    state: State,
    *,
    scale: float,
    cu_seqlens: Tensor | None = None,
    rotary: Rotary | None = None,
    chunk: int = CHUNK,
) -> Tensor:
    """Answers to queries (B, N, H, D), as (B, N, H, E)."""
    chunks = None
    if cu_seqlens is not None:
        chunks = _chunks(query, chunk, cu_seqlens)
        assert chunks.packed is not None
        sequence = chunks.packed.sequence
        state = state.map(lambda x: x[sequence].transpose(0, 1)[None])
    heads = state.key_mean.shape[1]
    features, rotated = _rows(query, state.mechanism, heads, rotary, chunks)
    z = scale * (features @ state.key_mean[..., None])
    rotated_z = z if rotary is None else scale * (rotated @ state.centre[..., None])
    out = _answer(z, rotated_z, scale * (rotated @ state.covariance), state.value_mean[..., None, :], state.mechanism)
    return _tokens(out, query.shape[2] // heads, chunks)


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mechanism: Mechanism,
    scale: float,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    rotary: Rotary | None = None,
    initial: State | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, State]:
    """Answers (B, N, H, E) to queries that see the keys up to their own, and the state after all of them."""
    chunks, heads = _chunks(key, chunk, cu_seqlens), key.shape[2]
    features, rotated, value = _keys_and_values(key, value, mechanism, key_mask, rotary, chunks)
    filled = chunks.filled if key_mask is None else chunks.filled & chunks.split(key_mask)[:, None]
    past = _scan(features, rotated, value, filled, mechanism, initial, chunks)

    features_q, rotated_q = _rows(query, mechanism, heads, rotary, chunks)
    group = query.shape[2] // heads

    def by_query(x: Tensor) -> Tensor:
        return x.unflatten(-2, (group, chunks.size))

    # Each row merges two states, of the chunks before its own and of the keys up to itself within it.
    own_count = filled.cumsum(-1)
    count = past.count[..., None] + own_count
    n = count.clamp(min=1)[..., None, :, None].to(value.dtype)
    own_n = own_count.clamp(min=1)[..., None, :, None].to(value.dtype)
    own_share = own_count[..., None, :, None] / n
    past_share = past.count[..., None, None, None] / n

    scores = by_query(rotated_q @ rotated.mT).tril()
    own_score = scores.sum(-1, keepdim=True) / own_n
    past_score = by_query(rotated_q @ past.centre[..., None])
    rotated_z = scale * (past_share * past_score + own_share * own_score)
    z = rotated_z
    if rotary is not None:
        key_sum = past.key_sum[..., None, :] + features.cumsum(-2)
        z = scale * (by_query(features_q) * key_sum[..., None, :, :]).sum(-1, keepdim=True) / n

    visible = filled[..., None, None, :].to(value.dtype).expand(*filled.shape[:-1], 1, chunks.size, chunks.size).tril()
    scores = torch.addcmul(scores, own_score, visible, value=-1)
    own_mean = past.values.cumsum(-2)[..., None, :, :] / own_n
    past_mean = past.value_mean[..., None, None, :]
    scatter = by_query(rotated_q @ past.scatter + scores.flatten(-3, -2) @ past.values)
    between = past_share * own_share * (own_score - past_score) * (own_mean - past_mean)
    mean = past.reference[..., None, None, :] + past_share * past_mean + own_share * own_mean
    if key_mask is not None:
        mean = mean.masked_fill(count[..., None, :, None] == 0, 0)
    out = _answer(z, rotated_z, scale * (scatter / n + between), mean, mechanism)
    return _tokens(out.flatten(-3, -2), group, chunks), past.final


def softmax(query: Tensor, key: Tensor, value: Tensor, scale: float, visible: Tensor | None, causal: bool) -> Tensor:
    """Softmax attention (B, N, H, E) through torch's own; `visible` (B or 1, 1, N, M) is None where a flag says it all."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    grouped = query.shape[1] != key.shape[1]
    if visible is None:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scale, enable_gqa=grouped)
        return out.transpose(1, 2)
    # A row that sees nothing is given everything, and its answer is then taken away: no NaN, no gradient.
    blind = ~visible.any(dim=-1, keepdim=True)
    key, value = (x.masked_fill(~visible.any(dim=-2)[..., None], 0) for x in (key, value))
    out = F.scaled_dot_product_attention(query, key, value, visible | blind, scale=scale, enable_gqa=grouped)
    return out.masked_fill(blind, 0).transpose(1, 2)


@dataclass(frozen=True)
class _Past:
    """What the queries of each chunk know from the chunks before it; T is the chunk axis.

    Values are told from a reference, the mean of all up to the end of the chunk: answers do not depend on it, but what
    is left to add up is small.
    """

    count: Tensor  # (B, H, T)
    key_sum: Tensor  # (B, H, T, F), of unrotated features
    centre: Tensor  # (B, H, T, F), mean of rotated features
    value_mean: Tensor  # (B, H, T, E), from the reference
    scatter: Tensor  # (B, H, T, F, E), the covariance times the count
    reference: Tensor  # (B, H, T, E)
    values: Tensor  # (B, H, T, C, E), the chunk's own values from the reference
    final: State


def _scan(
    features: Tensor,
    rotated: Tensor,
    value: Tensor,
    filled: Tensor,
    mechanism: Mechanism,
    initial: State | None,
    chunks: Chunks,
) -> _Past:
    """Welford's update, a chunk at a time: cumulative sums of what each chunk adds."""
    start = _start(features, value, mechanism, initial, rotated is not features, chunks)
    n0 = start.count[..., None].to(value.dtype)
    count, count_after = _running(filled.sum(-1).expand(features.shape[:3]), start.count, chunks)
    n = count.clamp(min=1)[..., None].to(value.dtype)
    n_after = count_after.clamp(min=1)[..., None].to(value.dtype)

    key_sum, key_sum_after = _running(features.sum(-2), n0 * start.key_mean, chunks)
    rotated_sum, rotated_sum_after = key_sum, key_sum_after
    if rotated is not features:
        rotated_sum, rotated_sum_after = _running(rotated.sum(-2), n0 * start.centre, chunks)
    _, value_sum_after = _running(value.sum(-2), n0 * start.value_mean, chunks)
    centre, reference = rotated_sum / n, value_sum_after / n_after

    values = torch.addcmul(value, reference[..., None, :], filled[..., None].to(value.dtype), value=-1)
    # About their own mean all values up to the end of the chunk sum to nothing: those before it sum to the negative.
    value_sum = -values.sum(-2)
    # The sum over the chunk of (phi(k) - mean before it) (v - mean after it)^T.
    added = rotated.mT @ values + centre[..., None] * value_sum[..., None, :]
    scatter, scatter_after = _running(added, n0[..., None] * start.covariance, chunks)
    after = State(
        count=count_after,
        key_mean=key_sum_after / n_after,
        value_mean=reference,
        covariance=scatter_after / n_after[..., None],
        mechanism=mechanism,
        rotated_key_mean=None if rotated is features else rotated_sum_after / n_after,
    )
    final = _last(after, start, chunks)
    return _Past(count, key_sum, centre, value_sum / n, scatter, reference, values, final)


def _start(
    features: Tensor, value: Tensor, mechanism: Mechanism, initial: State | None, rotary: bool, chunks: Chunks
) -> State:
    """The state before the first token, (B, H, ...); of each sequence if they are packed."""
    if initial is not None:
        return initial
    batch = features.shape[0] if chunks.packed is None else chunks.packed.last.shape[0]
    heads, width = features.shape[1], features.shape[-1]
    zeros = features.new_zeros(batch, heads, width)
    value_mean = value.new_zeros(batch, heads, value.shape[-1])
    covariance = value.new_zeros(batch, heads, width, value.shape[-1])
    count = torch.zeros(batch, heads, dtype=torch.long, device=value.device)
    return State(count, zeros, value_mean, covariance, mechanism, zeros if rotary else None)


def _last(after: State, start: State, chunks: Chunks) -> State:
    """The state after the last chunk, of each sequence if they are packed."""
    if chunks.packed is None:
        return after.map(lambda x: x[:, :, -1])
    last, empty = chunks.packed.last, chunks.packed.empty
    ends = after.map(lambda x: x[0, :, last].transpose(0, 1))
    return where(empty, start, ends)


def _running(x: Tensor, start: Tensor, chunks: Chunks) -> tuple[Tensor, Tensor]:
    """Sums of x (B, H, T, ...) over the chunks before each one, and up to it, counting from start (B, H, ...)."""
    if chunks.packed is None:
        total = torch.cat((start[:, :, None], x), dim=2).cumsum(2)
        return total[:, :, :-1], total[:, :, 1:]
    start = start[chunks.packed.sequence].transpose(0, 1)[None]
    index = torch.arange(chunks.number, device=x.device)

    def earlier(x: Tensor, step: int) -> Tensor:
        """What lies `step` chunks back in the same sequence, nothing where there is no such chunk."""
        reached = (index - step >= first).view(-1, *[1] * (x.ndim - 3))
        return F.pad(x[:, :, :-step], [0, 0] * (x.ndim - 3) + [step, 0]).masked_fill(~reached, 0)

    first, step = chunks.packed.first, 1
    while step < chunks.number:
        x, step = x + earlier(x, step), 2 * step
    return start + earlier(x, 1), start + x


def _merge_sequences(chunk: State, chunks: Chunks) -> State:
    """The states of packed sequences (S, H, ...) from those of their chunks (1, H, T, ...)."""
    assert chunks.packed is not None
    sequence, number = chunks.packed.sequence, chunks.packed.last.shape[0]

    def gather(x: Tensor) -> Tensor:
        zeros = x.new_zeros(number, *x.shape[1:2], *x.shape[3:])
        return zeros.index_add(0, sequence, x[0].transpose(0, 1))

    def spread(x: Tensor) -> Tensor:
        return x[sequence].transpose(0, 1)[None]

    count = gather(chunk.count)
    share = fraction(chunk.count, spread(count), chunk.dtype)[..., None]
    whole = chunk.map(lambda x: gather(share * x) if x.ndim == 4 else count)
    between = (chunk.centre - spread(whole.centre))[..., None] * (chunk.value_mean - spread(whole.value_mean))[
        ..., None, :
    ]
    return replace(whole, covariance=gather(share[..., None] * (chunk.covariance + between)))


def _moments(features: Tensor, rotated: Tensor, value: Tensor, filled: Tensor | None, mechanism: Mechanism) -> State:
    """The state of tokens (..., N, F) and (..., N, E); features vanish where nothing is filled."""
    lead = features.shape[:-2]
    if filled is None:
        count = torch.full(lead, features.shape[-2], dtype=torch.long, device=features.device)
    else:
        count = filled.sum(-1).expand(lead)
    n = count.clamp(min=1)[..., None].to(value.dtype)
    key_mean, value_mean = features.sum(-2) / n, value.sum(-2) / n
    centre = key_mean if rotated is features else rotated.sum(-2) / n
    # One side would do in exact arithmetic; centring both keeps the rounding of the means out of the result.
    keys, values = rotated - centre[..., None, :], value - value_mean[..., None, :]
    if filled is not None:
        keys = keys.masked_fill(~filled[..., None], 0)
    covariance = keys.mT @ values / n[..., None]
    return State(count, key_mean, value_mean, covariance, mechanism, None if rotated is features else centre)


def _chunks(x: Tensor, size: int, cu_seqlens: Tensor | None) -> Chunks:
    length = x.shape[1]
    size = min(size, max(length, 1))
    if cu_seqlens is None:
        return plain_chunks(length, size, x.device)
    return packed_chunks(cu_seqlens, length, size)


def _keys_and_values(
    key: Tensor,
    value: Tensor,
    mechanism: Mechanism,
    key_mask: Tensor | None,
    rotary: Rotary | None,
    chunks: Chunks | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Features of keys, their rotated twins, and values, all (B, H, N, ...) or (B, H, T, C, ...), zero where masked."""
    if key_mask is not None:
        # What is masked may hold anything, even NaN, which zero times would not remove.
        hidden = ~key_mask[..., None, None]
        key, value = key.masked_fill(hidden, 0), value.masked_fill(hidden, 0)
    features = mechanism.key_map(key)
    if key_mask is not None:
        features = features.masked_fill(hidden, 0)
    rotated = features if rotary is None else rotate(features, rotary)
    if chunks is None:
        features, rotated, value = (x.transpose(1, 2) for x in (features, rotated, value))
        return features, features if rotary is None else rotated, value

    def split(x: Tensor) -> Tensor:
        x = chunks.split(x)
        if chunks.packed is not None:
            x = x.masked_fill(~chunks.filled[..., None, None], 0)
        return x.movedim(3, 1)

    features = split(features)
    return features, features if rotary is None else split(rotated), split(value)


def _rows(
    query: Tensor, mechanism: Mechanism, heads: int, rotary: Rotary | None, chunks: Chunks | None
) -> tuple[Tensor, Tensor]:
    """Features of queries and their rotated twins: (B, heads, G * N, F), or (B, heads, T, G * C, F)."""

    def arrange(x: Tensor) -> Tensor:
        x = x if chunks is None else chunks.split(x)
        x = x.unflatten(-2, (heads, -1)).movedim((-3, -2), (1, -3))
        return x.flatten(-3, -2)

    features = mechanism.query_map(query)
    if rotary is None:
        rows = arrange(features)
        return rows, rows
    return arrange(features), arrange(rotate(features, rotary))


def _tokens(rows: Tensor, group: int, chunks: Chunks | None) -> Tensor:
    """What `_rows` arranged, back as (B, N, H, E)."""
    x = rows.unflatten(-2, (group, -1)).movedim((1, -3), (-3, -2)).flatten(-3, -2)
    return x if chunks is None else chunks.join(x)


def _answer(z: Tensor, rotated_z: Tensor, signal: Tensor, mean: Tensor, mechanism: Mechanism) -> Tensor:
    """The mean value plus the gain times the signal."""
    assert mechanism.gain is not None
    if mechanism.mean_weight is None:
        return torch.addcmul(mean, mechanism.gain(z), signal)
    return torch.addcmul(mechanism.mean_weight(z, rotated_z) * mean, mechanism.gain(z), signal)
