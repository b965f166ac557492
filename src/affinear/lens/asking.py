"""Maps of transformers' layers: what they ask an attention function is overheard while a network is called."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import affinear


@dataclass(frozen=True)
class Seen:
    """Some rows of a layer's map.

    Attributes:
        weights: (B, H, R, M).
        real: (B, R), False where a query is padding, whose row nobody uses.
    """

    weights: Tensor
    real: Tensor


def rows_of(queries: int, most: int, device: torch.device) -> Tensor:
    """Numbers of so many queries at most, evenly among all."""
    return torch.linspace(0, queries - 1, min(most, queries)).long().to(device)


@contextmanager
def overheard(model: nn.Module, most: int) -> Generator[dict[str, Seen]]:
    """Maps of the layers of a network that go through transformers' attention interface, as they are called inside.

    Args:
        model: The network, or a module with such networks in it.
        most: Queries to look at, at most, evenly among all.
    """
    found: dict[str, Seen] = {}
    if "transformers" not in sys.modules:
        yield found
        return
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as functions

    names = {module: name for name, module in model.named_modules()}
    asked: set[str] = {_implementation(module) for module in names} - {""}
    held = {name: functions.get(name) for name in asked}
    for name, function in held.items():
        functions[name] = partial(_listen, function=function, names=names, most=most, found=found)
    try:
        yield found
    finally:
        for name, function in held.items():
            del functions[name]
            if function is not None and functions.get(name) is not function:
                functions[name] = function  # somebody had put it there


def _implementation(module: nn.Module) -> str:
    """The name of the attention function that a layer's configuration asks for; empty if there is none."""
    name = getattr(getattr(module, "config", None), "_attn_implementation", None)
    return name if isinstance(name, str) else ""


def _listen(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *args: Any,
    function: Callable[..., Any] | None,
    names: dict[nn.Module, str],
    most: int,
    found: dict[str, Seen],
    **given: Any,
) -> Any:
    """The layer's own answer; its map is kept on the way."""
    if function is None:  # eager, which each of transformers' files has for itself
        function = sys.modules[type(module).__module__].eager_attention_forward  # pyright: ignore
        assert function is not None
    if module in names:
        seen = _map(module, query.transpose(1, 2), key.transpose(1, 2), attention_mask, most, given)
        if seen is not None:
            found[names[module]] = seen
    return function(module, query, key, value, attention_mask, *args, **given)


def _map(
    module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, most: int, given: dict[str, Any]
) -> Seen | None:
    """What a layer's queries look at; None where it has no map, or has one that only its own function knows."""
    core: Any = getattr(module, "linearized", None)  # by affinear.linearize
    scale, told = given.get("scaling"), given.get("is_causal")
    causal = bool(getattr(module, "is_causal", False) if told is None else told)
    query, key = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (query, key))
    rows, tokens = rows_of(query.shape[1], most, query.device), query.shape[1]
    if given.get("s_aux") is not None or given.get("indices") is not None:
        return None
    if core is None and mask is not None and mask.ndim == 4:
        weights = _masked(query[:, rows], key, mask.expand(-1, -1, tokens, -1)[:, :, rows], scale, given, rows)
        return Seen(weights, query.new_ones(len(query), len(rows), dtype=torch.bool))
    if (causal and tokens != key.shape[1]) or (mask is not None and mask.ndim != 2):
        return None
    there = None if mask is None else mask[:, -key.shape[1] :].bool()
    if core is not None:
        if core.rule is None:
            return None
        query, key, mechanism = core.operands(query, key, scale)
        weights = affinear.weights(query, key, mechanism, causal=causal, key_mask=there, rows=rows)
    else:
        hidden = torch.zeros(1, 1, tokens, key.shape[1], device=query.device)
        if causal:
            hidden = hidden.masked_fill(torch.ones_like(hidden, dtype=torch.bool).triu(1), -torch.inf)
        if there is not None:
            hidden = hidden.masked_fill(~there[:, None, None], torch.finfo(hidden.dtype).min)
        weights = _masked(query[:, rows], key, hidden[:, :, rows], scale, given, rows)
    same = there is not None and tokens == key.shape[1]
    real = there[:, rows] if there is not None and same else query.new_ones(len(query), len(rows), dtype=torch.bool)
    return Seen(weights, real)


def _masked(
    query: Tensor, key: Tensor, mask: Tensor, scale: float | None, given: dict[str, Any], rows: Tensor
) -> Tensor:
    """Softmax (B, H, R, M) of queries (B, R, H, D) under a mask, boolean or added, a bias and a cap."""
    key = key.repeat_interleave(query.shape[2] // key.shape[2], dim=2)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = factor * torch.einsum("brhd,bmhd->bhrm", query, key)
    cap: Any = given.get("softcap")
    bias: Any = given.get("position_bias")
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    scores = scores if bias is None else scores + bias[:, :, rows]
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1)
    return (scores + mask).softmax(-1)
