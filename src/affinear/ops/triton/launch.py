"""From tensors to launches: block shapes, grids, and which of the kernels serve a call. No autograd here."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from . import attend, doubled, fused, moments, summarize
from .options import OPTIONS, OPTIONS_FLOAT32, SIZES, Options
from .rules import Rule
from .sizes import cdiv, next_power_of_2
from .starting import is_roomy, start
from .statistics import Statistics

NARROW = 128 * 128  # numbers of a state that one program can hold beside its tokens
DOUBLED = 128  # channels of keys, each with two features, and of values, that one program can hold in bfloat16
PAIRED = 64  # channels of keys from which on two features of each are worth kernels of their own going backwards
SHORT = 256  # tokens


class Blocks(NamedTuple):
    """Block shapes for heads of one width.

    Attributes:
        BD: Channels of a key, rounded up to a power of two.
        BF: Features, BD or twice that.
        BE: Channels of a value in a block.
        e_blocks: Blocks that hold all of a value; with one, a program can hold a whole state.
    """

    BD: int
    BF: int
    BE: int
    e_blocks: int


@cache
def blocks_for(head_dim: int, value_dim: int, features: int, itemsize: int, whole: bool = False) -> Blocks:
    """Block shapes for heads of this width; they depend on nothing else, so neither do the bits.

    A `whole` state of two features of each of 128 channels, and 128 values, is for bfloat16; going backwards, also for
    chips with the shared memory of a Hopper.
    """
    bd = max(16, next_power_of_2(head_dim))
    bf, be = bd * features, max(16, next_power_of_2(value_dim))
    if bf * be > NARROW:
        be = min(be, DOUBLED if whole and bd == DOUBLED and features == 2 else 64 if itemsize == 2 else 32)
    return Blocks(bd, bf, be, cdiv(value_dim, be))


@cache
def options_for(kernel: str, blocks: Blocks, itemsize: int, rotary: bool = False) -> Options:
    """How to build a kernel for these blocks."""
    area = blocks.BF * blocks.BE
    size = next((name for name, most in SIZES.items() if area <= most and blocks.BF <= DOUBLED), "wide")
    if blocks.BF > DOUBLED == blocks.BD:
        size = "double"
    table = (OPTIONS if itemsize == 2 else OPTIONS_FLOAT32)[size]
    return table.get(f"{kernel} rotary", table[kernel]) if rotary else table[kernel]


def _build(kernel: str, b: Blocks, dtype: torch.dtype, rotary: bool) -> dict[str, object]:
    """Constants and options that every kernel takes."""
    options = options_for(kernel, b, dtype.itemsize, rotary)
    stages = options.stages if options.lean is None or is_roomy() else options.lean
    built: dict[str, object] = {
        "PRECISION": precision_of(dtype), "ROUND": dtype == torch.bfloat16, "BN": options.BN, "BD": b.BD, "BF": b.BF,
        "BE": b.BE, "STAGES": stages, "num_warps": options.warps,
    }  # fmt: skip
    # Rotation needs more of them, and what it cannot have it keeps in memory.
    if torch.version.hip is None and options.registers is not None and not rotary:
        built["maxnreg"] = options.registers
    return built


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def precision_of(dtype: torch.dtype) -> str:
    """How products are taken: "split" into bfloat16 parts for half precision, tf32 only where torch allows it."""
    if dtype.itemsize == 2:
        return "split"
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


class Call(NamedTuple):
    """What the kernels of one call have in common, besides its tokens."""

    rule: Rule
    scale: float
    mask: Tensor | None
    bounds_q: Tensor | None
    bounds_k: Tensor | None
    turns: Tensor | None
    start: Callable[..., None] = start  # or what takes launches down


@cache
def segments_of(length: int, BN: int) -> int:
    """Segments of a sequence of this length; as `moments.segment_rows`."""
    segment, few, most = (x.value for x in (moments.SEGMENT, moments.FEW_SEGMENTS, moments.MOST_SEGMENTS))
    number = min(max(cdiv(length, segment), few), cdiv(length, segment // 4))
    number = min(max(number, 1), most)
    rows = max(cdiv(cdiv(length, number), BN), 1) * BN
    return max(cdiv(length, rows), 1)


def share_rows(length: int, programs: int, BN: int, device: torch.device) -> int:
    """Rows of one program where `programs` of them would serve whole sequences: several per multiprocessor."""
    wanted = max(4 * processors(device) // max(programs, 1), 1)
    return cdiv(cdiv(max(length, 1), wanted), BN) * BN


def new_statistics(tokens: Tensor, number: int, heads: int, features: int, values: int, turned: bool) -> Statistics:
    """Room for the states of some sequences."""

    def empty(*shape: int) -> Tensor:
        return torch.empty(number, heads, *shape, dtype=torch.float32, device=tokens.device)

    count = torch.empty(number, heads, dtype=torch.int64, device=tokens.device)
    return Statistics(
        count, empty(features), empty(values), empty(features, values), empty(features) if turned else None
    )


def _pointers(state: Statistics) -> tuple[Tensor, ...]:
    turned = state.key_mean if state.rotated_key_mean is None else state.rotated_key_mean
    return state.count, state.key_mean, turned, state.value_mean, state.covariance


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A tensor, or another in its place that no kernel will look at."""
    return other if tensor is None else tensor


