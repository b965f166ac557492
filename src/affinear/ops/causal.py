"""Causal attention: a scan over chunks of tokens, and explicit weights within each of them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from .layout import CHUNK, arrange_keys, arrange_queries, cut_into_chunks, restore_tokens
from .linear import merge_sequences, moments
from .mechanisms import Mechanism
from .packing import Chunks, Packed
from .precision import widen
from .rotary import Rotary
from .sieve import Sieve, can_be_read, may_be_wild
from .state import State, merge
from .tracing import is_compiling, is_eager

FEW_CHUNKS = 32  # up to here adding one by one beats torch's cumulative sum, which is slow across rows


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
    """Answers (B, N, H, E) to queries that see the keys up to their own, and the state after all of them.

    Where they may hold something that is not finite they are computed with a sieve: rows that do not see it, and their
    gradients, keep their bits.
    """
    arguments = query, key, value, mechanism, scale, key_mask, cu_seqlens, rotary, initial, chunk
    if can_be_read(query):
        out, final = _attend(*arguments, Sieve(on=False))
        if not may_be_wild(out):
            return out, final
    return _attend(*arguments, Sieve(on=not query.is_meta))


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mechanism: Mechanism,
    scale: float,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    rotary: Rotary | None,
    initial: State | None,
    chunk: int,
    sieve: Sieve,
) -> tuple[Tensor, State]:
    query, key, value = widen(query), widen(key), widen(value)
    chunks, heads = cut_into_chunks(key, chunk, cu_seqlens), key.shape[2]
    features, rotated, value = arrange_keys(key, value, mechanism, key_mask, rotary, chunks)
    filled = chunks.filled if key_mask is None else chunks.filled & chunks.split(key_mask)[:, None]
    masked = key_mask is not None or not chunks.full
    past = _scan(features, rotated, value, filled, masked, mechanism, initial, chunks, sieve)

    group = query.shape[2] // heads
    features_q, rotated_q = (
        sieve.rows(x.unflatten(-2, (group, -1))) for x in arrange_queries(query, mechanism, heads, rotary, chunks)
    )
    count = filled.cumsum(-1)[..., None, :, None]
    scores = sieve.rows(_lower(_product(rotated_q, past.keys.mT)))
    own = sieve.rows(scores.sum(-1, keepdim=True) / count.clamp(min=1))
    before = sieve.rows(_product(rotated_q, past.centre[..., None]))
    plain = turned = None
    if rotary is not None:
        plain = features_q * sieve.sums(past.key_sum[..., None, :] + features.cumsum(-2))[..., None, :, :]
        turned = rotated_q * sieve.sums(past.rotated_sum[..., None, :] + rotated.cumsum(-2))[..., None, :, :]
    level = _levels(count, past.count[..., None, None, None], own, before, plain, turned, mechanism, scale, sieve)

    # The weights of the chunk's own keys are spelled out, those of the keys before it go through their state.
    square = (*filled.shape[:-1], 1, chunks.size, chunks.size)
    visible = filled[..., None, None, :].to(value.dtype).expand(square).tril()
    scores += -own
    # Centred scores sum to nothing but for rounding, which all values of a row would share: it is taken out.
    scores -= (scores.detach() * visible).sum(-1, keepdim=True) / count.clamp(min=1)
    weights = sieve.rows(_lower((level.slope * sieve.rows(scores)).add_(level.own)))
    if key_mask is not None:
        weights = weights * visible
    out = _product(weights, past.values)
    out += level.slope * sieve.rows(_product(rotated_q, past.scatter))
    out += level.mean * past.reference[..., None, None, :]
    if key_mask is not None:
        out = out.masked_fill(past.count[..., None, None, None] + count == 0, 0)
    return restore_tokens(sieve.mark(out).flatten(-3, -2), group, chunks), past.final


def _lower(x: Tensor) -> Tensor:
    """Nothing above the diagonal; x itself where that is allowed, which is many times faster."""
    return x.tril_() if is_eager() else x.tril()


def _product(x: Tensor, y: Tensor) -> Tensor:
    """Rows of every query group (..., G, C, F) times a matrix that the groups share (..., F, E)."""
    return (x.flatten(-3, -2) @ y).unflatten(-2, x.shape[-3:-1])


@dataclass(frozen=True)
class _Levels:
    """How a row's weights depend on the scores, (B, H, T, G, C, 1) each: w = own + slope * (score - mean score)."""

    slope: Tensor
    own: Tensor  # weight of a key of the chunk that scores the mean of the chunk
    mean: Tensor | int  # sum of all weights


