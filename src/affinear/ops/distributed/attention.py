"""The verbs over a mesh: every rank brings its own tokens, and gets the answers to its own queries."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import validation as check
from ..attention import attend as attend_here
from ..attention import attention as attention_here
from ..attention import summarize as summarize_here
from ..mechanisms import Mechanism
from ..rotary import Rotary
from ..state import State, merge
from ..tracing import is_compiling
from .dtensors import layout_of, local
from .group import Mesh, agree, all_lengths, group_of
from .merging import all_reduce, before, start_all_reduce
from .packed import Plan, plan


@dataclass(frozen=True)
class Call:
    """What an attention over a mesh is asked for, as `affinear.attention` has it, but for the tokens."""

    mechanism: Mechanism
    scale: float | None = None
    causal: bool = False
    key_mask: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    rotary: Rotary | None = None
    initial_state: State | None = None
    return_state: bool = False
    backend: str = "auto"

    def summarize(self, key: Tensor, value: Tensor, **given: Any) -> State:
        """The state of tokens of this rank."""
        return summarize_here(key, value, self.mechanism, backend=self.backend, **given)


def attention(
    query: Tensor, key: Tensor, value: Tensor, call: Call, mesh: Mesh | None
) -> Tensor | tuple[Tensor, State]:
    """`affinear.attention` of tokens that lie on the ranks of a mesh, or are DTensors."""
    if mesh is not None:
        return _over_group(query, key, value, call, group_of(mesh))
    layout = layout_of(query=query, key=key, value=value)
    query, key, value = local(query), local(key), local(value)
    rotary = None if call.rotary is None else (local(call.rotary[0]), local(call.rotary[1]))
    call = replace(call, key_mask=local(call.key_mask), rotary=rotary)
    if layout.group is None:
        answer = attention_here(query, key, value, **_spread(call))
    else:
        answer = _over_group(query, key, value, call, layout.group)
    return (layout.wrap(answer[0]), answer[1]) if isinstance(answer, tuple) else layout.wrap(answer)


def summarize(
    key: Tensor,
    value: Tensor,
    mechanism: Mechanism,
    *,
    key_mask: Tensor | None,
    cu_seqlens_k: Tensor | None,
    rotary: Rotary | None,
    backend: str,
    mesh: Mesh | None,
) -> State:
    """`affinear.summarize` of tokens that lie on the ranks of a mesh, or are DTensors; the same on every rank."""
    group = layout_of(key=key, value=value).group if mesh is None else group_of(mesh)
    key, value = local(key), local(value)
    key_mask, rotary = local(key_mask), None if rotary is None else (local(rotary[0]), local(rotary[1]))
    call = Call(mechanism, None, False, key_mask, cu_seqlens_k, cu_seqlens_k, rotary, None, False, backend)
    if group is None:
        return call.summarize(key, value, key_mask=key_mask, cu_seqlens_k=cu_seqlens_k, rotary=rotary)
    check.check_has_state(mechanism)
    check.check_keys_and_values(key, value)
    _agree("summarize", None, key, value, call, group)
    if cu_seqlens_k is None:
        return all_reduce(call.summarize(key, value, key_mask=key_mask, rotary=rotary), group)
    places = _plan(key, key, call, group)
    return _whole(_packed_state(key, value, call, places), places, group)


def _spread(call: Call) -> dict[str, Any]:
    """A call as keyword arguments, without copying its tensors."""
    return {name: getattr(call, name) for name in Call.__dataclass_fields__}


def _over_group(
    query: Tensor, key: Tensor, value: Tensor, call: Call, group: dist.ProcessGroup
) -> Tensor | tuple[Tensor, State]:
    if call.cu_seqlens_q is None and call.cu_seqlens_k is None and not call.causal:
        out, whole = start_attention(query, key, value, call, group)()
        return (out, whole) if call.return_state else out
    _check(query, key, value, call, group)
    if call.cu_seqlens_q is not None or call.cu_seqlens_k is not None:
        return _packed(query, key, value, call, group)
    own = call.summarize(key, value, key_mask=call.key_mask, rotary=call.rotary)
    start = _after(call.initial_state, before(own, group))
    out = attention_here(query, key, value, **_spread(replace(call, initial_state=start, return_state=False)))
    return (out, _after(call.initial_state, all_reduce(own, group))) if call.return_state else out


def start_attention(
    query: Tensor, key: Tensor, value: Tensor, call: Call, group: dist.ProcessGroup
) -> Callable[[], tuple[Tensor, State]]:
    """Full attention in two halves: the states are sent off now, the answers made when they are asked for."""
    _check(query, key, value, call, group)
    pending = start_all_reduce(call.summarize(key, value, key_mask=call.key_mask, rotary=call.rotary), group)

    def finish() -> tuple[Tensor, State]:
        whole = _after(call.initial_state, pending.wait())
        return attend_here(query, whole, scale=call.scale, rotary=call.rotary, backend=call.backend), whole

    return finish


def _check(query: Tensor, key: Tensor, value: Tensor, call: Call, group: dist.ProcessGroup) -> None:
    """What is wrong on this rank, and then what is different on others."""
    check.check_mesh_has_state(call.mechanism)
    check.check_keys_and_values(key, value)
    check.check_query(query, key)
    check.check_scale(call.scale)
    check.check_causal(query, key, call.causal)
    _agree("attention", query, key, value, call, group)


def _after(initial: State | None, state: State) -> State:
    return state if initial is None else merge(initial, state)


def _packed(
    query: Tensor, key: Tensor, value: Tensor, call: Call, group: dist.ProcessGroup
) -> Tensor | tuple[Tensor, State]:
    places = _plan(query, key, call, group)
    assert call.cu_seqlens_q is not None
    assert call.cu_seqlens_k is not None
    mine = places.mine.to(key.device)
    initial = None if call.initial_state is None else call.initial_state.map(lambda x: x.index_select(0, mine))
    offsets = places.offsets(places.queries, call.cu_seqlens_q)
    if call.causal:
        start = _start(key, value, call, places, group, initial)
        changed = replace(call, initial_state=start, return_state=False, cu_seqlens_q=offsets, cu_seqlens_k=offsets)
        out = attention_here(query, key, value, **_spread(changed))
    else:
        own = _packed_state(key, value, call, places)
        known = _after(initial, _with_other_ranks(own, places, group))
        out = attend_here(
            query, known, scale=call.scale, cu_seqlens_q=offsets, rotary=call.rotary, backend=call.backend
        )
    if not call.return_state:
        return out
    whole = _whole(_packed_state(key, value, call, places), places, group)
    return out, _after(call.initial_state, whole)


def _plan(query: Tensor, key: Tensor, call: Call, group: dist.ProcessGroup) -> Plan:
    """Where packed sequences lie, after a look at all ranks' numbers of tokens."""
    lengths = all_lengths(group, (query.shape[1], key.shape[1]), key.device)
    totals = lengths.sum(0).tolist()
    check.check_mask(call.key_mask, key, packed=True)
    check.check_packing(query, key, call.cu_seqlens_q, call.cu_seqlens_k, call.causal, (totals[0], totals[1]))
    assert call.cu_seqlens_q is not None
    assert call.cu_seqlens_k is not None
    return plan(call.cu_seqlens_q, call.cu_seqlens_k, lengths, group.rank())