def _mask(call: Call, tokens: Tensor) -> tuple[Tensor, tuple[int, int]]:
    if call.mask is None:
        return tokens, (0, 0)
    return call.mask.view(torch.uint8), call.mask.stride()


def _summarize_segments(key: Tensor, value: Tensor, call: Call) -> tuple[Statistics, int]:
    """The states of the segments of every sequence, (S, G * segments, ...), and how many each has."""
    (batch, length, heads, width), values = key.shape, value.shape[3]
    b = blocks_for(width, values, call.rule.blocks, key.element_size(), key.dtype == torch.bfloat16)
    number = batch if call.bounds_k is None else call.bounds_k.shape[0] - 1
    features, rotary = width * call.rule.blocks, call.turns is not None
    segments = segments_of(length, options_for("summarize", b, key.element_size(), rotary).BN)
    parts = new_statistics(key, number, heads * segments, features, values, rotary)
    mask, mask_strides = _mask(call, key)
    call.start(
        summarize.summarize_kernel, (number * heads, segments, b.e_blocks),
        (key, value, mask, _or(call.bounds_k, key), _or(call.turns, key), *_pointers(parts)),
        (*key.stride(), *value.stride(), *mask_strides, length, heads, segments),
        MAP=call.rule.map, ROTARY=rotary, MASKED=call.mask is not None, PACKED=call.bounds_k is not None,
        D=width, E=values, F=features, PIN=rotary, **_build("summarize", b, key.dtype, rotary),
    )  # fmt: skip
    return parts, segments


def _merge_segments(parts: Statistics, segments: int, key: Tensor, call: Call) -> Statistics:
    """The states of the sequences."""
    number, _, features, values = parts.covariance.shape
    (_, length, heads, width), itemsize = key.shape, key.element_size()
    b = blocks_for(width, values, call.rule.blocks, itemsize, key.dtype == torch.bfloat16)
    bn = options_for("summarize", b, itemsize, call.turns is not None).BN
    state = new_statistics(key, number, heads, features, values, call.turns is not None)
    rows, wide = 16, min(64, next_power_of_2(values))
    call.start(
        moments.merge_kernel, (number * heads, cdiv(features, rows), cdiv(values, wide)),
        (*_pointers(parts), *_pointers(state), _or(call.bounds_k, key)),
        (length, heads, features, values, segments),
        ROTARY=call.turns is not None, PACKED=call.bounds_k is not None, BN=bn, BR=rows, BE=wide, num_warps=2,
    )  # fmt: skip
    return state


def summarize_tokens(key: Tensor, value: Tensor, call: Call) -> Statistics:
    """The state of every sequence."""
    parts, segments = _summarize_segments(key, value, call)
    return parts if segments == 1 else _merge_segments(parts, segments, key, call)


def attend_tokens(query: Tensor, state: Statistics, call: Call) -> Tensor:
    """Answers to queries, (B, N, H, E)."""
    return _attend(query, state, 1, 0, None, call)


def _attend(query: Tensor, parts: Statistics, segments: int, keys: int, kept: Statistics | None, call: Call) -> Tensor:
    """Answers from the states of segments, which each program merges for itself; the first leaves them in `kept`."""
    (batch, length, heads, width), (number, groups, features, values) = query.shape, parts.covariance.shape
    groups, itemsize, rotary = groups // segments, query.element_size(), call.turns is not None
    b = blocks_for(width, values, call.rule.blocks, itemsize, query.dtype == torch.bfloat16)
    out = torch.empty(batch, length, heads, values, dtype=query.dtype, device=query.device)
    options = options_for("attend", b, itemsize, rotary)
    rows = share_rows(length, number * heads * b.e_blocks, options.BN, query.device)
    call.start(
        attend.attend_kernel, (number * heads, cdiv(max(length, 1), rows), b.e_blocks),
        (query, _or(call.bounds_q, query), _or(call.bounds_k, query), _or(call.turns, query),
         *_pointers(parts), *_pointers(parts if kept is None else kept), out),
        (*query.stride(), length, keys, length, rows, segments, call.scale, heads, groups),
        MAP=call.rule.map, GAIN=call.rule.gain, RELEASED=call.rule.released, ROTARY=rotary,
        PACKED=call.bounds_q is not None, MERGE=segments > 1, KEEP=kept is not None,
        SEGMENT_BN=options_for("summarize", b, itemsize, rotary).BN,
        FINE=options.fine and query.dtype == torch.bfloat16,
        D=width, E=values, F=features, **_build("attend", b, query.dtype, rotary),
    )  # fmt: skip
    return out


