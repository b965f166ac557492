"""The kernels as operators of torch: their schemas, the shapes of what they make, and their gradients.

Nothing here needs Triton until an operator runs. Tensors come in any strides; what comes out is dense.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..tracing import is_compiling, stands_for_many
from .rules import Rule
from .statistics import Rest, Statistics

Function = Callable[..., Any]

INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
FARTHEST = 2**31  # numbers: within a block kernels count with 32 bits
ROWS = {2: 2048, 4: 64}  # of the largest block of a mask (B, N), and of tokens (B, N, H, D)
ONCE_ONLY = "backend: expected first derivatives of 'triton', got a second one, which it has not; pass backend='torch'"
ONE_ONLY = "backend: expected gradients one by one of 'triton', got many at once; pass backend='torch'"

# Schemas

_TOKENS = "Tensor query, Tensor key, Tensor value"
_PLACES = "Tensor? key_mask, Tensor? cu_seqlens, Tensor? turns"
_STATE = "Tensor count, Tensor key_mean, Tensor value_mean, Tensor covariance, Tensor? rotated_key_mean"
_RULE = "str map, str gain, bool released, float scale"
_ATTENTION = f"{_TOKENS}, {_PLACES}, {_RULE}, Tensor? cu_seqlens_q"
_SUMMARIZE = f"Tensor key, Tensor value, {_PLACES}, str map"
_ATTEND = f"Tensor query, {_STATE}, Tensor? cu_seqlens, Tensor? turns, {_RULE}"
_CAUSAL = f"{_TOKENS}, {_PLACES}, {_RULE}, {_STATE.replace('Tensor ', 'Tensor? ')}"
_WRITTEN = "Tensor(a!) count, Tensor(b!) key_mean, Tensor(c!) value_mean, Tensor(d!) covariance, Tensor(e!)? rotated"
_REST = "Tensor? key_rest, Tensor? value_rest, Tensor? covariance_rest, Tensor? rotated_rest"
_REST_WRITTEN = "Tensor(f!)? key_rest, Tensor(g!)? value_rest, Tensor(h!)? covariance_rest, Tensor(i!)? rotated_rest"

# A state in a list has the order of `Statistics`, but for the count, which comes last, and without what is None. So has
# the gradient of a state around `causal_backward`; elsewhere it is a row for each sequence and head, see `_as_rows`.
SCHEMAS = {
    "turns": "(Tensor cos, Tensor sin, ScalarType dtype) -> Tensor",
    "attention": f"({_ATTENTION}) -> Tensor",
    "attention_forward": f"({_ATTENTION}) -> Tensor[]",  # answers, state
    "attention_backward": f"(Tensor grad, {_ATTENTION}, Tensor[] state) -> (Tensor, Tensor, Tensor)",
    "summarize": f"({_SUMMARIZE}) -> Tensor[]",
    "summarize_backward": f"(Tensor grad, {_SUMMARIZE}, Tensor[] state) -> (Tensor, Tensor)",
    "attend": f"({_ATTEND}) -> Tensor",
    "attend_backward": f"(Tensor grad, {_ATTEND}) -> (Tensor, Tensor)",
    "causal": f"({_CAUSAL}) -> Tensor[]",  # answers, final state
    "causal_forward": f"({_CAUSAL}) -> Tensor[]",  # answers, final state, states before the segments
    "causal_backward": f"(Tensor grad, Tensor[] grad_final, {_CAUSAL}, Tensor[] kept) -> Tensor[]",
    "decode": f"({_TOKENS}, {_STATE}, {_REST}, bool keep, Tensor? turns, {_RULE}) -> Tensor[]",  # answers, state, rest
    "decode_": f"({_TOKENS}, {_WRITTEN}, {_REST_WRITTEN}, Tensor? turns, {_RULE}) -> Tensor",
}
LIBRARY = torch.library.Library("affinear", "DEF")
for _name, _schema in SCHEMAS.items():
    # What is written to has to come as it is; all else is read by its strides.
    _layout = torch.Tag.needs_fixed_stride_order if "!" in _schema else torch.Tag.flexible_layout
    LIBRARY.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag, _layout))


OPERATORS: dict[str, Any] = {name: getattr(torch.ops.affinear, name).default for name in SCHEMAS}
RUNS: dict[str, Function] = {}  # what the dispatcher comes to in the end


# What tracing sees of the results, and all there is of them where the batch is empty


def _empty_states(tokens: Tensor, number: int, heads: int, features: int, values: int, turned: bool) -> list[Tensor]:
    def empty(*shape: int) -> Tensor:
        return tokens.new_empty(number, heads, *shape, dtype=torch.float32)

    rotated = [empty(features)] if turned else []
    count = tokens.new_empty(number, heads, dtype=torch.int64)
    return [empty(features), empty(values), empty(features, values), *rotated, count]


def _like(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in tensors)


def _answers(query: Tensor, value: Tensor) -> Tensor:
    return query.new_empty(*query.shape[:3], value.shape[-1])


def _states(key: Tensor, value: Tensor, *places: Any) -> list[Tensor]:
    _mask, cu_seqlens, turns, feature_map, *_rest = places
    number = key.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    features = key.shape[3] * rule_named(feature_map).blocks
    return _empty_states(key, number, key.shape[2], features, value.shape[3], turns is not None)


def _between(query: Tensor, key: Tensor, value: Tensor, *places: Any) -> list[Tensor]:
    """States before the segments of causal attention; none where all sequences have but one."""
    _mask, cu_seqlens, turns, feature_map, *_rest = places
    segment, (batch, length) = _segment(query, value, feature_map), query.shape[:2]
    number = -(-length // segment) * batch if cu_seqlens is None else length // segment + cu_seqlens.shape[0] - 1
    # Counted rather than asked, so that one compiled graph serves all lengths.
    several = torch.sym_min(torch.sym_max(length - 1, 0) // segment, 1)
    features = key.shape[3] * rule_named(feature_map).blocks
    return _empty_states(key, several * number, key.shape[2], features, value.shape[3], turns is not None)


def _segment(query: Tensor, value: Tensor, feature_map: str) -> int:
    widths = int(query.shape[3]), int(value.shape[3])
    return kernels("causal.calls").shape_for(*widths, rule_named(feature_map).blocks, query.element_size()).segment


def _answers_and_states(query: Tensor, key: Tensor, value: Tensor, *places: Any) -> list[Tensor]:
    return [_answers(query, value), *_states(key, value, *places)]


def _attend_gradients(grad: Tensor, query: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *_means, covariance, rotated = rest[:5]
    number, heads, features, values = covariance.shape
    row = features * (1 if rotated is None else 2) + values + features * values
    return *_like(query), covariance.new_empty(number * heads, row)


def _causal_gradients(grad: Tensor, grad_final: list[Tensor], *rest: Any) -> list[Tensor]:
    initial = rest[11:15]  # the count has none
    return list(_like(*rest[:3], *(x for x in initial if x is not None)))


# What runs them


@cache
def kernels(file: str) -> Any:
    """One of the modules that need Triton."""
    return import_module(f"{__package__}.{file}")


@cache
def rule_named(feature_map: str, gain: str = "one", released: bool = False) -> Rule:
    """A mechanism from the names that operators take."""
    return Rule(feature_map, gain, released)


def _dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def near(x: Any) -> Any:
    """What an operator was given, or a copy of tokens or a mask that lie farther apart than kernels count."""
    if not isinstance(x, Tensor):
        return x
    steps = x.stride()
    rows = ROWS.get(len(steps), 0)
    if not rows or (steps[1] * rows < FARTHEST // 2 and steps[-1] == 1):  # as good as always; the rest takes longer
        return x
    reach = min(x.shape[1], rows) * steps[1] + (x.shape[3] * steps[3] if rows == ROWS[4] else 0)
    return x if reach < FARTHEST else x.contiguous()


def _statistics(*state: Tensor | None) -> Statistics:
    return Statistics(*map(_dense, state))  # pyright: ignore[reportArgumentType]


def _from_list(state: Sequence[Tensor]) -> Statistics:
    key_mean, value_mean, covariance, *rotated, count = state
    return _statistics(count, key_mean, value_mean, covariance, rotated[0] if rotated else None)


def _as_list(state: Statistics) -> list[Tensor]:
    return [*_given(state[1:]), state.count]


def _given(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    return [x for x in tensors if x is not None]


def on_device(function: Function, first: Tensor, *rest: Any) -> Any:
    """A call with the GPU of its first tensor as the current one, on which Triton launches."""
    if not first.is_cuda or first.get_device() == torch.cuda.current_device():
        return function(first, *rest)
    with torch.cuda.device(first.device):
        return function(first, *rest)


def _implement(name: str, shapes: Function) -> Callable[[Function], Function]:
    """Register what runs an operator, and what only knows the shapes of its results."""

    def register(function: Function) -> Function:
        def run(first: Tensor, *rest: Any) -> Any:
            if first.shape[0] == 0:
                return shapes(first, *rest)
            return on_device(function, *(near(x) for x in (first, *rest)))

        torch.library.register_fake(f"affinear::{name}", shapes, lib=LIBRARY)
        for device in ("CUDA", "CPU") if INTERPRETED else ("CUDA",):
            LIBRARY.impl(name, run, device)
        RUNS[name] = run
        return function

    return register


@_implement("turns", lambda cos, sin, dtype: cos.new_empty(cos.shape, dtype=dtype))
def _turns(cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    return kernels("turns").pack_turns(cos, sin, dtype)


def call_of(
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    turns: Tensor | None,
    feature_map: str,
    gain: str,
    released: bool,
    scale: float,
    cu_seqlens_q: Tensor | None,
) -> Any:
    """What the kernels of a call have in common, from the arguments of an operator after the tokens."""
    rule = rule_named(feature_map, gain, released)
    return kernels("launch").Call(rule, scale, mask, _dense(cu_seqlens_q), _dense(cu_seqlens), _dense(turns))


@_implement("attention", lambda query, key, value, *_: _answers(query, value))
def _attention(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> Tensor:
    return kernels("launch").attention(query, key, value, call_of(*options), False)[0]


@_implement("attention_forward", _answers_and_states)
def _attention_forward(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> list[Tensor]:
    out, state = kernels("launch").attention(query, key, value, call_of(*options), True)
    return [out, *_as_list(state)]


@_implement("attention_backward", lambda grad, *tokens: _like(*tokens[:3]))
def _attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *options, state = rest
    return kernels("launch").attention_backward(grad, query, key, value, _from_list(state), call_of(*options))


@_implement("summarize", _states)
def _summarize(key: Tensor, value: Tensor, *places: Any) -> list[Tensor]:
    return _as_list(kernels("launch").summarize_tokens(key, value, call_of(*places, "one", False, 1.0, None)))


@_implement("summarize_backward", lambda grad, *tokens: _like(*tokens[:2]))
def _summarize_backward(grad: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *places, state = rest
    call = call_of(*places, "one", False, 1.0, None)
    return kernels("launch").summarize_tokens_backward(grad.contiguous(), key, value, _from_list(state), call)


@_implement("attend", lambda query, *state: _answers(query, state[2]))
def _attend(query: Tensor, *rest: Any) -> Tensor:
    state, (cu_seqlens, turns, *rule) = rest[:5], rest[5:]
    return kernels("launch").attend_tokens(query, _statistics(*state), call_of(None, None, turns, *rule, cu_seqlens))


@_implement("attend_backward", _attend_gradients)
def _attend_backward(grad: Tensor, query: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    state, (cu_seqlens, turns, *rule) = rest[:5], rest[5:]
    call = call_of(None, None, turns, *rule, cu_seqlens)
    return kernels("launch").attend_tokens_backward(grad, query, _statistics(*state), call)


def _causal_options(
    query: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    turns: Tensor | None,
    feature_map: str,
    gain: str,
    released: bool,
    scale: float,
    *initial: Tensor | None,
) -> dict[str, Any]:
    return {
        "rule": rule_named(feature_map, gain, released),
        "scale": scale,
        "key_mask": mask,
        "cu_seqlens": _dense(cu_seqlens),
        "turns": _dense(turns),
        "initial": None if initial[0] is None else _statistics(*initial),
        "precision": kernels("launch").precision_of(query.dtype),
    }


@_implement("causal", _answers_and_states)
def _causal(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> list[Tensor]:
    out, final, _ = kernels("causal").forward(query, key, value, **_causal_options(query, *options))
    return [out, *_as_list(final)]


@_implement("causal_forward", lambda *args: [*_answers_and_states(*args), *_between(*args)])
def _causal_forward(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> list[Tensor]:
    out, final, saved = kernels("causal").forward(query, key, value, **_causal_options(query, *options))
    return [out, *_as_list(final), *(saved or _between(query, key, value, *options))]


@_implement("causal_backward", _causal_gradients)
def _causal_backward(
    grad: Tensor, grad_final: list[Tensor], query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> list[Tensor]:
    *options, kept = rest
    final, saved = kept[: len(kept) // 2], kept[len(kept) // 2 :]
    *grads, initial = kernels("causal").backward(
        grad,
        _from_list((*grad_final, final[-1])) if grad_final else None,
        query,
        key,
        value,
        final=_from_list(final),
        saved=tuple(saved) if saved[0].shape[0] else (),
        **_causal_options(query, *options),
    )
    return [*grads, *(() if initial is None else _given(initial[1:]))]


def _decoded(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> list[Tensor]:
    count, *state, key_rest, value_rest, covariance_rest, rotated_rest, keep = rest[:10]
    means = (state[0], state[1], None, state[3]) if keep else (None,) * 4
    rests = (key_rest, value_rest, covariance_rest, rotated_rest)
    kept = (mean if x is None else x for x, mean in zip(rests, means, strict=True))
    return [_answers(query, value), *_like(*_given(state), count, *_given(tuple(kept)))]


@_implement("decode", _decoded)
def _decode(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> list[Tensor]:
    state, rounded, (keep, turns, *rule, scale) = rest[:5], rest[5:9], rest[9:]
    tokens, off = (query, key, value), Rest(*map(_dense, rounded))
    call = _statistics(*state), rule_named(*rule), scale, _dense(turns), False
    out, new, kept = kernels("decoding").decode(*tokens, *call, off, keep)
    return [out, *_as_list(new), *_given(kept)]


@_implement("decode_", lambda query, key, value, *_: _answers(query, value))
def _decode_in_place(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
    state, rounded, (turns, *rule, scale) = rest[:5], rest[5:9], rest[9:]
    tokens, written = (query, key, value), _given((*state, *rounded))
    if not written[0].is_inference():
        torch.autograd.graph.increment_version(written)
    call = Statistics(*state), rule_named(*rule), scale, _dense(turns), True
    return kernels("decoding").decode(*tokens, *call, Rest(*rounded))[0]


# Gradients


def _needed(*args: Any) -> bool:
    return torch.is_grad_enabled() and torch._C._any_requires_grad(*args)  # pyright: ignore[reportPrivateUsage]


def run_plainly(name: str, *args: Any) -> Any:
    """Run an operator without thought of gradients."""
    # Where nobody is watching, the dispatcher would only cost microseconds.
    if type(args[0]) is Tensor and not torch._C._len_torch_dispatch_stack():  # pyright: ignore[reportPrivateUsage]
        return RUNS[name](*args)
    with torch._C._AutoDispatchBelowAutograd():  # pyright: ignore[reportPrivateUsage]
        return OPERATORS[name](*args)


def differentiate(name: str, function: Function) -> Function:
    """Register what serves an operator where gradients are needed. Returns what runs it, with gradients or without."""
    op = OPERATORS[name]

    def kernel(keys: Any, *args: Any) -> Any:
        if _needed(*args):
            return function(*args)
        with torch._C._AutoDispatchBelowAutograd():  # pyright: ignore[reportPrivateUsage]
            return op.redispatch(keys & torch._C._after_autograd_keyset, *args)  # pyright: ignore[reportPrivateUsage]

    def run(*args: Any) -> Any:
        if is_compiling():
            return op(*args)
        return function(*args) if _needed(*args) else run_plainly(name, *args)

    LIBRARY.impl(name, kernel, "Autograd", with_keyset=True)
    return run


def _without_gradients(name: str) -> Function:
    op = OPERATORS[name]
    return lambda *args: op(*args) if is_compiling() else run_plainly(name, *args)


def keep(ctx: Any, args: tuple[Any, ...], more: Sequence[Tensor]) -> None:
    """Put arguments and further tensors away for the backward pass."""
    ctx.rest = [None if isinstance(x, Tensor) else x for x in args]
    ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in args), *more)
    ctx.set_materialize_grads(False)


def kept_by(ctx: Any) -> tuple[list[Any], list[Tensor]]:
    """What `_keep` put away."""
    saved, number = ctx.saved_tensors, len(ctx.rest)
    args = [plain if tensor is None else tensor for tensor, plain in zip(saved, ctx.rest, strict=False)]
    return args, list(saved[number:])


def for_all(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients of all arguments from those of the first ones."""
    return *grads, *[None] * (len(ctx.rest) - len(grads))


