"""The definitions: explicit weight matrices from each paper's own rule. Quadratic, for truth and for looking."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .mechanisms import (
    GUARD,
    RELEASED_EPSILON,
    Gain,
    MeanWeight,
    Mechanism,
    one,
    one_plus_reciprocal,
    reciprocal,
    released_mala_mean,
    released_nala_mean,
    released_one_plus_reciprocal,
    released_reciprocal,
)
from .packing import sequence_of_each_token, visibility
from .precision import widen
from .rotary import Rotary, rotate
from .sieve import may_be_wild
from .state import State, merge


@dataclass(frozen=True)
class Scores:
    """Scores of every query against every key, (B, H, N, M), zero where a key is out of sight.

    Attributes:
        plain: scale * phi(q) . phi(k).
        rotated: The same of the rotated features; `plain` itself without rotary positions.
        visible: Which keys each query sees, broadcastable to the scores.
        count: How many keys each query sees, at least one so that it divides; broadcastable to (B, H, N, 1).
    """

    plain: Tensor
    rotated: Tensor
    visible: Tensor
    count: Tensor

    @property
    def z(self) -> Tensor:
        """Mean score of each query, (B, H, N, 1)."""
        return self.plain.sum(-1, keepdim=True) / self.count


def divide(scores: Scores) -> Tensor:
    """Linear attention: each score over the sum of its row. What a vanishing sum leaves undecided is shared evenly."""
    total = scores.plain.sum(-1, keepdim=True).clamp(min=0).maximum(GUARD * scores.count)
    share = scores.rotated / total
    return share + (1 - share.sum(-1, keepdim=True)) / scores.count


def subtract(scores: Scores) -> Tensor:
    """InLine: each score less the mean of its row, plus one n-th."""
    mean = scores.rotated.sum(-1, keepdim=True) / scores.count
    return (scores.rotated - mean + 1) / scores.count


def magnify(scores: Scores) -> Tensor:
    """MALA: beta * score - gamma with beta = 1 + 1 / S and gamma = S / n, written out as its two summands."""
    mean = scores.rotated.sum(-1, keepdim=True) / scores.count
    return divide(scores) + (scores.rotated - mean) / scores.count


def magnify_as_released(scores: Scores) -> Tensor:
    """MALA as its networks compute it: gamma knows nothing of the rotation, and 1e-6 guards the division."""
    beta = 1 + 1 / (scores.z + RELEASED_EPSILON)
    return (beta * scores.rotated - scores.z) / scores.count


def divide_as_released(scores: Scores) -> Tensor:
    """NaLaFormer as its networks compute it: rotated scores over the unrotated mean plus 1e-6."""
    return scores.rotated / (scores.z + RELEASED_EPSILON) / scores.count


def exponentiate(scores: Scores) -> Tensor:
    """Softmax."""
    logits = scores.rotated.masked_fill(~scores.visible, -torch.inf)
    nothing = ~scores.visible.any(-1, keepdim=True)
    return logits.masked_fill(nothing, 0).softmax(-1)


def by_definition(scores: Scores, mechanism: Mechanism) -> Tensor:
    """A mechanism that no paper wrote down for us: the mean, plus the gain times the centred scores."""
    assert mechanism.gain is not None
    z = scores.z
    mean = scores.rotated.sum(-1, keepdim=True) / scores.count
    floor = torch.ones_like(z) if mechanism.mean_weight is None else mechanism.mean_weight(z, mean - z)
    return (floor + mechanism.gain(z) * (scores.rotated - mean)) / scores.count


# Whose gain and weight of the mean are a paper's, has that paper's rule, whatever its feature map and its name.
PAPER_RULES: dict[tuple[Gain | None, MeanWeight | None], Callable[[Scores], Tensor]] = {
    (reciprocal, None): divide,
    (one, None): subtract,
    (one_plus_reciprocal, None): magnify,
    (released_one_plus_reciprocal, released_mala_mean): magnify_as_released,
    (released_reciprocal, released_nala_mean): divide_as_released,
    (None, None): exponentiate,
}


def weights(
    query: Tensor,
    key: Tensor,
    mechanism: Mechanism,
    scale: float,
    visible: Tensor,
    rotary: Rotary | None,
    chosen: Tensor | None = None,
) -> Tensor:
    """Weight of every key for every query, (B, H, N, M), or for the queries with the chosen numbers alone."""
    features_q, features_k, rotated_q, rotated_k = _features(widen(query), widen(key), mechanism, visible, rotary)
    if chosen is not None:
        features_q, rotated_q = features_q[:, chosen], rotated_q[:, chosen]
        visible = visible if visible.shape[-2] == 1 else visible[..., chosen, :]
    scores = _score(features_q, features_k, rotated_q, rotated_k, scale, visible)
    rule = PAPER_RULES.get((mechanism.gain, mechanism.mean_weight))
    rows = by_definition(scores, mechanism) if rule is None else rule(scores)
    return rows.masked_fill(~visible, 0)


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
    """Weights times values, (B, N, H, E), and the state of all keys if asked for."""
    query, key, value = widen(query), widen(key), widen(value)
    visible = visibility(query, key, causal, key_mask, cu_seqlens_q, cu_seqlens_k)

    def answer(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return _answer(query, key, value, mechanism, scale, visible, rotary, initial_state, cu_seqlens_q)

    out = answer(query, key, value)
    if may_be_wild(out):
        out = _apart(answer, query, key, value, mechanism, visible)
    if not return_state:
        return out, None
    state = summarize(key, value, mechanism=mechanism, key_mask=key_mask, cu_seqlens=cu_seqlens_k, rotary=rotary)
    return out, state if initial_state is None else merge(initial_state, state)


def _answer(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mechanism: Mechanism,
    scale: float,
    visible: Tensor,
    rotary: Rotary | None,
    initial: State | None,
    cu_seqlens: Tensor | None,
) -> Tensor:
    seen_value = value.masked_fill(_unseen(visible), 0).repeat_interleave(query.shape[2] // key.shape[2], dim=2)
    if initial is None:
        rows = weights(query, key, mechanism, scale, visible, rotary)
        return torch.einsum("bhnm,bmhe->bnhe", rows, seen_value)
    _, features, _, rotated = _features(query, key, mechanism, visible, rotary)
    own = _summarize_for_each(features, None if rotary is None else rotated, seen_value, visible, mechanism)
    return _attend(query, merge(_for_each(initial, query, cu_seqlens), own), scale, rotary)


def _apart(
    answer: Callable[[Tensor, Tensor, Tensor], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mechanism: Mechanism,
    visible: Tensor,
) -> Tensor:
    """Answers where something is not finite: it does not reach the rows that do not see it, nor their gradients."""
    group = query.shape[2] // key.shape[2]
    bad_key = ~mechanism.key_map(key).detach().isfinite().all(-1, keepdim=True)
    bad = bad_key | ~value.detach().isfinite()
    key, value = key.masked_fill(bad_key, 0), value.masked_fill(bad, 0)
    seen = torch.einsum("bhnm,bmge->bnge", visible.to(value.dtype), bad.to(value.dtype)) > 0
    with torch.no_grad():
        wild = seen.repeat_interleave(group, dim=2) | ~answer(query, key, value).isfinite()
    # A row that answers nothing finite asks nothing: what it would multiply its gradient by is then finite.
    out = answer(query.masked_fill(wild.any(-1, keepdim=True), 0), key, value)
    return out + torch.zeros_like(out).masked_fill(wild, torch.nan)


def summarize(
    key: Tensor,
    value: Tensor,
    *,
    mechanism: Mechanism,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    rotary: Rotary | None,
) -> State:
    """Count, means and two-sided covariance."""
    key, value = widen(key), widen(value)
    present = torch.ones(key.shape[:2], dtype=torch.bool, device=key.device) if key_mask is None else key_mask
    hidden = ~present[..., None, None]
    if cu_seqlens is not None:
        # Each sequence is a batch entry that sees its own part of the same tokens.
        sequences = torch.arange(cu_seqlens.shape[0] - 1, device=key.device)
        present = sequence_of_each_token(cu_seqlens, key.shape[1]) == sequences[:, None]
    features = mechanism.key_map(key.masked_fill(hidden, 0))
    batch = (present.shape[0], -1, -1, -1)
    state = _summarize_for_each(
        features.expand(batch),
        None if rotary is None else rotate(features, rotary).expand(batch),
        value.masked_fill(hidden, 0).expand(batch),
        present[:, None, None],
        mechanism,
    )
    return state.map(lambda x: x[:, 0])


def attend(query: Tensor, state: State, *, scale: float, cu_seqlens: Tensor | None, rotary: Rotary | None) -> Tensor:
    """The mean value plus the gain times the covariance, (B, N, H, E)."""
    query = widen(query)
    return _attend(query, _for_each(state, query, cu_seqlens), scale, rotary)


def _attend(query: Tensor, state: State, scale: float, rotary: Rotary | None) -> Tensor:
    """The answer to each query of a state of its own: (B, N, H, ...)."""
    mechanism = state.mechanism
    assert mechanism.gain is not None
    features = mechanism.query_map(query)
    rotated = features if rotary is None else rotate(features, rotary)
    z = scale * (features * state.key_mean).sum(-1, keepdim=True)
    answer = mechanism.gain(z) * scale * (rotated[..., None] * state.covariance).sum(-2)
    mean = state.value_mean
    if mechanism.mean_weight is not None:
        added = scale * (rotated * state.centre - features * state.key_mean).sum(-1, keepdim=True)
        mean = mechanism.mean_weight(z, added) * mean
    return (answer + mean).masked_fill(state.count[..., None] == 0, 0)


def _for_each(state: State, query: Tensor, cu_seqlens: Tensor | None) -> State:
    """A state (B, heads, ...), or (S, heads, ...) of packed sequences, laid out for each query as (B, N, H, ...)."""
    state = state.map(lambda x: x.repeat_interleave(query.shape[2] // x.shape[1], dim=1))
    if cu_seqlens is None:
        return state.map(lambda x: x[:, None].expand(-1, query.shape[1], *x.shape[1:]))
    sequence = sequence_of_each_token(cu_seqlens, query.shape[1])
    return state.map(lambda x: x[sequence][None])


def _features(
    query: Tensor, key: Tensor, mechanism: Mechanism, visible: Tensor, rotary: Rotary | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Features of queries and keys and their rotated twins, with as many key heads as query heads."""
    key = key.masked_fill(_unseen(visible), 0)
    features_q = mechanism.query_map(query)
    features_k = mechanism.key_map(key).repeat_interleave(query.shape[2] // key.shape[2], dim=2)
    if rotary is None:
        return features_q, features_k, features_q, features_k
    return features_q, features_k, rotate(features_q, rotary), rotate(features_k, rotary)


def _score(
    features_q: Tensor, features_k: Tensor, rotated_q: Tensor, rotated_k: Tensor, scale: float, visible: Tensor
) -> Scores:
    def product(q: Tensor, k: Tensor) -> Tensor:
        return scale * torch.einsum("bnhf,bmhf->bhnm", q, k).masked_fill(~visible, 0)

    plain = product(features_q, features_k)
    rotated = plain if rotated_k is features_k else product(rotated_q, rotated_k)
    count = visible.sum(-1, keepdim=True).clamp(min=1)
    return Scores(plain, rotated, visible, count.to(plain.dtype))


def _unseen(visible: Tensor) -> Tensor:
    """Keys out of sight, (B or 1, M, 1, 1): they may hold anything, even NaN, which a zero weight would not remove."""
    return ~visible.any(dim=-2)[:, 0, :, None, None]


def _summarize_for_each(
    features: Tensor, rotated: Tensor | None, value: Tensor, visible: Tensor, mechanism: Mechanism
) -> State:
    """The state of the keys that each query sees, (B, N, H, ...)."""
    count = visible.sum(-1)[:, 0, :, None]
    share = (visible[:, 0].to(value.dtype) / count.clamp(min=1)).expand(value.shape[0], -1, -1)

    def mean(x: Tensor) -> Tensor:
        return torch.einsum("bnm,bmhf->bnhf", share, x)

    key_mean, value_mean = mean(features), mean(value)
    centre = key_mean if rotated is None else mean(rotated)
    moment = torch.einsum("bnm,bmhf,bmhe->bnhfe", share, features if rotated is None else rotated, value)
    return State(
        count=count.expand(value.shape[0], -1, value.shape[2]),
        key_mean=key_mean,
        value_mean=value_mean,
        covariance=moment - centre[..., None] * value_mean[..., None, :],
        mechanism=mechanism,
        rotated_key_mean=None if rotated is None else centre,
    )
