"""Plain calls in eager mode: attention of tokens and nothing else, which a call like it before has prepared.

A call is like another where shapes, strides, dtypes, devices and all options are the same. Whatever may refuse a call,
or build a kernel, is asked at the first of them; nothing here needs Triton before.
"""

from __future__ import annotations

from contextlib import suppress
from functools import reduce
from operator import or_
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..mechanisms import Mechanism
from ..tracing import is_compiling, stands_for_many
from ..validation import looks_turned
from . import library
from .rules import rule_of

Key = tuple[Any, ...]
MOST = 1024  # calls to remember
ALIGNED = 16  # bytes; Triton builds kernels anew for addresses that are no multiples

_transformed = torch._C._are_functorch_transforms_active  # pyright: ignore[reportPrivateUsage]
_modes = torch._C._len_torch_dispatch_stack  # pyright: ignore[reportPrivateUsage]


class Prepared:
    """What is prepared of one kind of call.

    Attributes:
        mechanism: As it was given. It is found by its place in memory, which nobody else has while it is kept here.
        options: Arguments of the operator beside the tokens.
        device: Where.
        answer: Answers alone, without gradients.
        keep: Answers, and states for the backward pass.
        back: Gradients, by the strides of that of the answers, and by how products are rounded.
    """

    def __init__(self, mechanism: str | Mechanism, options: tuple[Any, ...], device: torch.device):
        self.mechanism = mechanism
        self.options = options
        self.device = device
        self.answer: Any = None
        self.keep: Any = None
        self.back: dict[tuple[tuple[int, ...], bool], Any] = {}


class Memory:
    """Calls that are prepared, each found by all that it depends on. Forgets all of them where they become too many."""

    def __init__(self, most: int):
        self.most = most
        self.calls: dict[Key, Prepared] = {}
        self.lock = Lock()

    def entry(self, key: Key, new: Prepared) -> Prepared:
        """What is prepared of a kind of call, or a new one where there is nothing."""
        with self.lock:
            if key not in self.calls and len(self.calls) >= self.most:
                self.calls.clear()
            return self.calls.setdefault(key, new)


MEMORY = Memory(MOST)


def key_of(query: Tensor, key: Tensor, value: Tensor, mechanism: Any, scale: Any, backend: Any, layout: Any) -> Key:
    """All that a plain call depends on. Names of mechanisms are never given to another."""
    dtype, which = query.dtype, mechanism if type(mechanism) is str else id(mechanism)
    return (
        query.shape, key.shape, value.shape, query.stride(), key.stride(), value.stride(), dtype, key.dtype,
        value.dtype, query.device, key.device, value.device, which, scale, backend, layout,
        _rounds(dtype),
    )  # fmt: skip


def _rounds(dtype: torch.dtype) -> bool:
    """Whether factors of float32 products may be rounded, which is for the user to say at any time."""
    return dtype is torch.float32 and torch.backends.cuda.matmul.allow_tf32


def _is_plain(query: Tensor, key: Tensor, value: Tensor, scale: Any) -> bool:
    """Whether tokens are what they seem, nobody is watching, and a scale is told apart by its value."""
    return (
        type(query) is type(key) is type(value) is Tensor
        and (scale is None or type(scale) is float)
        and not (_transformed() or _modes() or forward_ad._current_level >= 0)  # pyright: ignore[reportPrivateUsage]
    )