def _packed_state(key: Tensor, value: Tensor, call: Call, places: Plan) -> State:
    """States of the sequences of this rank, from its own keys, (L, H, ...)."""
    assert call.cu_seqlens_k is not None
    offsets = places.offsets(places.keys, call.cu_seqlens_k)
    return call.summarize(key, value, cu_seqlens_k=offsets, rotary=call.rotary)


def _with_other_ranks(own: State, places: Plan, group: dist.ProcessGroup) -> State:
    """The same, with what other ranks hold of these sequences. Only sequences on several ranks travel."""
    if not places.shared.numel():
        return own
    total = all_reduce(_chosen(own, places.rows(places.shared, own.device)), group)
    index = places.with_shared(own.device)
    return _joined(own, total).map(lambda x: x.index_select(0, index))


def _whole(own: State, places: Plan, group: dist.ProcessGroup) -> State:
    """The states of all sequences, (S, H, ...), on every rank."""
    return all_reduce(_chosen(own, places.rows(torch.arange(places.number), own.device)), group)


def _chosen(state: State, rows: Tensor) -> State:
    """Some rows of a state; the one after the last is empty."""
    return state.map(lambda x: torch.cat((x, torch.zeros_like(x[:1]))).index_select(0, rows))


def _joined(first: State, second: State) -> State:
    """The rows of two states, without what merging has rounded off one of them alone."""
    children: list[Tensor] = []
    replace(first, rest=None).map(lambda x: children.append(x) or x)
    other = iter(children)
    return replace(second, rest=None).map(lambda x: torch.cat((next(other), x)))


def _start(
    key: Tensor, value: Tensor, call: Call, places: Plan, group: dist.ProcessGroup, initial: State | None
) -> State:
    """What the sequences of this rank know before its first token, (L, H, ...).

    All but the first begin here. Each rank tells the state of its last sequence, and the first one needs those of the
    ranks from where it began.
    """
    here = places.keys.here
    final = key.shape[1] - int(here[places.mine[-1]])
    tables = None if call.rotary is None else (call.rotary[0][final:], call.rotary[1][final:])
    tail = call.summarize(key[:, final:], value[:, final:], rotary=tables)
    began = min(int(places.keys.first[places.mine[0]]), group.rank())
    past = before(tail, group, began) if places.shared.numel() else _chosen(tail, _ones(tail))
    if initial is None:
        return _chosen(past, torch.arange(places.mine.shape[0], device=key.device).clamp(max=1))
    return _joined(merge(_chosen(initial, _zeros(tail)), past), initial.map(lambda x: x[1:]))


def _zeros(state: State) -> Tensor:
    return torch.zeros(1, dtype=torch.long, device=state.device)


def _ones(state: State) -> Tensor:
    return torch.ones(1, dtype=torch.long, device=state.device)


def _agree(verb: str, query: Tensor | None, key: Tensor, value: Tensor, call: Call, group: dist.ProcessGroup) -> None:
    """Compare calls, unless this is a graph, which has nobody to tell."""
    if not is_compiling():
        agree(group, _note(verb, query, key, value, call), key.device)


def _note(verb: str, query: Tensor | None, key: Tensor, value: Tensor, call: Call) -> str:
    """What has to be the same on every rank, in words."""
    batch, _, heads, width = key.shape
    words = [f"{verb} with {call.mechanism.name!r}", f"batch {batch}", f"{heads} key heads {width} wide"]
    words += [f"values {value.shape[3]} wide", str(key.dtype).removeprefix("torch.")]
    if query is not None:
        words += [f"{query.shape[2]} query heads", "causal" if call.causal else "not causal"]
    words += ["rotary" if call.rotary is not None else "no rotary"]
    if call.initial_state is not None:
        words += ["an initial state"]
    if call.return_state:
        words += ["a state returned"]
    if call.cu_seqlens_k is not None:
        numbers = call.cu_seqlens_k.tolist()
        words += [
            f"{len(numbers) - 1} sequences ending at {numbers[-1]} (checksum {zlib.crc32(str(numbers).encode())})"
        ]
    learns = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (query, key, value))
    return ", ".join([*words, "with gradients" if learns else "without gradients"])