class _Once(torch.autograd.Function):
    """A derivative that has none itself."""

    @staticmethod
    def forward(ctx: Any, name: str, *args: Any) -> tuple[Tensor, ...]:
        return tuple(run_plainly(name, *args))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(ONCE_ONLY)


def once(name: str) -> Function:
    """What runs an operator that is a derivative and has none itself."""
    several = list if str(OPERATORS[name]._schema.returns[0].type) == "List[Tensor]" else tuple
    run = differentiate(name, lambda *args: several(_Once.apply(name, *args)))  # pyright: ignore

    def run_for_one(grad: Tensor, *rest: Any) -> Any:
        if not is_compiling() and stands_for_many(grad):
            raise RuntimeError(ONE_ONLY)
        return run(grad, *rest)

    return run_for_one


attention_backward = once("attention_backward")
_summarize_backward_once = once("summarize_backward")
_attend_backward_once = once("attend_backward")
_causal_backward_once = once("causal_backward")


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        out, *state = run_plainly("attention_forward", *args)
        keep(ctx, args, state)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        args, state = kept_by(ctx)
        return for_all(ctx, *attention_backward(grads[0], *args, state))


class _Summarize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        state = run_plainly("summarize", *args)
        ctx.mark_non_differentiable(state[-1])
        keep(ctx, args, state)
        return tuple(state)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        args, state = kept_by(ctx)
        return for_all(ctx, *_summarize_backward_once(_as_rows(_filled(grads, state)), *args, state))


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        keep(ctx, args, ())
        return run_plainly("attend", *args)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        args, _ = kept_by(ctx)
        grad_query, rows = _attend_backward_once(grads[0], *args)
        return for_all(ctx, grad_query, None, *_from_rows(rows, args[2:6]))


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        out, *kept = run_plainly("causal_forward", *args)
        final = kept[: len(kept) // 2]
        ctx.mark_non_differentiable(final[-1])
        keep(ctx, args, kept)
        return out, *final

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        args, kept = kept_by(ctx)
        (query, _, value), (grad, *grad_final) = args[:3], grads
        if grad is None:
            grad = query.new_zeros(()).expand(*query.shape[:3], value.shape[3])
        final = kept[: len(kept) // 2]
        grad_final = [] if all(x is None for x in grad_final) else _filled(grad_final, final)
        grad_query, grad_key, grad_value, *initial = _causal_backward_once(grad, grad_final, *args, kept)
        return for_all(ctx, grad_query, grad_key, grad_value, *[None] * 8, *initial)


def _filled(grads: Sequence[Tensor | None], state: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of a state, zeros where there are none; the count has no part in them."""
    return [torch.zeros_like(x) if grad is None else grad for grad, x in zip(grads[:-1], state[:-1], strict=True)]


def _as_rows(grads: Sequence[Tensor]) -> Tensor:
    """Gradients of key mean, value mean, covariance and rotated key mean as rows, as the kernels order them."""
    key_mean, value_mean, covariance, *rotated = grads
    return torch.cat([x.flatten(0, 1).flatten(1) for x in (key_mean, *rotated, value_mean, covariance)], dim=1)


def _from_rows(rows: Tensor, state: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The inverse, for a state of such shapes."""
    key_mean, value_mean, covariance, rotated = state
    order = [x for x in (key_mean, rotated, value_mean, covariance) if x is not None]
    parts = rows.split([math.prod(x.shape[2:]) for x in order], dim=1)
    key, *turned, value, product = (part.unflatten(0, x.shape[:2]) for part, x in zip(parts, order, strict=True))
    return [key, value, product.unflatten(2, covariance.shape[2:]), turned[0] if turned else None]  # pyright: ignore


attention = differentiate("attention", _Attention.apply)
summarize = differentiate("summarize", lambda *args: list(_Summarize.apply(*args)))  # pyright: ignore
attend = differentiate("attend", _Attend.apply)
causal = differentiate("causal", lambda *args: list(_Causal.apply(*args)))  # pyright: ignore
turns, decode, decode_ = (_without_gradients(name) for name in ("turns", "decode", "decode_"))
