"""The Triton backend: which calls its kernels serve, and how. One token at a time has a function of its own."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache
from importlib import import_module

import torch
from torch import Tensor

from .. import validation as check
from ..mechanisms import Mechanism
from ..rotary import Rotary, is_for_each_head
from ..state import State, merge
from ..tracing import has_tangents, is_compiling, is_transformed
from . import heads, library
from .library import INTERPRETED
from .rules import Rule, rule_of

OLDEST = (3, 6)  # Triton
AMPERE = (8, 0)  # compute capability
MULTIPLE, WIDEST = 8, 256  # of head and value widths


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
    if rotary is not None and is_for_each_head(rotary):
        given = {"mechanism": mechanism, "scale": scale, "causal": causal, "return_state": return_state}
        given |= {"key_mask": key_mask, "initial_state": initial_state}
        if not return_state and key_mask is None and initial_state is None and cu_seqlens_k is None:
            return heads.end_to_end(attention, query, key, value, rotary, **given)
        given |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        return heads.one_by_one(attention, query, key, value, rotary, **given)
    rule = _rule(mechanism)
    turns = None if rotary is None else _turns(rotary, query)
    places = key_mask, cu_seqlens_k, turns
    if causal:
        out, state = _causal(query, key, value, places, mechanism, rule, scale, initial_state, return_state)
        return out, state if return_state else None
    names = rule.map, rule.gain, rule.released
    if initial_state is None and not return_state:
        return library.attention(query, key, value, *places, *names, scale, cu_seqlens_q), None
    state = _as_state(library.summarize(key, value, *places, rule.map), mechanism)
    if initial_state is not None:
        state = merge(initial_state, state)
    out = library.attend(query, *_tensors(state), cu_seqlens_q, turns, *names, scale)
    return out, state if return_state else None


def summarize(
    key: Tensor,
    value: Tensor,
    *,
    mechanism: Mechanism,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    rotary: Rotary | None,
) -> State:
    """The state of keys (B, M, H, D) and values (B, M, H, E)."""
    if rotary is not None and is_for_each_head(rotary):
        given = {"mechanism": mechanism, "key_mask": key_mask, "cu_seqlens": cu_seqlens}
        each = (
            summarize(key[:, :, i : i + 1], value[:, :, i : i + 1], rotary=heads.table_of(rotary, i), **given)
            for i in range(key.shape[2])
        )
        return heads.join(list(each))
    turns = None if rotary is None else _turns(rotary, key)
    return _as_state(library.summarize(key, value, key_mask, cu_seqlens, turns, _rule(mechanism).map), mechanism)


def attend(query: Tensor, state: State, *, scale: float, cu_seqlens: Tensor | None, rotary: Rotary | None) -> Tensor:
    """Answers to queries (B, N, H, D), as (B, N, H, E)."""
    if rotary is not None and is_for_each_head(rotary):
        given = {"scale": scale, "cu_seqlens": cu_seqlens}
        each = (
            attend(query[:, :, i : i + 1], heads.state_of(state, i), rotary=heads.table_of(rotary, i), **given)
            for i in range(query.shape[2])
        )
        return torch.cat(list(each), dim=2)
    rule = _rule(state.mechanism)
    turns = None if rotary is None else _turns(rotary, query)
    return library.attend(query, *_tensors(state), cu_seqlens, turns, rule.map, rule.gain, rule.released, scale)


def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: State,
    *,
    scale: float | None = None,
    rotary: Rotary | None = None,
    in_place: bool = False,
) -> tuple[Tensor, State]:
    """One more token for every sequence, in one launch: what a text generator calls at every step.

    The same as `affinear.attention(..., causal=True, initial_state=state, return_state=True)`, without gradients.

    Args:
        query: (B, 1, H, D), in float16, bfloat16 or float32, on a GPU.
        key: (B, 1, G, D), same dtype and device. G divides H.
        value: (B, 1, G, E).
        state: What came before, of batch B. Its mechanism is the one used.
        scale: Factor of the scores. None is the mechanism's own, D ** -0.5 for most.
        rotary: Cosines and sines of this one position, each (1, D), with the same angle for the two channels of a pair.
        in_place: Whether to write over the tensors of `state`, which saves the memory of a second one.

    Returns:
        The answers, (B, 1, H, E) in the dtype of the query, and the state with the token in it, for the next call: in
        the tensors of `state` if `in_place`. Its `rest` keeps what is rounded off the means, so that a long text is
        answered as well as one call would; and off the covariance, if that of `state` did.

    Raises:
        ValueError: If the arguments do not fit.

    Example:
        >>> import affinear as af
        >>> from affinear.ops.triton import decode
        >>> def generate(project, token, state, steps):  # a network around it makes query, key and value
        ...     for _ in range(steps):
        ...         out, state = decode(*project(token), state, in_place=True)
        ...         token = yield out
    """
    _check_token(query, key, value, state, scale, rotary)
    mechanism, (_, head_count, width), values = state.mechanism, key.shape[1:], value.shape[3]
    if is_for_each_head(rotary):
        raise ValueError(
            "rotary: expected one table for all heads to decode with, got one for each; "
            "call affinear.attention with initial_state=state"
        )
    reason = why_not(mechanism, query, values, rotary)
    if reason is not None:
        raise ValueError(f"query: {reason}, or call affinear.attention with initial_state=state")
    rule = _rule(mechanism)
    check.check_state_widths("state", state, head_count, width * rule.blocks, values)
    if _learns(query, key, value, state):
        raise ValueError(
            "query: expected tokens and a state that need no gradient, got one that does; decode under "
            "torch.no_grad(), or call affinear.attention with initial_state=state"
        )
    if in_place and not all(x is None or x.is_contiguous() for x in (*_tensors(state), *_rest(state))):
        raise ValueError(
            "state: expected contiguous tensors to write to, got strided ones; "
            "pass state.map(torch.Tensor.contiguous), or in_place=False"
        )
    scale = mechanism.scale_for(width) if scale is None else float(scale)
    turns = None if rotary is None else _turns(rotary, query)
    return _decode(query, key, value, state, turns, rule, scale, in_place)


def why_not(mechanism: Mechanism, tokens: Tensor, values: int, rotary: Rotary | None) -> str | None:
    """Why the kernels cannot serve a call, and what to do; None where they can."""
    if not tokens.is_cuda and not (INTERPRETED and tokens.device.type == "cpu"):
        return f"expected CUDA tensors for 'triton', got {tokens.device}; move them to a GPU"
    if tokens.dtype == torch.float64:
        return "expected float16, bfloat16 or float32 for 'triton', got torch.float64; cast the tokens"
    if known_rule(mechanism) is None:
        return f"expected a linear mechanism of affinear's own for 'triton', got {mechanism.name!r}; choose one"
    width = tokens.shape[3]
    if width % MULTIPLE or values % MULTIPLE or width > WIDEST or values > WIDEST:
        got = f"got {width} and {values}; pad them"
        return f"expected heads and values 8, 16, 24 ... {WIDEST} wide for 'triton', {got}"
    if rotary is not None and torch.is_grad_enabled() and (rotary[0].requires_grad or rotary[1].requires_grad):
        return "expected rotary tables without gradients for 'triton', got tables that need them; detach them"
    if is_transformed():
        return "expected a call outside torch.func for 'triton', got one inside; use torch.autograd"
    if has_tangents() and not is_compiling():
        return "expected a call outside torch.autograd.forward_ad for 'triton', got one inside; differentiate backward"
    return lacks(tokens.device.index)


def known_rule(mechanism: Mechanism) -> Rule | None:
    """The kernels' name for a mechanism, or None where they do not know it."""
    if is_compiling():
        return rule_of(mechanism)
    try:
        return _remembered_rule(mechanism)
    except TypeError:  # not ours, then: a map without a hash
        return None


