"""Summarize and attend over whole tensors, in linear time."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .layout import CHUNK, arrange_keys, arrange_queries, cut_into_chunks, restore_tokens
from .mechanisms import Mechanism
from .packing import Chunks
from .precision import widen
from .rotary import Rotary
from .sieve import can_be_read
from .state import State, fraction, outer


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
    key, value = widen(key), widen(value)
    if cu_seqlens is None:
        features, rotated, value = arrange_keys(key, value, mechanism, key_mask, rotary)
        filled = None if key_mask is None else key_mask[:, None]
        return moments(features, rotated, value, filled, mechanism)
    chunks = cut_into_chunks(key, chunk, cu_seqlens)
    features, rotated, value = arrange_keys(key, value, mechanism, None, rotary, chunks)
    return merge_sequences(moments(features, rotated, value, chunks.filled, mechanism), chunks)


def summarize_backward(
    key: Tensor, value: Tensor, state: State, grad: State, key_mask: Tensor | None, rotary: Rotary | None
) -> tuple[Tensor, Tensor]:
    """Gradients of some of the keys and values that a state was made of, from those of the state.

    Moving one token moves the means by one n-th, and the covariance as if the means stood still: what the means do to
    it sums to nothing.
    """
    with torch.enable_grad():
        key = key.detach().requires_grad_()
        features, rotated, values = arrange_keys(widen(key), widen(value), state.mechanism, key_mask, rotary)
    n = state.count.clamp(min=1)[..., None, None].to(state.dtype)
    with torch.no_grad():
        values = values - state.value_mean[..., None, :]
        keys = rotated - state.centre[..., None, :]
        grad_value = (grad.value_mean[..., None, :] + keys @ grad.covariance) / n
        grad_rotated = values @ (grad.covariance / n).mT
        grad_features = grad.key_mean[..., None, :] / n
        if grad.rotated_key_mean is not None:
            grad_rotated += grad.rotated_key_mean[..., None, :] / n
            outputs, grads = (features, rotated), (grad_features.expand_as(features), grad_rotated)
        else:
            outputs, grads = (features,), (grad_rotated + grad_features,)
        grad_value = grad_value.transpose(1, 2)
        if key_mask is not None:
            grad_value = grad_value.masked_fill(~key_mask[..., None, None], 0)
    return torch.autograd.grad(outputs, key, grads)[0], grad_value


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
    query = widen(query)
    chunks = None
    if cu_seqlens is not None:
        chunks = cut_into_chunks(query, chunk, cu_seqlens)
        assert chunks.packed is not None
        sequence = chunks.packed.sequence
        state = state.map(lambda x: x[sequence].transpose(0, 1)[None])
    mechanism, heads = state.mechanism, state.key_mean.shape[1]
    assert mechanism.gain is not None
    features, rotated = arrange_queries(query, mechanism, heads, rotary, chunks)
    z = scale * (features @ state.key_mean[..., None])
    mean = state.value_mean[..., None, :]
    if mechanism.mean_weight is not None:
        plain, turned = features * state.key_mean[..., None, :], rotated * state.centre[..., None, :]
        mean = mechanism.mean_weight(z, scale * (turned - plain).sum(-1, keepdim=True)) * mean
    out = (mechanism.gain(z) * (rotated @ (scale * state.covariance))).add_(mean)
    nothing = state.count == 0
    if not can_be_read(nothing) or bool(nothing.any()):
        out = out.masked_fill(nothing[..., None, None], 0)  # whatever the query holds
    return restore_tokens(out, query.shape[2] // heads, chunks)


def merge_sequences(chunk: State, chunks: Chunks) -> State:
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
    between = outer(chunk.centre - spread(whole.centre), chunk.value_mean - spread(whole.value_mean))
    return replace(whole, covariance=gather(share[..., None] * (chunk.covariance + between)))


def moments(features: Tensor, rotated: Tensor, value: Tensor, filled: Tensor | None, mechanism: Mechanism) -> State:
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
