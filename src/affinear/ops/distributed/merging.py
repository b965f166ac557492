"""States merged over the ranks of a group: of all of them, or of those before this one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from ..state import State, fraction, merge, outer
from .collectives import all_sum, finish_sum, gather, shift, start_sum

GATHER_UP_TO = 8  # ranks; beyond, a logarithmic number of steps moves less than everybody's states
HALF = 2**20  # a count travels as two whole numbers, each of which float32 has exactly


@dataclass(frozen=True)
class Pending:
    """A state on its way from all ranks: what is done before `wait` is done meanwhile."""

    wait: Callable[[], State]


def start_all_reduce(state: State, group: dist.ProcessGroup) -> Pending:
    """Send a state off to be merged with those of all ranks, as one flat buffer of sums.

    Sums of float32 statistics are taken in float64, about zero: products of two float32 numbers are exact there, and
    what cancels costs less than the rounding of the tokens did. Of float64 statistics the means go ahead, so that the
    covariances can be taken about the means of all.
    """
    if state.dtype == torch.float64:
        return _start_about_means(state, group)
    buffer = _sums(state)
    pending = start_sum(buffer, group)
    return Pending(lambda: _from_sums(finish_sum(pending, group, state.device), state))


def all_reduce(state: State, group: dist.ProcessGroup) -> State:
    """The state of all ranks' tokens; every rank gets the same bits."""
    return start_all_reduce(state, group).wait()


def before(state: State, group: dist.ProcessGroup, first: int = 0) -> State:
    """The state of the ranks from `first` up to the one before this, of whom each brings its own.

    Up to eight ranks gather all states at once, more of them double their reach in every step; a start other than the
    first rank is always gathered.
    """
    if group.size() > GATHER_UP_TO and first == 0:
        return _before_in_steps(state, group)
    return _before_gathered(state, group, first)


def _before_gathered(state: State, group: dist.ProcessGroup, first: int) -> State:
    states = gather(_pack(state), group)
    ranks = torch.arange(group.size(), device=state.device)
    hidden = (ranks < first) | (ranks >= group.rank())
    # Filled, not weighed: what a later rank holds, even NaN, is nobody's business here.
    states = states.masked_fill(hidden.view(-1, *[1] * (states.ndim - 1)), 0)
    return _merge_all(_unpack(states, state))


def _before_in_steps(state: State, group: dist.ProcessGroup) -> State:
    past, step = _unpack(shift(_pack(state), 1, group), state), 1
    while step < group.size() - 1:
        past, step = merge(_unpack(shift(_pack(past), step, group), state), past), 2 * step
    return past


def _merge_all(parts: State) -> State:
    """The state of disjoint sets of tokens along the first dimension."""
    count = parts.count.sum(0)
    share = fraction(parts.count, count, parts.dtype)[..., None]

    def mean(x: Tensor) -> Tensor:
        return (share * x).sum(0)

    rotated = None if parts.rotated_key_mean is None else mean(parts.rotated_key_mean)
    whole = replace(
        parts,
        count=count,
        key_mean=mean(parts.key_mean),
        value_mean=mean(parts.value_mean),
        rotated_key_mean=rotated,
        rest=None,
    )
    between = outer(parts.centre - whole.centre, parts.value_mean - whole.value_mean)
    return replace(whole, covariance=(share[..., None] * (parts.covariance + between)).sum(0))


def _means(state: State) -> list[Tensor]:
    means = [state.key_mean, state.value_mean]
    return means if state.rotated_key_mean is None else [*means, state.rotated_key_mean]


def _with_means(like: State, count: Tensor, means: Tensor, covariance: Tensor) -> State:
    """A state of means that lie side by side."""
    key_mean, value_mean, *rotated = means.split([mean.shape[-1] for mean in _means(like)], dim=-1)
    return replace(
        like,
        count=count,
        key_mean=key_mean,
        value_mean=value_mean,
        covariance=covariance,
        rotated_key_mean=rotated[0] if rotated else None,
        rest=None,
    )


def _sums(state: State) -> Tensor:
    """Count, sums and raw second moments, (B, H, numbers), in float64."""
    wide = state.map(Tensor.double)
    n = wide.count[..., None]
    moments = wide.covariance + outer(wide.centre, wide.value_mean)
    return torch.cat((n, *(n * mean for mean in _means(wide)), (n[..., None] * moments).flatten(-2)), dim=-1)


def _from_sums(sums: Tensor, like: State) -> State:
    """The state that has these sums."""
    width = sum(mean.shape[-1] for mean in _means(like))
    count, means, moments = sums.split([1, width, sums.shape[-1] - 1 - width], dim=-1)
    n = count.detach().clamp(min=1)
    whole = _with_means(like, count[..., 0].detach().long(), means / n, (moments / n).view_as(like.covariance))
    covariance = whole.covariance - outer(whole.centre, whole.value_mean)
    narrow = replace(whole, covariance=covariance).map(lambda x: x.to(like.dtype) if x.is_floating_point() else x)
    return narrow


def _start_about_means(state: State, group: dist.ProcessGroup) -> Pending:
    """The same in two messages, without raw moments."""
    n = state.count[..., None].to(state.dtype)
    sums = all_sum(torch.cat((n, *(n * mean for mean in _means(state))), dim=-1), group)
    count = sums[..., :1].detach()
    whole = _with_means(state, count[..., 0].long(), sums[..., 1:] / count.clamp(min=1), state.covariance)
    between = outer(state.centre - whole.centre, state.value_mean - whole.value_mean)
    share = (n / count.clamp(min=1))[..., None]
    pending = start_sum(share * (state.covariance + between), group)
    return Pending(lambda: replace(whole, covariance=finish_sum(pending, group, state.device)))


def _pack(state: State) -> Tensor:
    """All numbers of a state as they are, (B, H, numbers)."""
    count = torch.stack((state.count // HALF, state.count % HALF), dim=-1).to(state.dtype)
    return torch.cat((count, *_means(state), state.covariance.flatten(-2)), dim=-1)


def _unpack(packed: Tensor, like: State) -> State:
    """What `_pack` packed, with any dimensions before."""
    width = sum(mean.shape[-1] for mean in _means(like))
    count, means, covariance = packed.split([2, width, packed.shape[-1] - 2 - width], dim=-1)
    halves = count.detach().long()
    covariance = covariance.unflatten(-1, like.covariance.shape[-2:])
    return _with_means(like, halves[..., 0] * HALF + halves[..., 1], means, covariance)