def attend_tokens_backward(grad: Tensor, query: Tensor, state: Statistics, call: Call) -> tuple[Tensor, Tensor]:
    """Gradients of the queries, and of every state as a row: mean features, mean value, covariance."""
    (batch, length, heads, width), (number, groups, features, values) = query.shape, state.covariance.shape
    b = blocks_for(width, values, call.rule.blocks, query.element_size(), _has_room(query))
    rotary = call.turns is not None
    paired = b.BF > b.BD >= PAIRED and b.BD <= DOUBLED and b.e_blocks == 1 and _has_room(query)
    kernel = "paired_state" if paired else "attend_backward"
    segments = segments_of(length, options_for(kernel, b, query.element_size(), rotary).BN)
    row = features * (2 if rotary else 1) + values + features * values
    grad_query = torch.empty(batch, length, heads, width, dtype=query.dtype, device=query.device)
    parts = torch.empty(number * groups, heads // groups * segments, row, dtype=torch.float32, device=query.device)
    if paired:
        _attend_pairs_backward(grad, query, state, grad_query, parts, segments, b, call)
    else:
        call.start(
            attend.attend_backward_kernel, (number * heads, segments, b.e_blocks),
            (query, grad, _or(call.bounds_q, query), _or(call.turns, query), *_pointers(state), grad_query, parts),
            (*query.stride(), *grad.stride(), length, length, segments, call.scale, heads, groups),
            MAP=call.rule.map, GAIN=call.rule.gain, RELEASED=call.rule.released, ROTARY=rotary,
            PACKED=call.bounds_q is not None, D=width, E=values, F=features, E_BLOCKS=b.e_blocks,
            **_build(kernel, b, query.dtype, rotary),
        )  # fmt: skip
    if parts.shape[1] == 1:
        return grad_query, parts[:, 0]
    total = torch.empty(number * groups, row, dtype=torch.float32, device=query.device)
    call.start(
        moments.add_kernel, (number * groups, cdiv(row, 1024), 1), (parts, total), (parts.shape[1], row), BW=1024
    )
    return grad_query, total


def _has_room(tokens: Tensor) -> bool:
    """Whether a program of the backward pass can hold a state with two features of each of 128 channels."""
    return tokens.dtype == torch.bfloat16 and is_roomy()


def _attend_pairs_backward(
    grad: Tensor, query: Tensor, state: Statistics, grad_query: Tensor, parts: Tensor, segments: int, b: Blocks,
    call: Call,
) -> None:  # fmt: skip
    """Fill the gradients of queries, then those of states, for maps that double the width."""
    (batch, length, heads, width), (number, groups, features, values) = query.shape, state.covariance.shape
    rotary = call.turns is not None
    bn = options_for("paired_query", b, query.element_size(), rotary).BN
    rows = share_rows(length, number * heads, bn, query.device)
    # Gain and gradient of z; for the released networks also the weight of the mean value, and the gradient of a turn.
    number_of_notes = 2 + call.rule.released * (1 + rotary)
    notes = torch.empty(number_of_notes, heads, batch * length, dtype=torch.float32, device=query.device)
    tokens = query, grad, _or(call.bounds_q, query), _or(call.turns, query)
    strides = *query.stride(), *grad.stride(), length, length
    constants = {
        "MAP": call.rule.map, "RELEASED": call.rule.released, "ROTARY": rotary, "PACKED": call.bounds_q is not None,
        "D": width, "E": values, "F": features,
    }  # fmt: skip
    call.start(
        doubled.paired_query_kernel, (number * heads, cdiv(max(length, 1), rows), 1),
        (*tokens, *_pointers(state), grad_query, notes),
        (*strides, rows, notes.stride(0), call.scale, heads, groups),
        GAIN=call.rule.gain, **constants, **_build("paired_query", b, query.dtype, rotary),
    )  # fmt: skip
    call.start(
        doubled.paired_state_kernel, (number * heads, segments, 1), (*tokens, notes, parts),
        (*strides, segments, notes.stride(0), call.scale, heads),
        **constants, **_build("paired_state", b, query.dtype, rotary),
    )  # fmt: skip


def summarize_tokens_backward(
    grad: Tensor, key: Tensor, value: Tensor, state: Statistics, call: Call
) -> tuple[Tensor, Tensor]:
    """Gradients of keys and values from those of their states."""
    (batch, length, heads, width), (number, _, features, values) = key.shape, state.covariance.shape
    b = blocks_for(width, values, call.rule.blocks, key.element_size(), _has_room(key))
    kernel = "summarize_backward whole" if b.BF > b.BD == b.BE == DOUBLED else "summarize_backward"
    grad_key = torch.empty(batch, length, heads, width, dtype=key.dtype, device=key.device)
    grad_value = torch.empty(batch, length, heads, values, dtype=key.dtype, device=key.device)
    mask, mask_strides = _mask(call, key)
    rotary = call.turns is not None
    options = options_for(kernel, b, key.element_size(), rotary)
    bn, fine = options.BN, options.fine and key.dtype == torch.bfloat16
    rows = share_rows(length, number * heads, bn, key.device)
    call.start(
        summarize.summarize_backward_kernel, (number * heads, cdiv(max(length, 1), rows), 1),
        (key, value, mask, _or(call.bounds_k, key), _or(call.turns, key), *_pointers(state)[:4],
         grad, grad_key, grad_value),
        (*key.stride(), *value.stride(), *mask_strides, length, length, rows, heads),
        MAP=call.rule.map, ROTARY=rotary, MASKED=call.mask is not None, PACKED=call.bounds_k is not None,
        D=width, E=values, F=features, E_BLOCKS=b.e_blocks, FINE=fine, PIN=bn < 64,
        **_build(kernel, b, key.dtype, rotary),
    )  # fmt: skip
    return grad_key, grad_value


def _one_launch(b: Blocks, length: int, keys: int, packed: bool) -> bool:
    """Whether one program goes through all tokens of a sequence and head faster than two launches share them.

    Compilers round one launch and two differently: the choice for a packed sequence must not depend on its neighbours.
    """
    return b.e_blocks == 1 and b.BF * b.BE <= NARROW and max(length, keys) <= SHORT and not packed


def attention(query: Tensor, key: Tensor, value: Tensor, call: Call, keep: bool) -> tuple[Tensor, Statistics | None]:
    """Answers, and the states if they are to be kept."""
    (batch, length, heads, width), (_, keys, groups, values) = query.shape, value.shape
    b = blocks_for(width, values, call.rule.blocks, query.element_size(), query.dtype == torch.bfloat16)
    if not _one_launch(b, length, keys, call.bounds_k is not None):
        return _attention_in_parts(query, key, value, call, keep)
    features, rotary = width * call.rule.blocks, call.turns is not None
    out = torch.empty(batch, length, heads, values, dtype=query.dtype, device=query.device)
    state = new_statistics(key, batch, groups, features, values, rotary) if keep else None
    mask, mask_strides = _mask(call, key)
    call.start(
        fused.attention_kernel, (batch * groups, 1, 1),
        (query, key, value, mask, _or(call.turns, query), out,
         *((query,) * 5 if state is None else _pointers(state))),
        (*query.stride(), *key.stride(), *value.stride(), *mask_strides,
         length, keys, call.scale, heads, groups),
        MAP=call.rule.map, GAIN=call.rule.gain, RELEASED=call.rule.released, ROTARY=rotary,
        MASKED=call.mask is not None, KEEP=keep,
        D=width, E=values, F=features, PIN=rotary, **_build("attention", b, query.dtype, rotary),
    )  # fmt: skip
    return out, state


def _attention_in_parts(
    query: Tensor, key: Tensor, value: Tensor, call: Call, keep: bool
) -> tuple[Tensor, Statistics | None]:
    """Many programs for each sequence and head. A few segments are merged where they are needed, many once before."""
    parts, segments = _summarize_segments(key, value, call)
    if 1 < segments <= moments.FEW_SEGMENTS.value and query.shape[1] > 0:
        number, _, features, values = parts.covariance.shape
        turned = call.turns is not None
        state = new_statistics(key, number, key.shape[2], features, values, turned) if keep else None
        return _attend(query, parts, segments, key.shape[1], state, call), state
    state = parts if segments == 1 else _merge_segments(parts, segments, key, call)
    return _attend(query, state, 1, 0, None, call), state if keep else None


def attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, state: Statistics, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values."""
    grad_query, grad_state = attend_tokens_backward(grad, query, state, call)
    return grad_query, *summarize_tokens_backward(grad_state, key, value, state, call)
