"""The public operator: two verbs, `summarize` and `attend`, and `attention`, which is both."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Literal, overload

from torch import Tensor

from . import reference, torch_backend
from . import validation as check
from .mechanisms import Mechanism, find, is_built_in
from .packing import visibility
from .precision import exactly, widen
from .rotary import Rotary
from .state import State
from .tracing import is_compiling
from .triton import backend as triton_backend
from .triton import plain

if TYPE_CHECKING:
    from .distributed.group import Mesh


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mechanism: str | Mechanism = ...,
    *,
    scale: float | None = ...,
    causal: bool = ...,
    key_mask: Tensor | None = ...,
    cu_seqlens_q: Tensor | None = ...,
    cu_seqlens_k: Tensor | None = ...,
    rotary: Rotary | None = ...,
    initial_state: State | None = ...,
    return_state: Literal[False] = ...,
    backend: str = ...,
    layout: str | None = ...,
    mesh: Mesh | None = ...,
) -> Tensor: ...
@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mechanism: str | Mechanism = ...,
    *,
    scale: float | None = ...,
    causal: bool = ...,
    key_mask: Tensor | None = ...,
    cu_seqlens_q: Tensor | None = ...,
    cu_seqlens_k: Tensor | None = ...,
    rotary: Rotary | None = ...,
    initial_state: State | None = ...,
    return_state: Literal[True],
    backend: str = ...,
    layout: str | None = ...,
    mesh: Mesh | None = ...,
) -> tuple[Tensor, State]: ...
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mechanism: str | Mechanism = "mala",
    *,
    scale: float | None = None,
    causal: bool = False,
    key_mask: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    rotary: Rotary | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
    backend: str = "auto",
    layout: str | None = None,
    mesh: Mesh | None = None,
) -> Tensor | tuple[Tensor, State]:
    """Attention of queries over keys and values, in time and memory linear in the number of tokens.

    Query, key and value share dtype (float16, bfloat16, float32, float64) and device. Sums are kept in float32, or in
    float64 for float64, also under autocast. Any strides are read as they are.

    Args:
        query: (B, N, H, D).
        key: (B, M, G, D). G divides H: query head h reads key head h // (H / G).
        value: (B, M, G, E).
        mechanism: A registered name (see `mechanisms`), or a `Mechanism`.
        scale: Factor of the scores. None is the mechanism's own, D ** -0.5 for most.
        causal: Whether query i sees keys 0 to i only. Needs N = M.
        key_mask: (B, M), boolean. False takes a key out, even out of the count.
        cu_seqlens_q: (S + 1,), int32 or int64. Where each of S sequences laid end to end begins, up to N. Needs B = 1.
        cu_seqlens_k: The same for keys. Both or neither.
        rotary: Cosines and sines, each (N, D), from `affinear.ops.rotary_1d` or `rotary_2d`, or (N, H, D) where heads
            turn differently, which needs G = H. The two channels of a pair have the same angle. Needs N = M.
        initial_state: What the queries know beforehand, as if its tokens came before all keys.
        return_state: Whether to return the state of all keys, the initial ones included.
        backend: "triton" (linear, fused, for CUDA), "torch" (linear), "reference" (quadratic, the definitions) or
            "auto", which is "triton" for CUDA tensors that it can serve and "torch" for all others.
        layout: "bnhd", tokens before heads, as in the shapes here, or "bhnd", heads before tokens, as torch's own
            attention has queries, keys, values and answers. None is "bnhd", with a `LayoutWarning` where the tokens
            look like the other.
        mesh: A `DeviceMesh` of one dimension, or a process group, whose ranks each hold some of the tokens, in order:
            any number, even none. Tensors are then this rank's own, but for `cu_seqlens`, which run through all ranks'
            tokens, and states, which are of all ranks' keys. DTensors bring their mesh along. See the guide.

    Returns:
        The answers, (B, N, H, E) in the dtype of the query, and the state if asked for. Without a key in sight they are
        zeros.

    Raises:
        ValueError: If the arguments do not fit. The message says which, what was expected, what came and what to do.

    Example:
        >>> import torch, affinear as af
        >>> q, k, v = torch.randn(3, 2, 100, 4, 32).unbind()
        >>> af.attention(q, k, v, "mala").shape
        torch.Size([2, 100, 4, 32])
        >>> out, state = af.attention(q[:, :60], k[:, :60], v[:, :60], causal=True, return_state=True)
        >>> rest = af.attention(q[:, 60:], k[:, 60:], v[:, 60:], causal=True, initial_state=state)
        >>> whole = af.attention(q, k, v, causal=True)
        >>> torch.allclose(torch.cat((out, rest), dim=1), whole, atol=1e-5)
        True
    """
    nothing = key_mask is cu_seqlens_q is cu_seqlens_k is rotary is initial_state is mesh is None
    alone = nothing and causal is False and not return_state
    if alone and (quick := plain.attention(query, key, value, mechanism, scale, backend, layout)) is not None:
        return quick
    rule = find(mechanism)
    check.check_backend(backend)
    turned = check.check_layout(layout, query=query, key=key)
    query, key, value = (_tokens_first(x, turned) for x in (query, key, value))
    if mesh is not None or any(map(_is_distributed, (query, key, value))):
        from .distributed import attention as over_mesh

        call = over_mesh.Call(
            rule, scale, causal, key_mask, cu_seqlens_q, cu_seqlens_k, rotary, initial_state, return_state, backend
        )
        return _as_asked(over_mesh.attention(query, key, value, call, mesh), turned)
    check.check_keys_and_values(key, value)
    _check_scores(query, key, scale, causal, key_mask, cu_seqlens_q, cu_seqlens_k, rotary)
    if initial_state is not None or return_state:
        check.check_has_state(rule)
    if initial_state is not None:
        batch = key.shape[0] if cu_seqlens_k is None else cu_seqlens_k.shape[0] - 1
        check.check_state("initial_state", initial_state, rule, key, batch, rotary)
        check.check_state_widths("initial_state", initial_state, key.shape[2], _width(rule, key), value.shape[3])
    engine = _engine(backend, rule, query, value.shape[3], rotary)

    def run(
        query: Tensor, key: Tensor, value: Tensor, rotary: Rotary | None, initial_state: State | None
    ) -> tuple[Tensor, State | None]:
        return engine.attention(
            query,
            key,
            value,
            mechanism=rule,
            scale=_scale(scale, rule, query),
            causal=causal,
            key_mask=key_mask,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            rotary=rotary,
            initial_state=initial_state,
            return_state=return_state,
        )

    out, state = exactly(run, query, query, key, value, rotary, initial_state, anew=_is_plain(engine, rule))
    out = out if out.dtype == query.dtype else out.to(query.dtype)
    if alone and engine is triton_backend and not is_compiling():
        asked = mechanism, scale, backend, "bnhd" if turned else layout
        plain.learn(query, key, value, asked, rule, _scale(scale, rule, query))
    return _as_asked(out if state is None else (out, state), turned)


def summarize(
    key: Tensor,
    value: Tensor,
    mechanism: str | Mechanism = "mala",
    *,
    key_mask: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    rotary: Rotary | None = None,
    backend: str = "auto",
    layout: str | None = None,
    mesh: Mesh | None = None,
) -> State:
    """The state of keys and values: all that any query will ever need to know about them.

    Args:
        key: (B, M, H, D), in float16, bfloat16, float32 or float64.
        value: (B, M, H, E), same dtype and device.
        mechanism: A registered name with a state (all but softmax), or a `Mechanism`.
        key_mask: (B, M), boolean. False takes a key out, even out of the count.
        cu_seqlens_k: (S + 1,), int32 or int64. Where each of S sequences laid end to end begins. Needs B = 1.
        rotary: Cosines and sines of the keys' positions, each (M, D) or (M, H, D). The two channels of a pair have the
            same angle.
        backend: "auto", "triton" (linear, fused, for CUDA), "torch" (linear) or "reference" (the definitions).
        layout: "bnhd", tokens before heads, or "bhnd", heads before tokens; see `attention`.
        mesh: A `DeviceMesh` of one dimension, or a process group, as in `attention`: the state is then that of all
            ranks' keys, on every rank.

    Returns:
        The state in float32 (float64 for float64), with batch B, or S for packed sequences.

    Raises:
        ValueError: If the arguments do not fit.

    Example:
        >>> import torch, affinear as af
        >>> memory, values = torch.randn(2, 1, 1000, 4, 32).unbind()
        >>> state = af.summarize(memory, values)
        >>> state.covariance.shape
        torch.Size([1, 4, 32, 32])
    """
    rule = find(mechanism)
    turned = check.check_layout(layout, key=key)
    key, value = _tokens_first(key, turned), _tokens_first(value, turned)
    check.check_backend(backend)
    check.check_has_state(rule)
    if mesh is not None or _is_distributed(key):
        from .distributed import attention as over_mesh

        return over_mesh.summarize(
            key,
            value,
            rule,
            key_mask=key_mask,
            cu_seqlens_k=cu_seqlens_k,
            rotary=rotary,
            backend=backend,
            mesh=mesh,
        )
    check.check_keys_and_values(key, value)
    check.check_mask(key_mask, key, packed=cu_seqlens_k is not None)
    check.check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, "key", key)
    check.check_rotary(rotary, key, "key")
    engine = _engine(backend, rule, key, value.shape[3], rotary)

    def run(key: Tensor, value: Tensor, rotary: Rotary | None) -> State:
        return engine.summarize(key, value, mechanism=rule, key_mask=key_mask, cu_seqlens=cu_seqlens_k, rotary=rotary)

    return exactly(run, key, key, value, rotary, anew=_is_plain(engine, rule))


def attend(
    query: Tensor,
    state: State,
    *,
    scale: float | None = None,
    cu_seqlens_q: Tensor | None = None,
    rotary: Rotary | None = None,
    backend: str = "auto",
    layout: str | None = None,
) -> Tensor:
    """Answers of a state to queries; ask it as often as you like.

    Args:
        query: (B, N, H, D), in float16, bfloat16, float32 or float64. The state's heads divide H.
        state: What `summarize` made, of batch B, or S for packed queries.
        scale: Factor of the scores. None is the mechanism's own, D ** -0.5 for most.
        cu_seqlens_q: (S + 1,), int32 or int64. Where each of S sequences laid end to end begins. Needs B = 1.
        rotary: Cosines and sines of the queries' positions, each (N, D) or (N, H, D). The two channels of a pair have
            the same angle. Given exactly if the state was made with them.
        backend: "auto", "triton" (linear, fused, for CUDA), "torch" (linear) or "reference" (the definitions).
        layout: "bnhd", tokens before heads, or "bhnd", heads before tokens; see `attention`.

    Returns:
        The answers, (B, N, H, E) in the dtype of the query. A state of no keys answers zeros.

    Raises:
        ValueError: If the arguments do not fit.

    Example:
        >>> import torch, affinear as af
        >>> q, k, v = torch.randn(3, 2, 50, 4, 32).unbind()
        >>> out = af.attend(q, af.summarize(k, v, "inline"))
        >>> torch.allclose(out, af.attention(q, k, v, "inline"))
        True
    """
    check.check_backend(backend)
    turned = check.check_layout(layout, query=query)
    query = _tokens_first(query, turned)
    check.check_tokens("query", query)
    check.check_scale(scale)
    check.check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, "query", query)
    check.check_rotary(rotary, query, "query")
    batch = query.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    check.check_state("state", state, None, query, batch, rotary)
    heads = state.key_mean.shape[1]
    check.check_groups(query.shape[2], heads)
    check.check_rotary_heads(rotary, query, heads)
    check.check_state_widths("state", state, heads, _width(state.mechanism, query), None)
    engine = _engine(backend, state.mechanism, query, state.value_mean.shape[2], rotary)

    def run(query: Tensor, state: State, rotary: Rotary | None) -> Tensor:
        return engine.attend(query, state, scale=chosen, cu_seqlens=cu_seqlens_q, rotary=rotary)

    chosen = _scale(scale, state.mechanism, query)
    out = exactly(run, query, query, state, rotary, anew=_is_plain(engine, state.mechanism))
    out = out.to(query.dtype)
    return out.transpose(1, 2) if turned else out


def weights(
    query: Tensor,
    key: Tensor,
    mechanism: str | Mechanism = "mala",
    *,
    scale: float | None = None,
    causal: bool = False,
    key_mask: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    rotary: Rotary | None = None,
    rows: Tensor | None = None,
    layout: str | None = None,
) -> Tensor:
    """The explicit weight of every key for every query, from the definition of each paper. For looking, not for speed.

    Rows sum to one, whatever their sign, for every mechanism but those called `_released`.

    Args:
        query: (B, N, H, D), in float16, bfloat16, float32 or float64.
        key: (B, M, G, D), same dtype and device. G divides H.
        mechanism: A registered name, or a `Mechanism`.
        scale: Factor of the scores. None is the mechanism's own, D ** -0.5 for most.
        causal: Whether query i sees keys 0 to i only. Needs N = M.
        key_mask: (B, M), boolean. False takes a key out.
        cu_seqlens_q: (S + 1,), int32 or int64. Where each of S sequences laid end to end begins. Needs B = 1.
        cu_seqlens_k: The same for keys. Both or neither.
        rotary: Cosines and sines, each (N, D) or (N, H, D). Needs N = M.
        rows: (R,), int64. Which queries to look at, so that no more than R x M weights are made; all if None.
        layout: "bnhd", tokens before heads, or "bhnd", heads before tokens; see `attention`.

    Returns:
        The weights, (B, H, N, M) or (B, H, R, M) in the dtype of the query, zero where a query does not see a key.

    Raises:
        ValueError: If the arguments do not fit.

    Example:
        >>> import torch, affinear as af
        >>> q, k = torch.randn(2, 1, 10, 4, 32).unbind()
        >>> rows = af.weights(q, k, "mala").sum(-1)
        >>> torch.allclose(rows, torch.ones_like(rows), atol=1e-5)
        True
    """
    rule = find(mechanism)
    turned = check.check_layout(layout, query=query, key=key)
    query, key = _tokens_first(query, turned), _tokens_first(key, turned)
    check.check_tokens("key", key)
    _check_scores(query, key, scale, causal, key_mask, cu_seqlens_q, cu_seqlens_k, rotary)
    if rows is not None:
        check.check_rows(rows, query)
    visible = visibility(query, key, causal, key_mask, cu_seqlens_q, cu_seqlens_k)

    def run(query: Tensor, key: Tensor, rotary: Rotary | None) -> Tensor:
        return reference.weights(query, key, rule, _scale(scale, rule, query), visible, rotary, rows)

    out = exactly(run, query, query, key, rotary, anew=is_built_in(rule))
    return out.to(query.dtype)


def _is_distributed(x: object) -> bool:
    """Whether it is a DTensor: nobody has made one where their module was never loaded."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def _tokens_first(x: Tensor, turned: bool) -> Tensor:
    """Tokens before heads; what is no four-dimensional tensor is left for the checks to complain of."""
    return x.transpose(1, 2) if turned and isinstance(x, Tensor) and x.ndim == 4 else x  # pyright: ignore[reportUnnecessaryIsInstance]


