"""What a call must satisfy. Every complaint names the argument, what was expected, what came, and what to do."""

from __future__ import annotations

import sys
import warnings

import torch
from torch import Tensor

from .mechanisms import Mechanism
from .precision import statistics_dtype
from .rotary import Rotary, is_for_each_head
from .state import State, check_fits_together
from .tracing import is_eager

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MANY = 64  # heads: more than most networks have
BACKENDS = ("auto", "reference", "torch", "triton")


def check_backend(backend: str) -> None:
    """A backend has one of four names."""
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}; 'auto' chooses for you")


class LayoutWarning(UserWarning):
    """Tokens look as if heads came before tokens."""


def check_layout(layout: str | None, **tokens: Tensor) -> bool:
    """Whether heads come before tokens. Where nobody says, and it looks so, a warning says what was assumed."""
    if layout not in (None, "bnhd", "bhnd"):
        raise ValueError(
            f"layout: expected 'bnhd' (batch, tokens, heads, channels) or 'bhnd' (batch, heads, tokens, channels), "
            f"got {layout!r}; None is 'bnhd'"
        )
    if layout is None and is_eager():
        for name, x in tokens.items():
            if not isinstance(x, Tensor) or x.is_nested or x.ndim != 4:  # pyright: ignore[reportUnnecessaryIsInstance]
                continue  # which has a complaint of its own
            if looks_turned(x):
                warnings.warn(
                    f"{name}: shape {_shape(x)} is read as {x.shape[1]} tokens of {x.shape[2]} heads; if it is "
                    f"{x.shape[2]} tokens of {x.shape[1]} heads, pass layout='bhnd', else layout='bnhd' to be sure",
                    LayoutWarning,
                    stacklevel=3,
                )
                break
    return layout == "bhnd"


def looks_turned(x: Tensor) -> bool:
    """Whether there are so many heads for so few tokens (B, N, H, D) that they may be meant the other way round."""
    return x.shape[1] > 1 and max(MANY, 4 * x.shape[1]) <= x.shape[2]


def check_served(reason: str | None) -> None:
    """A backend asked for by name has nothing against the call."""
    if reason is not None:
        raise ValueError(f"backend: {reason}, or pass backend='torch'")


def check_rows(rows: Tensor, query: Tensor) -> None:
    """Numbers of queries are integers (R,) below N."""
    if not isinstance(rows, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"rows: expected numbers of queries as a tensor (R,) in int64, got {type(rows).__name__}; "
            "pass torch.tensor([0, 5, 7]) for three of them"
        )
    if rows.ndim != 1 or rows.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"rows: expected numbers of queries, (R,) in int64, got {rows.dtype} in shape {_shape(rows)}; "
            "pass torch.tensor([0, 5, 7]) for three of them"
        )
    if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < query.shape[1]:
        raise ValueError(
            f"rows: expected numbers from 0 to {query.shape[1] - 1}, as there are {query.shape[1]} queries, got "
            f"{int(rows.min())} to {int(rows.max())}"
        )


def check_tokens(name: str, x: Tensor) -> None:
    """Tokens are a floating-point tensor (batch, tokens, heads, width)."""
    if not isinstance(x, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"{name}: expected a torch.Tensor, got {type(x).__name__}; convert it with torch.as_tensor")
    if x.layout != torch.strided or x.is_nested:
        kind = "a nested" if x.is_nested else "a sparse"
        advice = "pack its sequences and pass cu_seqlens_q and cu_seqlens_k" if x.is_nested else "call .to_dense()"
        raise ValueError(f"{name}: expected a dense tensor, got {kind} one; {advice}")
    if x.dtype not in DTYPES:
        raise ValueError(f"{name}: expected float16, bfloat16, float32 or float64, got {x.dtype}; cast it first")
    shape = x.shape  # asked for once: at every call, each time counts
    if len(shape) != 4:
        raise ValueError(
            f"{name}: expected 4 dimensions (batch, tokens, heads, head_dim), got {x.ndim} in shape {_shape(x)}; "
            "unflatten the heads, or add a batch dimension"
        )
    if shape[2] == 0 or shape[3] == 0:
        raise ValueError(
            f"{name}: expected at least one head and one channel, got shape {_shape(x)}; check the last two"
        )