def _levels(
    own_count: Tensor,
    past_count: Tensor,
    own: Tensor,
    past: Tensor,
    plain: Tensor | None,
    turned: Tensor | None,
    mechanism: Mechanism,
    scale: float,
    sieve: Sieve,
) -> _Levels:
    """Levels from counts and mean scores: of the keys before the chunk, and by how much its own lie above.

    Under rotation `plain` and `turned` sum over channels to sums of scores.
    """
    assert mechanism.gain is not None
    n = (own_count + past_count).clamp(min=1).to(own.dtype)
    lead = scale * own
    z, added = scale * past + own_count / n * lead, torch.zeros_like(n)
    if plain is not None and turned is not None:
        z, added = (scale * x.sum(-1, keepdim=True) / n for x in (plain, turned - plain))
    z, added = sieve.rows(z), sieve.rows(added)
    gain = sieve.rows(mechanism.gain(z))
    mean = 1 if mechanism.mean_weight is None else sieve.rows(mechanism.mean_weight(z, added))
    return _Levels(
        slope=gain * scale / n,
        own=sieve.rows((mean + gain * lead * (past_count / n)) / n),
        mean=mean,
    )


@dataclass(frozen=True)
class _Past:
    """What the queries of each chunk know from the chunks before it; T is the chunk axis.

    Keys and values are told from a reference, the mean of those before the chunk, or the first there is: answers do not
    depend on it, what is left to add up is small, and nothing of the future is in it.
    """

    count: Tensor  # (B, H, T)
    key_sum: Tensor  # (B, H, T, F), of unrotated features
    rotated_sum: Tensor  # (B, H, T, F)
    centre: Tensor  # (B, H, T, F), reference of rotated features
    keys: Tensor  # (B, H, T, C, F), the chunk's own rotated features from it
    scatter: Tensor  # (B, H, T, F, E), the covariance times the count
    reference: Tensor  # (B, H, T, E)
    values: Tensor  # (B, H, T, C, E), the chunk's own values from the reference
    final: State