def attention(
    query: Tensor, key: Tensor, value: Tensor, mechanism: Any, scale: Any, backend: Any, layout: Any
) -> Tensor | None:  # fmt: skip
    """Answers to a call like one before; None where there was none, or where it is to be looked at more closely."""
    if is_compiling() or not MEMORY.calls or not _is_plain(query, key, value, scale):
        return None
    if layout == "bhnd" and query.ndim == key.ndim == value.ndim == 4:
        turned = (x.transpose(1, 2) for x in (query, key, value))
        out = attention(*turned, mechanism, scale, backend, "bnhd")
        return None if out is None else out.transpose(1, 2)
    try:
        prepared = MEMORY.calls.get(key_of(query, key, value, mechanism, scale, backend, layout))
    except (RuntimeError, TypeError):  # tensors without strides, options without a hash: the checks have words for them
        return None
    if prepared is None:
        return None
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        places = _aligned(query, key, value) if prepared.keep is not None else None
        return None if places is None else _apply(prepared, places, query, key, value)
    places = _aligned(query, key, value) if prepared.answer is not None else None
    made = None if places is None else _plans().run(prepared.answer, prepared.device, places)
    return None if made is None else made[0]


def learn(
    query: Tensor, key: Tensor, value: Tensor, asked: tuple[Any, Any, Any, Any], mechanism: Mechanism, scale: float
) -> None:
    """Prepare calls like one that was just served, with mechanism, scale, backend and layout as they were `asked`."""
    tokens = query, key, value
    if not _is_plain(*tokens, asked[1]) or not all(x.numel() for x in tokens) or _aligned(*tokens) is None:
        return
    if any(library.near(x) is not x for x in tokens):
        return  # what was launched knows the addresses of copies
    if asked[3] is None and (looks_turned(query) or looks_turned(key)):
        return  # which is worth a warning every time
    rule = rule_of(mechanism)
    assert rule is not None
    options = None, None, None, rule.map, rule.gain, rule.released, scale, None
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in tokens)
    plans = _plans()
    try:
        plan = plans.plan_forward(*tokens, library.call_of(*options), keep)
    except plans.NotBuiltError:  # as in the interpreter, which builds nothing
        return
    entry = MEMORY.entry(key_of(*tokens, *asked), Prepared(asked[0], options, query.device))
    if keep:
        entry.keep = plan
    else:
        entry.answer = plan


def _aligned(*tensors: Tensor) -> list[int] | None:
    """Addresses of tensors; None where one has none, or is not what Triton takes for aligned."""
    try:
        places = [x.data_ptr() for x in tensors]
    except RuntimeError:
        return None
    return None if reduce(or_, places) % ALIGNED else places


class _Plain(torch.autograd.Function):
    """What it saves is what the operator saves: a checkpoint may meet one and then the other."""

    @staticmethod
    def forward(ctx: Any, prepared: Prepared, places: list[int], *tokens: Tensor) -> Tensor:
        made = _plans().run(prepared.keep, prepared.device, places)
        if made is None:
            made = library.run_plainly("attention_forward", *tokens, *prepared.options)
        ctx.prepared = prepared
        ctx.save_for_backward(*tokens, *made[1:])
        return made[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None, *_gradients(ctx.prepared, grads[0], ctx.saved_tensors)


# Of transforms, which `Function.apply` looks for, there are none here.
_apply: Any = super(torch.autograd.Function, _Plain).apply  # pyright: ignore[reportAttributeAccessIssue]


def _gradients(prepared: Prepared, grad: Tensor, saved: tuple[Tensor, ...]) -> Any:
    """Gradients of the tokens, from tokens and states."""
    watched = torch.is_grad_enabled() or type(grad) is not Tensor or _modes() or stands_for_many(grad)
    places = None if watched else _aligned(grad, *saved)
    if places is None:
        return library.attention_backward(grad, *saved[:3], *prepared.options, list(saved[3:]))
    which, plans = (grad.stride(), _rounds(grad.dtype)), _plans()
    plan = prepared.back.get(which)
    made = None if plan is None else plans.run(plan, prepared.device, places)
    if made is not None:
        return made
    found = library.attention_backward(grad, *saved[:3], *prepared.options, list(saved[3:]))
    if plan is None and len(prepared.back) < MOST and library.near(grad) is grad:
        with suppress(plans.NotBuiltError):
            call = library.call_of(*prepared.options)
            prepared.back[which] = plans.plan_backward(grad, *saved[:3], saved[3:], call)
    return found


def _plans() -> Any:
    return library.kernels("plans")
