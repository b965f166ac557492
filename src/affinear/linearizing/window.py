"""A short window of softmax, with the first tokens as sinks, beside linear attention of all between: one normaliser.

A query p sees by softmax the tokens p - window + 1 to p and the sinks. All tokens between, n of them, are answered by
the linear part with one mean of values, whose weights sum to one. It enters the softmax as one more key: its value is
that answer, and its score is

    log n + D ** -0.5 * q . mean(k) + mass

the logarithm of the least that those n keys can weigh in a softmax (exp is convex), and a number that each head learns
for what they weigh beyond that. `docs/linearizing.md` has the derivation. Where attention is not causal, a query sees
the tokens p - window + 1 to p + window - 1, and what lies beyond is two such keys: all before it, and all after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from ..ops import State
from ..ops.precision import exact, widen
from .choices import Choices
from .sums import running_sum

Far = Callable[[Tensor, Tensor, Tensor, Tensor, State | None], tuple[Tensor, State | None]]


@dataclass(frozen=True)
class Recent:
    """The tokens of the window, the sinks, and the mean key of all between.

    Attributes:
        key: (B, W, G, D), the latest tokens.
        value: (B, W, G, E).
        mask: (B, W), where there is a token.
        is_sink: (B, W), where that token is one of the sinks.
        sink_key: (B, S, G, D).
        sink_value: (B, S, G, E).
        sink_at: (B, S), where in the sequence each sink stands; -1 where there is none yet.
        there: (B,), how many tokens there were, padding not counted.
        key_sum: (B, G, D), of the tokens between, in float32 or float64.
        count: (B,), how many they are.
    """

    key: Tensor
    value: Tensor
    mask: Tensor
    is_sink: Tensor
    sink_key: Tensor
    sink_value: Tensor
    sink_at: Tensor
    there: Tensor
    key_sum: Tensor
    count: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> Recent:
        """The same with the function applied to each tensor."""
        return Recent(**{field.name: function(getattr(self, field.name)) for field in fields(self)})


@dataclass(frozen=True)
class Memory:
    """All that a causal layer keeps of the tokens that it has seen; of one size, however many they were.

    Attributes:
        state: Of the linear part; None where there is nothing yet.
        recent: Of the window; None where there is none.
        seen: How many tokens, padding counted.
        tail: (B, K - 1, G, E), the latest values, of a convolution of K; None where there is none, or nothing yet.
    """

    state: State | None = None
    recent: Recent | None = None
    seen: int = 0
    tail: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> Memory:
        """The same with the function, which may choose among the batch, applied to each tensor."""
        state = None if self.state is None else self.state.map(function)
        recent = None if self.recent is None else self.recent.map(function)
        return replace(self, state=state, recent=recent, tail=None if self.tail is None else function(self.tail))

    def owned(self) -> Memory:
        """The same in room of its own: a slice would hold on to the whole text that it was cut from."""
        return self.map(lambda x: x.clone() if x.untyped_storage().nbytes() > 2 * x.nbytes else x)

    def numbers(self) -> int:
        """How many numbers it holds."""
        tensors: list[Tensor] = []
        self.map(lambda x: tensors.append(x) or x)
        return sum(x.numel() for x in tensors)


def near_and_far(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    memory: Memory,
    key_mask: Tensor | None,
    choices: Choices,
    far: Far,
    mass: Tensor | None,
) -> tuple[Tensor, Memory]:
    """Answers (B, N, H, E) and the memory after them. `far` is the linear part: what it is given is causal already."""
    before = _blank(key, value, choices) if memory.recent is None else memory.recent
    mask = key.new_ones(key.shape[:2], dtype=torch.bool) if key_mask is None else key_mask
    recent, latest, sinks = _joined(before, key, value, mask, memory.seen, choices)
    past, state, recent = _beyond(query, latest, recent, memory.state, choices, far, mass)
    at = torch.arange(memory.seen, memory.seen + query.shape[1], device=query.device)
    lit = (sinks.sink_at[:, None] >= 0) & (sinks.sink_at[:, None] <= at[:, None])
    out = _softmax(query, latest, sinks, lit, [past], choices.window, ahead=0)
    return out, Memory(state, recent, memory.seen + query.shape[1])


def near_and_around(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    choices: Choices,
    far: Far,
    mass: Tensor | None,
) -> Tensor:
    """Answers (B, N, H, E) where tokens see both ways. `far` is the linear part, causal: it is asked once each way."""
    window = max(1, min(choices.window, query.shape[1]))  # nobody has more tokens than there are, on either side
    choices = replace(choices, window=window)
    mask = key.new_ones(key.shape[:2], dtype=torch.bool) if key_mask is None else key_mask
    blank = _blank(key, value, choices)
    _, latest, sinks = _joined(blank, key, value, mask, 0, choices)
    past = _beyond(query, latest, blank, None, choices, far, mass)[0]
    later = latest.map(lambda x: torch.cat((x[:, :window], x[:, window:].flip(1)), dim=1))  # a blank window before it
    future = _beyond(query.flip(1), later, blank, None, choices, far, mass)[0]
    lit = (sinks.sink_at[:, None] >= 0).expand(-1, query.shape[1], -1)
    both = [past, _Beyond(future.score.flip(1), future.answer.flip(1))]
    return _softmax(query, latest, sinks, lit, both, window, ahead=window - 1)


@dataclass(frozen=True)
class _Latest:
    """The window's tokens followed by the new ones."""

    key: Tensor
    value: Tensor
    mask: Tensor
    is_sink: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> _Latest:
        """The same with the function applied to each tensor."""
        return _Latest(function(self.key), function(self.value), function(self.mask), function(self.is_sink))