def check_like(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    """Two tensors of one call share dtype and device."""
    if x.dtype != other.dtype:
        raise ValueError(
            f"{name}: expected the dtype of {other_name}, {other.dtype}, got {x.dtype}; cast one, "
            "nothing is cast silently"
        )
    if x.device != other.device:
        raise ValueError(
            f"{name}: expected the device of {other_name}, {other.device}, got {x.device}; move one with .to()"
        )


def check_keys_and_values(key: Tensor, value: Tensor) -> None:
    """Keys and values come in pairs."""
    check_tokens("key", key)
    check_tokens("value", value)
    check_like("value", value, "key", key)
    if key.shape[:3] != value.shape[:3]:
        raise ValueError(
            f"value: expected batch, tokens and heads of key, {_shape(key)[:3]}, got {_shape(value)[:3]}; "
            "only the width of the values is free"
        )


def check_query(query: Tensor, key: Tensor) -> None:
    """Queries fit the keys; heads may be shared."""
    check_tokens("query", query)
    check_like("key", key, "query", query)
    (batch, _, heads, width), (key_batch, _, key_heads, key_width) = query.shape, key.shape
    if batch != key_batch:
        raise ValueError(
            f"key: expected the batch size of query, {batch}, got {key_batch}; expand or repeat one of them"
        )
    if width != key_width:
        raise ValueError(f"key: expected the head width of query, {width}, got {key_width}; project both to one width")
    check_groups(heads, key_heads)


def check_groups(query_heads: int, key_heads: int) -> None:
    """Key heads divide query heads."""
    if query_heads % key_heads:
        raise ValueError(
            f"query: expected a multiple of the {key_heads} key heads, got {query_heads} heads; "
            "each key head serves equally many query heads"
        )


def check_scale(scale: float | None) -> None:
    """A scale is a positive number, or None for the mechanism's own."""
    if scale is None:
        return
    if isinstance(scale, bool) or not isinstance(scale, int | float):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"scale: expected a number or None, got {type(scale).__name__}; call .item() on a tensor")
    if not 0 < scale <= sys.float_info.max:
        got = str(scale) if len(str(scale)) < 30 else f"{str(scale)[:20]}... with {len(str(scale))} digits"
        raise ValueError(f"scale: expected a positive finite number, got {got}; None takes the mechanism's own")


def check_mask(key_mask: Tensor | None, key: Tensor, packed: bool) -> None:
    """A key mask is boolean, (batch, keys)."""
    if key_mask is None:
        return
    if packed:
        raise ValueError(
            "key_mask: expected None beside cu_seqlens, got a mask; leave masked tokens out of the packing"
        )
    if not isinstance(key_mask, Tensor) or key_mask.dtype != torch.bool:  # pyright: ignore[reportUnnecessaryIsInstance]
        got = key_mask.dtype if isinstance(key_mask, Tensor) else type(key_mask).__name__  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"key_mask: expected a boolean tensor, True where a key takes part, got {got}; compare it first"
        )
    if key_mask.shape != key.shape[:2]:
        raise ValueError(
            f"key_mask: expected shape (batch, keys) = {_shape(key)[:2]}, got {_shape(key_mask)}; a mask of queries by "
            "keys has no linear form, use scaled_dot_product_attention for that"
        )
    if key_mask.device != key.device:
        raise ValueError(
            f"key_mask: expected the device of key, {key.device}, got {key_mask.device}; move it with .to()"
        )