def _scan(
    features: Tensor,
    rotated: Tensor,
    value: Tensor,
    filled: Tensor,
    masked: bool,
    mechanism: Mechanism,
    initial: State | None,
    chunks: Chunks,
    sieve: Sieve,
) -> _Past:
    """Welford's update, a chunk at a time: cumulative sums of what each chunk adds."""
    start = _start(features, value, mechanism, initial, rotated is not features, chunks)
    n0 = start.count[..., None].to(value.dtype)
    own_count = filled.sum(-1).expand(features.shape[:3])
    count, total = _running(own_count, start.count, chunks)
    n = count.clamp(min=1)[..., None].to(value.dtype)
    n_after = (count + own_count).clamp(min=1)[..., None].to(value.dtype)

    key_sum, key_total = _running(features.sum(-2), n0 * start.key_mean, chunks)
    rotated_sum, rotated_total = key_sum, key_total
    if rotated is not features:
        rotated_sum, rotated_total = _running(rotated.sum(-2), n0 * start.centre, chunks)
    value_sum, value_total = _running(value.sum(-2), n0 * start.value_mean, chunks)
    nothing, first = count[..., None] == 0, filled.int().argmax(-1)[..., None, None]
    centre = sieve.key_means(torch.where(nothing, _at(rotated, first), rotated_sum / n))
    reference = sieve.value_means(torch.where(nothing, _at(value, first), value_sum / n))

    # Small things are negated before they are added: the gradient of a difference would negate the large ones.
    keys, values = rotated + -centre[..., None, :], value + -reference[..., None, :]
    if masked:
        keys, values = keys * filled[..., None], values * filled[..., None]
    lost = sieve.lost(keys, values)
    keys, values = sieve.keys(keys), sieve.values(values)
    # The sum over the chunk of (phi(k) - mean after it) (v - mean before it)^T.
    moved = (keys.sum(-2) / n_after)[..., None] * values.sum(-2)[..., None, :]
    added = keys.mT @ values - moved
    added = added if lost is None else added + lost
    scatter, scatter_total = _running(added, n0[..., None] * start.covariance, chunks)
    n_total = total.clamp(min=1)[..., None].to(value.dtype)
    final = State(
        count=total,
        key_mean=key_total / n_total,
        value_mean=value_total / n_total,
        covariance=scatter_total / n_total[..., None],
        mechanism=mechanism,
        rotated_key_mean=None if rotated is features else rotated_total / n_total,
    )
    few = chunks.packed is not None or chunks.number == 1
    if initial is not None and few and is_eager() and not (sieve.on and torch.is_grad_enabled()):
        # A few tokens more, as a long text comes in a million steps: a merge forgets nothing of what it rounds off. But
        # zero times what is wild would be in its gradient.
        final = merge(initial, _own(features, rotated, value, filled, mechanism, chunks))
    return _Past(count, key_sum, rotated_sum, centre, keys, sieve.scatters(scatter), reference, values, final)


def _own(
    features: Tensor, rotated: Tensor, value: Tensor, filled: Tensor, mechanism: Mechanism, chunks: Chunks
) -> State:
    """The state of the tokens alone, of packed sequences or of one chunk."""
    state = moments(features, rotated, value, filled, mechanism)
    return state.map(lambda x: x[:, :, 0]) if chunks.packed is None else merge_sequences(state, chunks)


def _at(x: Tensor, index: Tensor) -> Tensor:
    """One token of each chunk of x (B, H, T, C, ...)."""
    return x.gather(-2, index.expand_as(x[..., :1, :])).squeeze(-2)


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


def _running(x: Tensor, start: Tensor, chunks: Chunks) -> tuple[Tensor, Tensor]:
    """Sums of x (B, H, T, ...) over the chunks before each one, and over all, counting from start (B, H, ...)."""
    if chunks.packed is not None:
        return _running_packed(x, start, chunks.packed)
    if is_compiling() or chunks.number > FEW_CHUNKS:
        total = torch.cat((start[:, :, None], x), dim=2).cumsum(2)
        return total[:, :, :-1], total[:, :, -1]
    *before, total = accumulate((start, *x.unbind(2)))
    return torch.stack(before, dim=2), total


def _running_packed(x: Tensor, start: Tensor, packed: Packed) -> tuple[Tensor, Tensor]:
    """The same of x (1, H, T, ...) for each sequence by itself, in a logarithmic number of steps."""
    number, trailing = x.shape[2], [1] * (x.ndim - 3)
    index = torch.arange(number, device=x.device)

    def earlier(x: Tensor, step: int) -> Tensor:
        """What lies `step` chunks back in the same sequence, nothing where there is no such chunk."""
        reached = (index - step >= packed.first).view(-1, *trailing)
        return F.pad(x[:, :, :-step], [0, 0] * len(trailing) + [step, 0]).masked_fill(~reached, 0)

    step = 1
    while step < number:
        x, step = x + earlier(x, step), 2 * step
    before = start[packed.sequence].transpose(0, 1)[None] + earlier(x, 1)
    total = start + x[0, :, packed.last].transpose(0, 1)
    return before, torch.where(packed.empty.view(-1, *[1] * (start.ndim - 1)), start, total)