def _as_asked(answers: Tensor | tuple[Tensor, State], turned: bool) -> Tensor | tuple[Tensor, State]:
    """Answers, and perhaps a state, in the layout of the tokens."""
    if not turned:
        return answers
    return answers.transpose(1, 2) if isinstance(answers, Tensor) else (answers[0].transpose(1, 2), answers[1])


def _engine(backend: str, mechanism: Mechanism, tokens: Tensor, values: int, rotary: Rotary | None):
    """The module that serves a call: `attention`, `summarize` and `attend` on checked inputs."""
    if backend == "reference":
        return reference
    if backend == "torch" or (backend == "auto" and not tokens.is_cuda):
        return torch_backend
    reason = triton_backend.why_not(mechanism, tokens, values, rotary)
    if backend == "triton":
        check.check_served(reason)
    return triton_backend if reason is None else torch_backend


def _is_plain(engine: object, mechanism: Mechanism) -> bool:
    """Whether a call is a graph of torch's own operations, which autocast would change, and of nothing to learn."""
    return engine is not triton_backend and is_built_in(mechanism)


def _check_scores(
    query: Tensor,
    key: Tensor,
    scale: float | None,
    causal: bool,
    key_mask: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    rotary: Rotary | None,
) -> None:
    """What `attention` and `weights` both need of queries and keys."""
    check.check_query(query, key)
    check.check_scale(scale)
    check.check_causal(query, key, causal)
    check.check_mask(key_mask, key, packed=cu_seqlens_q is not None or cu_seqlens_k is not None)
    check.check_packing(query, key, cu_seqlens_q, cu_seqlens_k, causal)
    check.check_rotary_lengths(rotary, query, key)
    check.check_rotary(rotary, query, "query")
    check.check_rotary_heads(rotary, query, key.shape[2])


def _scale(scale: float | None, mechanism: Mechanism, query: Tensor) -> float:
    return mechanism.scale_for(query.shape[3]) if scale is None else float(scale)


def _width(mechanism: Mechanism, tokens: Tensor) -> int:
    """Width of the features that a mechanism makes of tokens; a map that is not known is asked, with none of them."""
    rule = triton_backend.known_rule(mechanism)
    return mechanism.key_map(widen(tokens[:0])).shape[-1] if rule is None else rule.blocks * tokens.shape[3]