def check_cu_seqlens(
    name: str, cu_seqlens: Tensor | None, tokens_name: str, tokens: Tensor, total: int | None = None
) -> None:
    """Cumulative lengths start at zero, never fall, and end at the number of tokens of a batch of one.

    Over a mesh they run through the tokens of all ranks, so many in `total`.
    """
    if cu_seqlens is None:
        return
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):  # pyright: ignore[reportUnnecessaryIsInstance]
        got = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"{name}: expected an int32 or int64 tensor, got {got}; cast it first")
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(
            f"{name}: expected shape (sequences + 1,) with at least one sequence, got {_shape(cu_seqlens)}; "
            "start it with a zero"
        )
    if tokens.shape[0] != 1:
        raise ValueError(
            f"{name}: expected {tokens_name} with batch size 1, got {tokens.shape[0]}; "
            "lay the sequences end to end along the tokens"
        )
    if cu_seqlens.device != tokens.device:
        raise ValueError(
            f"{name}: expected the device of {tokens_name}, {tokens.device}, got {cu_seqlens.device}; "
            "move it with .to()"
        )
    if _values_can_be_read(cu_seqlens):
        lengths = cu_seqlens.tolist()
        end, where = (tokens.shape[1], "") if total is None else (total, " on all ranks")
        if lengths[0] != 0 or lengths[-1] != end or sorted(lengths) != lengths:
            raise ValueError(
                f"{name}: expected values from 0 up to the {end} tokens of {tokens_name}{where}, never falling, "
                f"got {_short(lengths)}; it is the cumulative sum of the lengths"
            )


def check_packing(
    query: Tensor,
    key: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    causal: bool,
    totals: tuple[int | None, int | None] = (None, None),
) -> None:
    """Packed queries and keys go together, sequence by sequence; `totals` are those of all ranks."""
    if (cu_seqlens_q is None) != (cu_seqlens_k is None):
        given, missing = ("cu_seqlens_k", "cu_seqlens_q") if cu_seqlens_q is None else ("cu_seqlens_q", "cu_seqlens_k")
        raise ValueError(f"{missing}: expected a tensor beside {given}, got None; pass one twice for self-attention")
    check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, "query", query, totals[0])
    check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, "key", key, totals[1])
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_k: expected as many sequences as cu_seqlens_q, {cu_seqlens_q.shape[0] - 1}, "
            f"got {cu_seqlens_k.shape[0] - 1}; an empty one is a repeated number"
        )
    if causal and _values_can_be_read(cu_seqlens_q) and cu_seqlens_q.tolist() != cu_seqlens_k.tolist():
        raise ValueError(
            f"cu_seqlens_k: expected the values of cu_seqlens_q for causal attention, {_short(cu_seqlens_q.tolist())}, "
            f"got {_short(cu_seqlens_k.tolist())}; give the past as initial_state"
        )


def check_causal(query: Tensor, key: Tensor, causal: bool) -> None:
    """Causal attention pairs each query with a key."""
    if not isinstance(causal, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"causal: expected True or False, got {type(causal).__name__} {causal!r}; pass a bool")
    if causal and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"causal: expected as many queries as keys, got {query.shape[1]} queries and {key.shape[1]} keys; "
            "give the past as initial_state"
        )


def check_rotary(rotary: Rotary | None, tokens: Tensor, tokens_name: str) -> None:
    """Rotary tables are a pair, each (tokens, head width), or (tokens, heads, head width)."""
    if rotary is None:
        return
    if not isinstance(rotary, tuple | list) or len(rotary) != 2:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"rotary: expected a pair (cos, sin), got {type(rotary).__name__}; see affinear.ops.rotary_1d")
    expected = (tokens.shape[1], tokens.shape[3])
    if isinstance(rotary[0], Tensor) and is_for_each_head(rotary):  # pyright: ignore[reportUnnecessaryIsInstance]
        expected = tuple(tokens.shape[1:])
    for name, table in zip(("cos", "sin"), rotary, strict=True):
        if not isinstance(table, Tensor) or table.dtype not in DTYPES:  # pyright: ignore[reportUnnecessaryIsInstance]
            got = table.dtype if isinstance(table, Tensor) else type(table).__name__  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                f"rotary: expected a floating-point tensor as {name}, got {got}; see affinear.ops.rotary_1d"
            )
        if table.shape != expected:
            raise ValueError(
                f"rotary: expected {name} of shape (tokens, {'heads, ' * (len(expected) - 2)}head_dim) = {expected}, "
                f"that of {tokens_name}, "
                f"got {_shape(table)}; slice the table to the tokens at hand"
            )
        if table.device != tokens.device:
            raise ValueError(
                f"rotary: expected {name} on the device of {tokens_name}, {tokens.device}, got {table.device}; move it"
            )
    if tokens.shape[3] % 2:
        raise ValueError(f"rotary: expected an even head width, got {tokens.shape[3]}; channels turn in pairs")