@dataclass(frozen=True)
class _Beyond:
    """All tokens beyond the window on one side, as one key: its score (B, N, H) and its value (B, N, H, E)."""

    score: Tensor
    answer: Tensor


def _beyond(
    query: Tensor,
    latest: _Latest,
    recent: Recent,
    state: State | None,
    choices: Choices,
    far: Far,
    mass: Tensor | None,
) -> tuple[_Beyond, State | None, Recent]:
    """What has left the window before each query, and the linear state and the sums after it."""
    tokens = query.shape[1]
    # Token i of the joined ones leaves the window just as query i comes: what is between is causal in that order.
    gone = (latest.mask & ~latest.is_sink)[:, :tokens]
    answer, state = far(query, latest.key[:, :tokens], latest.value[:, :tokens], gone, state)
    score, recent = _score_far(query, latest.key[:, :tokens], gone, recent, mass)
    if choices.mechanism == "none":
        score = torch.full_like(score, -torch.inf)
    return _Beyond(score, answer), state, recent


def _blank(key: Tensor, value: Tensor, choices: Choices) -> Recent:
    batch, _, heads, width = key.shape
    window, sinks = choices.window, choices.sinks
    return Recent(
        key=key.new_zeros(batch, window, heads, width),
        value=value.new_zeros(batch, window, heads, value.shape[-1]),
        mask=key.new_zeros(batch, window, dtype=torch.bool),
        is_sink=key.new_zeros(batch, window, dtype=torch.bool),
        sink_key=key.new_zeros(batch, sinks, heads, width),
        sink_value=value.new_zeros(batch, sinks, heads, value.shape[-1]),
        sink_at=key.new_full((batch, sinks), -1, dtype=torch.long),
        there=key.new_zeros(batch, dtype=torch.long),
        key_sum=widen(key.new_zeros(batch, heads, width)),
        count=key.new_zeros(batch, dtype=torch.long),
    )


def _joined(
    before: Recent, key: Tensor, value: Tensor, mask: Tensor, seen: int, choices: Choices
) -> tuple[Recent, _Latest, Recent]:
    """What is kept for later, the window with the new tokens, and the sinks as they are now."""
    rank = before.there[:, None] + mask.cumsum(1)
    is_sink = mask & (rank <= choices.sinks)
    slots = torch.arange(1, choices.sinks + 1, device=key.device)
    chosen = is_sink[..., None] & (rank[..., None] == slots)  # (B, N, S), each slot filled at most once
    at = torch.arange(seen + 1, seen + 1 + key.shape[1], device=key.device)
    filled = replace(
        before,
        sink_key=before.sink_key + _picked(chosen, key),
        sink_value=before.sink_value + _picked(chosen, value),
        sink_at=before.sink_at + (chosen * at[:, None]).sum(1),
    )
    latest = _Latest(
        torch.cat((before.key, key), 1),
        torch.cat((before.value, value), 1),
        torch.cat((before.mask, mask), 1),
        torch.cat((before.is_sink, is_sink), 1),
    )
    window = -choices.window
    kept = replace(
        filled,
        key=latest.key[:, window:],
        value=latest.value[:, window:],
        mask=latest.mask[:, window:],
        is_sink=latest.is_sink[:, window:],
        there=before.there + mask.sum(1),
    )
    return kept, latest, filled


