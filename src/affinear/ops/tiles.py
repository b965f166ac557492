"""Tile by tile: the functions of `linear` and `causal` over tiles of tokens small enough to stay in the cache.

States add, so a tile is summarized, merged and forgotten. The backward pass goes through the tiles again and computes
each one anew, so that nothing but the inputs and the states between tiles is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any

import torch
from torch import Tensor

from . import causal, linear
from .layout import CHUNK
from .mechanisms import Mechanism, is_built_in
from .precision import exact
from .rotary import Rotary
from .state import State, merge
from .tracing import is_eager, stands_for_many

CPU_TILE = 2**19  # numbers in a tile of tokens: two megabytes in float32, what a second-level cache holds
GPU_TILE = 2**24


@dataclass(frozen=True)
class Work:
    """What all tiles of a call have in common.

    Attributes:
        mechanism: What makes the features.
        scale: Factor of the scores.
        tile: Tokens in a tile.
        key_mask: (B, M), boolean, or None.
        rotary: Cosines and sines of all tokens, or None.
    """

    mechanism: Mechanism
    scale: float
    tile: int
    key_mask: Tensor | None
    rotary: Rotary | None

    def tiles(self, length: int) -> list[slice]:
        """The tiles of so many tokens, in order."""
        keep_freed_memory()
        return [slice(start, min(start + self.tile, length)) for start in range(0, length, self.tile)]

    def options(self, tile: slice) -> dict[str, Any]:
        """Mask and tables of one tile."""
        return {"key_mask": self.mask(tile), "rotary": self.tables(tile)}

    def mask(self, tile: slice) -> Tensor | None:
        """Mask of one tile."""
        return None if self.key_mask is None else self.key_mask[:, tile]

    def tables(self, tile: slice) -> Rotary | None:
        """Rotary tables of one tile."""
        return None if self.rotary is None else (self.rotary[0][tile], self.rotary[1][tile])


def tile_length(tokens: Tensor) -> int:
    """Tokens in a tile: a multiple of the chunk that makes a few megabytes."""
    numbers = CPU_TILE if tokens.device.type == "cpu" else GPU_TILE
    per_token = max(tokens.shape[0] * tokens.shape[2] * tokens.shape[3], 1)
    return max(numbers // per_token // CHUNK, 1) * CHUNK


@cache
def keep_freed_memory() -> None:
    """Ask the C allocator, once, to keep what tiles give back for the next tile.

    The allocator of glibc hands blocks back to the system from a size on that it learns from the largest block freed;
    before it has seen one of 31 MB, every tile would have its memory mapped and cleared anew.
    """
    torch.empty(31 * 2**20, dtype=torch.uint8)


def worthwhile(mechanism: Mechanism, rotary: Rotary | None, *tokens: Tensor) -> bool:
    """Whether to go tile by tile: more than one tile, nothing is being traced, and every gradient has a way back."""
    if not is_eager():
        return False
    if all(x.shape[1] <= tile_length(x) for x in tokens):
        return False
    # A feature map of the user's own, or a table, may hold parameters that only the plain graph knows of.
    tables_learn = rotary is not None and any(table.requires_grad for table in rotary)
    return not torch.is_grad_enabled() or (is_built_in(mechanism) and not tables_learn)


def summarize(key: Tensor, value: Tensor, work: Work) -> State:
    """`linear.summarize`, tile by tile."""
    if not (torch.is_grad_enabled() and (key.requires_grad or value.requires_grad)):
        return _summarize(key, value, work)
    return _restore(_Summarize.apply(key, value, work), work)


def attend(query: Tensor, state: State, work: Work) -> Tensor:
    """`linear.attend`, tile by tile."""
    children = _floats(state)
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in (query, *children))):
        return _attend(query, state, work)
    return _Attend.apply(query, work, state.count, *children)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, initial: State, work: Work) -> tuple[Tensor, State]:
    """`causal.causal_attention`, tile by tile."""
    children = _floats(initial)
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value, *children))):
        return _causal(query, key, value, initial, work)
    out, *final = _Causal.apply(query, key, value, work, initial.count, *children)
    return out, _restore(final, work)


def _summarize(key: Tensor, value: Tensor, work: Work) -> State:
    states = (
        linear.summarize(key[:, tile], value[:, tile], mechanism=work.mechanism, **work.options(tile))
        for tile in work.tiles(key.shape[1])
    )
    return reduce(merge, states)


def _attend(query: Tensor, state: State, work: Work) -> Tensor:
    out = query.new_empty(*query.shape[:3], state.value_mean.shape[-1])
    for tile in work.tiles(query.shape[1]):
        out[:, tile] = linear.attend(query[:, tile], state, scale=work.scale, rotary=work.tables(tile))
    return out


def _causal(
    query: Tensor, key: Tensor, value: Tensor, state: State, work: Work, between: list[State] | None = None
) -> tuple[Tensor, State]:
    """Answers and final state; `between`, where given, collects the state before each tile."""
    out = query.new_empty(*query.shape[:3], value.shape[-1])
    for tile in work.tiles(query.shape[1]):
        if between is not None:
            between.append(state)
        out[:, tile], state = _causal_tile(query[:, tile], key[:, tile], value[:, tile], state, work, tile)
    return out, state


def _causal_tile(
    query: Tensor, key: Tensor, value: Tensor, state: State, work: Work, tile: slice
) -> tuple[Tensor, State]:
    return causal.causal_attention(query, key, value, work.mechanism, work.scale, initial=state, **work.options(tile))


class _Summarize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, work: Work) -> tuple[Tensor, ...]:
        state = _summarize(key, value, work)
        children = _floats(state)
        ctx.work = work
        ctx.mark_non_differentiable(state.count)
        ctx.save_for_backward(key, value, state.count, *children)
        return (state.count, *children)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        key, value, count, *children = ctx.saved_tensors
        work: Work = ctx.work
        _, *grads_state = grads  # the count has none
        with exact(key):
            if _whole_is_needed(grads):
                with torch.enable_grad():
                    key, value = _aliases(key, value)
                    whole = linear.summarize(
                        key, value, mechanism=work.mechanism, key_mask=work.key_mask, rotary=work.rotary
                    )
                return *_differentiate_whole(_floats(whole), (key, value), grads_state), None
            state, grad = (_restore((count, *tensors), work) for tensors in (children, grads_state))
            grad_key, grad_value = torch.empty_like(key), torch.empty_like(value)
            for tile in work.tiles(key.shape[1]):
                grad_key[:, tile], grad_value[:, tile] = linear.summarize_backward(
                    key[:, tile], value[:, tile], state, grad, **work.options(tile)
                )
        return grad_key, grad_value, None


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, work: Work, count: Tensor, *children: Tensor) -> Tensor:
        ctx.work = work
        ctx.save_for_backward(query, count, *children)
        return _attend(query, _restore((count, *children), work), work)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, count, *children = ctx.saved_tensors
        work: Work = ctx.work
        with exact(query):
            if _whole_is_needed(grads):
                with torch.enable_grad():
                    query, *children = _aliases(query, *children)
                    state = _restore((count, *children), work)
                    whole = linear.attend(query, state, scale=work.scale, rotary=work.rotary).to(query.dtype)
                grad_query, *rest = _differentiate_whole((whole,), (query, *children), grads)
                return grad_query, None, None, *rest
            grad_query = torch.empty_like(query)
            totals = [torch.zeros_like(child) for child in children]
            for tile in work.tiles(query.shape[1]):
                with torch.enable_grad():
                    inputs = [x.detach().requires_grad_() for x in (query[:, tile], *children)]
                    state = _restore((count, *inputs[1:]), work)
                    out = linear.attend(inputs[0], state, scale=work.scale, rotary=work.tables(tile))
                grad_query[:, tile], *parts = _differentiate((out,), inputs, (grads[0][:, tile],))
                for total, part in zip(totals, parts, strict=True):
                    total += part
        return grad_query, None, None, *totals


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, work: Work, count: Tensor, *children: Tensor
    ) -> tuple[Tensor, ...]:
        between: list[State] = []
        out, final = _causal(query, key, value, _restore((count, *children), work), work, between)
        ctx.work = work
        ctx.mark_non_differentiable(final.count)
        ctx.save_for_backward(
            query, key, value, *children, *(x for state in between for x in (state.count, *_floats(state)))
        )
        return out, final.count, *_floats(final)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_out, _, *grads_final = grads
        work: Work = ctx.work
        size = len(grads_final)
        query, key, value, *rest = ctx.saved_tensors
        children, between = rest[:size], rest[size:]
        with exact(query):
            if _whole_is_needed(grads):
                with torch.enable_grad():
                    query, key, value, *children = _aliases(query, key, value, *children)
                    start = _restore((between[0], *children), work)
                    out, final = _causal_tile(query, key, value, start, work, slice(None))
                    outputs = (out.to(query.dtype), *_floats(final))
                parts = _differentiate_whole(outputs, (query, key, value, *children), (grad_out, *grads_final))
                return *parts[:3], None, None, *parts[3:]
            totals = [torch.empty_like(x) for x in (query, key, value)]
            carried: Sequence[Tensor] = grads_final
            for index, tile in reversed(list(enumerate(work.tiles(query.shape[1])))):
                count, *state = between[index * (size + 1) : (index + 1) * (size + 1)]
                with torch.enable_grad():
                    tokens = (x[:, tile] for x in (query, key, value))
                    inputs = [x.detach().requires_grad_() for x in (*tokens, *state)]
                    start = _restore((count, *inputs[3:]), work)
                    out, final = _causal_tile(inputs[0], inputs[1], inputs[2], start, work, tile)
                parts = _differentiate((out, *_floats(final)), inputs, (grad_out[:, tile], *carried))
                for total, part in zip(totals, parts[:3], strict=True):
                    total[:, tile] = part
                carried = parts[3:]
        return *totals, None, None, *carried


def _whole_is_needed(grads: Sequence[Tensor]) -> bool:
    """Whether this backward pass will itself be differentiated, or runs for many gradients at once."""
    return torch.is_grad_enabled() or any(map(stands_for_many, grads))


def _aliases(*tensors: Tensor) -> list[Tensor]:
    """The same tensors by other names: a gradient taken to them goes no further, even where one came of another."""
    return [x.view_as(x) for x in tensors]


def _floats(state: State) -> list[Tensor]:
    """The differentiable tensors of a state."""
    children = [state.key_mean, state.value_mean, state.covariance]
    return children if state.rotated_key_mean is None else [*children, state.rotated_key_mean]


def _restore(tensors: Sequence[Tensor], work: Work) -> State:
    """A state from its count and differentiable tensors."""
    count, key_mean, value_mean, covariance, *rotated = tensors
    return State(count, key_mean, value_mean, covariance, work.mechanism, next(iter(rotated), None))


def _differentiate(outputs: Sequence[Tensor], inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
    grads = [grad.to(out.dtype) for out, grad in zip(outputs, grads, strict=True)]
    return torch.autograd.grad(outputs, inputs, grads, allow_unused=True, materialize_grads=True)


def _differentiate_whole(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], grads: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Gradients of those inputs that want one, themselves differentiable where that is asked for."""
    pairs = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if out.requires_grad]
    wanted = [x for x in inputs if x.requires_grad]
    found = iter(
        torch.autograd.grad(
            [out for out, _ in pairs],
            wanted,
            [grad for _, grad in pairs],
            create_graph=torch.is_grad_enabled(),
            allow_unused=True,
            materialize_grads=True,
        )
    )
    return tuple(next(found) if x.requires_grad else None for x in inputs)