def check_rotary_lengths(rotary: Rotary | None, query: Tensor, key: Tensor) -> None:
    """One pair of tables serves queries and keys only where they lie at the same positions."""
    if rotary is not None and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"rotary: expected as many queries as keys, got {query.shape[1]} and {key.shape[1]}; "
            "call summarize and attend, each with its own tables"
        )


def check_rotary_heads(rotary: Rotary | None, query: Tensor, heads: int) -> None:
    """Tables of each head serve queries and keys only where they have the same heads."""
    if is_for_each_head(rotary) and query.shape[2] != heads:
        raise ValueError(
            f"rotary: expected as many query heads as key heads beside tables of each head, got {query.shape[2]} and "
            f"{heads}; repeat the keys and values"
        )


def check_has_state(mechanism: Mechanism) -> None:
    """Softmax cannot be summarized."""
    if mechanism.gain is None:
        raise ValueError(
            f"mechanism: expected one with a state, got {mechanism.name!r}, whose answer needs every key; "
            "choose a linear mechanism, or call attention without states"
        )


def check_mesh_has_state(mechanism: Mechanism) -> None:
    """Over a mesh states travel, and softmax has none."""
    if mechanism.gain is None:
        raise ValueError(
            f"mechanism: expected one with a state beside mesh, got {mechanism.name!r}, which has none: every query "
            "needs every key; choose a linear mechanism, or gather the keys and call attention without mesh"
        )


def check_state(
    name: str, state: State, mechanism: Mechanism | None, tokens: Tensor, batch: int, rotary: Rotary | None
) -> None:
    """A state fits the tokens that meet it: mechanism, batch, dtype, device and rotary."""
    if not isinstance(state, State):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"{name}: expected an affinear.State, got {type(state).__name__}; summarize makes one")
    check_fits_together(state, name)
    # The same one, or an equal one; of two that are the same a compiler need not ask what is in them.
    if mechanism is not None and state.mechanism is not mechanism and state.mechanism != mechanism:
        raise ValueError(
            f"{name}: expected a state of {mechanism.name!r}, got one of {state.mechanism.name!r}; "
            "use one mechanism throughout"
        )
    if state.count.shape[0] != batch:
        raise ValueError(f"{name}: expected batch size {batch}, got {state.count.shape[0]}; one entry per sequence")
    expected = statistics_dtype(tokens.dtype)
    if state.dtype != expected:
        raise ValueError(
            f"{name}: expected {expected} statistics for {tokens.dtype} tokens, got {state.dtype}; call .to({expected})"
        )
    if state.device != tokens.device:
        raise ValueError(f"{name}: expected the device of the tokens, {tokens.device}, got {state.device}; call .to()")
    if (state.rotated_key_mean is None) != (rotary is None):
        has, wants = ("no rotary", "with") if state.rotated_key_mean is None else ("rotary", "without")
        raise ValueError(
            f"rotary: expected what {name} was made with, {has} positions, got a call {wants} tables; "
            "pass tables to both or to neither"
        )


def check_state_widths(name: str, state: State, heads: int, features: int, values: int | None) -> None:
    """A state has the heads and widths of the tokens that meet it."""
    got_heads, got_features, got_values = state.covariance.shape[1:]
    if got_heads != heads:
        raise ValueError(
            f"{name}: expected {heads} heads, those of key, got {got_heads}; use the state of the same layer"
        )
    if got_features != features:
        raise ValueError(
            f"{name}: expected features {features} wide, as {state.mechanism.name!r} makes them here, "
            f"got {got_features}; use one head width throughout"
        )
    if values is not None and got_values != values:
        raise ValueError(f"{name}: expected values {values} wide, got {got_values}; use one value width throughout")


def _values_can_be_read(x: Tensor) -> bool:
    """Whether the numbers are there to look at: not while tracing, nor inside torch.func, nor under graph capture."""
    return is_eager() and not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


def _short(numbers: list[int]) -> str:
    return str(numbers) if len(numbers) <= 8 else f"[{', '.join(map(str, numbers[:4]))}, ..., {numbers[-1]}]"