_remembered_rule = lru_cache(rule_of)


def _rule(mechanism: Mechanism) -> Rule:
    rule = known_rule(mechanism)
    assert rule is not None
    return rule


def lacks(gpu: int | None) -> str | None:
    """What this machine has not got: a Triton that is new enough, or a GPU that is."""
    return _found_lacking(gpu)


# As torch.compiler.assume_constant_result does, which would load the compiler along with the library.
lacks._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


@cache
def _found_lacking(gpu: int | None) -> str | None:
    wanted = f"expected Triton {OLDEST[0]}.{OLDEST[1]} or newer for 'triton'"
    try:
        version: str = import_module("triton").__version__
    except ImportError as error:
        return f"{wanted}, got none ({error}); pip install 'affinear[triton]'"
    if tuple(int(number) for number in version.split(".")[:2]) < OLDEST:
        return f"{wanted}, got {version}; pip install 'affinear[triton]'"
    if gpu is None or torch.version.hip is not None or not torch.cuda.is_available():
        return None
    if torch.cuda.get_device_capability(gpu) >= AMPERE:
        return None
    # Products are taken of bfloat16 parts, which older ones cannot multiply.
    name = torch.cuda.get_device_name(gpu)
    return f"expected an NVIDIA GPU as new as Ampere for 'triton', got {name}; choose another one"