def _picked(chosen: Tensor, tokens: Tensor) -> Tensor:
    """Tokens (B, N, G, D) in their slots (B, S, G, D); those not chosen may hold anything."""
    taken = tokens.masked_fill(~chosen.any(-1)[..., None, None], 0)
    return torch.einsum("bns,bngd->bsgd", chosen.to(taken.dtype), taken)


def _score_far(query: Tensor, key: Tensor, gone: Tensor, recent: Recent, mass: Tensor | None) -> tuple[Tensor, Recent]:
    """The score of all between (B, N, H), and the memory with their sums."""
    with exact(query):
        wide = widen(key).masked_fill(~gone[..., None, None], 0)
        sums = recent.key_sum[:, None] + running_sum(wide)
        count = recent.count[:, None] + gone.cumsum(1)
        mean = sums / count.clamp(min=1)[..., None, None]
        mean = mean.repeat_interleave(query.shape[2] // key.shape[2], dim=2)
        scores = (widen(query) * mean).sum(-1) * query.shape[-1] ** -0.5
        scores = scores + count.clamp(min=1).to(scores.dtype).log()[..., None]
        if mass is not None:
            scores = scores + mass.to(scores.dtype)
        scores = scores.masked_fill((count == 0)[..., None], -torch.inf)
    return scores, replace(recent, key_sum=sums[:, -1], count=count[:, -1])


def _softmax(
    query: Tensor, latest: _Latest, sinks: Recent, lit: Tensor, beyond: Sequence[_Beyond], window: int, ahead: int
) -> Tensor:
    """One softmax over the window, with `ahead` tokens after the query, the sinks that are lit, and what is beyond."""
    tokens, width = query.shape[1], query.shape[3]
    groups = latest.key.shape[2]
    block = min(window, tokens)
    blocks = -(-tokens // block)
    spare, span = blocks * block - tokens, window + block + ahead
    with exact(query):
        asked = F.pad(widen(query) * width**-0.5, (0, 0, 0, 0, 0, spare))
        asked = asked.unflatten(1, (blocks, block)).unflatten(3, (groups, -1))
        key, value = (
            F.pad(widen(x).masked_fill(~latest.mask[..., None, None], 0), (0, 0, 0, 0, 0, spare + ahead)).unfold(
                1, span, block
            )
            for x in (latest.key, latest.value)
        )
        there = F.pad(latest.mask & ~latest.is_sink, (0, spare + ahead)).unfold(1, span, block)
        near = torch.einsum("bxigrd,bxgdt->bxigrt", asked, key)
        step = torch.arange(span, device=query.device) - torch.arange(block, device=query.device)[:, None]
        band = (step >= 1) & (step <= window + ahead)
        visible = band[None, None] & there[:, :, None]
        near = near.masked_fill(~visible[:, :, :, None, None], -torch.inf)
        near = near.flatten(1, 2)[:, :tokens].flatten(2, 3)  # (B, N, H, span)
        asked = asked.flatten(1, 2)[:, :tokens]
        fixed = torch.einsum("bigrd,bsgd->bigrs", asked, widen(sinks.sink_key)).flatten(2, 3)
        fixed = fixed.masked_fill(~lit[:, :, None], -torch.inf)
        scores = torch.cat((near, fixed, *(side.score[..., None] for side in beyond)), dim=-1)
        blind = scores.amax(-1, keepdim=True) == -torch.inf  # padding, which sees nothing
        share = scores.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)
        near, fixed, rest = share.split([span, fixed.shape[-1], len(beyond)], dim=-1)
        near = F.pad(near, (0, 0, 0, 0, 0, spare)).unflatten(1, (blocks, block)).unflatten(3, (groups, -1))
        out = torch.einsum("bxigrt,bxget->bxigre", near, value).flatten(1, 2)[:, :tokens].flatten(2, 3)
        fixed = fixed.unflatten(2, (groups, -1))
        out = out + torch.einsum("bigrs,bsge->bigre", fixed, widen(sinks.sink_value)).flatten(2, 3)
        for side, weight in zip(beyond, rest.unbind(-1), strict=True):
            out = out + weight[..., None] * widen(side.answer)
        return out.to(query.dtype)