def _turns(rotary: Rotary, tokens: Tensor) -> Tensor:
    # Sines and cosines lie between -1 and 1, where float16 tells apart eight times as many numbers as bfloat16.
    return library.turns(*rotary, torch.float16 if tokens.dtype == torch.bfloat16 else torch.float32)


def _tensors(state: State) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """In the order of `Statistics`."""
    return state.count, state.key_mean, state.value_mean, state.covariance, state.rotated_key_mean


def _as_state(tensors: list[Tensor], mechanism: Mechanism) -> State:
    """From a list as `library` has it."""
    key_mean, value_mean, covariance, *rotated, count = tensors
    return State(count, key_mean, value_mean, covariance, mechanism, rotated[0] if rotated else None)


def _learns(query: Tensor, key: Tensor, value: Tensor, state: State) -> bool:
    """Whether anything asks for a gradient."""
    return torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (query, key, value, *_tensors(state))
    )


def _causal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    places: tuple[Tensor | None, Tensor | None, Tensor | None],
    mechanism: Mechanism,
    rule: Rule,
    scale: float,
    initial: State | None,
    return_state: bool,
) -> tuple[Tensor, State]:
    key_mask, cu_seqlens, turns = places
    one = query.shape[1] == 1 and key_mask is None and cu_seqlens is None
    if one and initial is not None and return_state and not _learns(query, key, value, initial):
        return _decode(query, key, value, initial, turns, rule, scale, in_place=False)
    before = (None,) * 5 if initial is None else _tensors(initial)
    names = rule.map, rule.gain, rule.released, scale
    out, *final = library.causal(query, key, value, *places, *names, *before)
    return out, _as_state(final, mechanism)


def _decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: State,
    turns: Tensor | None,
    rule: Rule,
    scale: float,
    in_place: bool,
) -> tuple[Tensor, State]:
    tokens, options = (query, key, value), (turns, rule.map, rule.gain, rule.released, scale)
    if in_place:
        state = state if state.rest is not None or is_compiling() else replace(state, rest=_nothing(state))
        return library.decode_(*tokens, *_tensors(state), *_rest(state), *options), state
    keep = state.rest is not None or not is_compiling()  # a traced loop gives what it takes
    out, *new = library.decode(*tokens, *_tensors(state), *_rest(state), keep, *options)
    size = 4 if state.rotated_key_mean is None else 5
    made = _as_state(new[:size], state.mechanism)
    return out, replace(made, rest=_as_rest(new[size:], state)) if keep else made


def _rest(state: State) -> tuple[Tensor | None, ...]:
    """What was rounded off a state, in the order of `Rest`."""
    return (*(state.rest or ()), None, None, None, None)[:4]


def _nothing(state: State) -> tuple[Tensor | None, ...]:
    """What was rounded off a state where nothing was: of the means, as a covariance's is as large as the state."""
    rotated = () if state.rotated_key_mean is None else (torch.zeros_like(state.rotated_key_mean),)
    return torch.zeros_like(state.key_mean), torch.zeros_like(state.value_mean), None, *rotated


def _as_rest(kept: list[Tensor], state: State) -> tuple[Tensor | None, ...]:
    """From a list as `library` has it, which has no place for a covariance's where there was none."""
    key_mean, value_mean, *others = kept
    covariance = None if state.rest is None or state.rest[2] is None else others.pop(0)
    return key_mean, value_mean, covariance, *others


def _check_token(
    query: Tensor, key: Tensor, value: Tensor, state: State, scale: float | None, rotary: Rotary | None
) -> None:
    check.check_keys_and_values(key, value)
    check.check_query(query, key)
    for name, tokens in (("query", query), ("key", key)):
        if tokens.shape[1] != 1:
            raise ValueError(
                f"{name}: expected one token per sequence, got {tokens.shape[1]}; "
                "call affinear.attention with causal=True for more"
            )
    check.check_scale(scale)
    check.check_rotary(rotary, query, "query")
    check.check_state("state", state, None, key, key.shape[0], rotary)
