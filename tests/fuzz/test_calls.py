"""The operator, called with anything: a result of the right shape, or a ValueError with a sentence."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from fuzzing import Tally, for_a_while, hostile
from torch import Tensor

import affinear as af

FUNCTIONS = (af.attention, af.summarize, af.attend, af.weights)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64)


def tensor(draw: random.Random, like: tuple[int, ...]) -> Any:
    """What is asked for, mostly; else one of another size, dtype, layout or content, or no tensor at all."""
    kind = draw.randrange(14)
    size = list(like)
    if kind == 0:
        return hostile(draw)
    if kind == 1:
        size[draw.randrange(len(size))] = draw.choice((0, 1, 3, 17))
    elif kind == 2:
        size = size[: draw.randrange(len(size))]
    elif kind == 3:
        size = [*size, 2]
    dtype = draw.choice(DTYPES) if draw.random() < 0.1 else torch.float32
    out = torch.randn(size).to(dtype)
    if kind == 4 and out.numel() and out.is_floating_point():
        out.view(-1)[draw.randrange(out.numel())] = draw.choice((float("nan"), float("inf"), 3e38, -3e38, 1e-45))
    elif kind == 5:
        return out.to_sparse() if out.dim() else out
    elif kind == 6 and len(size) > 1:
        return out.transpose(0, -1)
    elif kind == 7:
        return out.to("meta")
    elif kind == 8 and size and size[0]:
        return torch.nested.nested_tensor(list(out)) if out.dtype == torch.float32 else out
    elif kind == 9:
        return torch.zeros(1).expand(size)
    return out


def options(draw: random.Random, tokens: int, width: int) -> dict[str, Any]:
    """Some of the arguments by name, right or wrong."""
    right: dict[str, Any] = {
        "mechanism": draw.choice(("mala", "nala", "linear", "relu", "focused", "inline", "softmax", "mala_released")),
        "scale": draw.choice((1.0, 0.1, 3)),
        "causal": draw.random() < 0.5,
        "key_mask": torch.rand(2, tokens) < 0.7,
        "cu_seqlens_q": torch.tensor([0, 2, tokens]),
        "cu_seqlens_k": torch.tensor([0, 2, tokens]),
        "rotary": (torch.randn(tokens, width), torch.randn(tokens, width)),
        "return_state": True,
        "backend": draw.choice(("auto", "torch", "reference", "triton")),
        "rows": torch.tensor([0, 1]),
        "layout": draw.choice((None, "bnhd", "bhnd")),
    }
    wrong: dict[str, Any] = {
        "scale": draw.choice((10**400, float("nan"), 0, -1.0, "1", torch.randn(3))),
        "causal": draw.choice((1, 0, "yes", None)),
        "key_mask": draw.choice((torch.ones(2, tokens), torch.ones(3, 3, dtype=torch.bool), [True])),
        "cu_seqlens_k": draw.choice((torch.tensor([0, 99]), torch.tensor([3, 1, 0]), [0, 2], torch.tensor([0.0, 2.0]))),
        "rotary": draw.choice(((torch.randn(2, 2), None), 3, (1, 2, 3), torch.randn(2, tokens, width))),
        "initial_state": draw.choice((3, "state", torch.randn(2))),
        "rows": draw.choice(([0, 1], torch.tensor([99]), torch.tensor([-1]), torch.tensor([0.5]), 3)),
        "mechanism": draw.choice(("mela", None, 3, "")),
        "layout": draw.choice(("bhdn", 3, [], "")),
    }
    given: dict[str, Any] = {}
    for name in draw.sample(list(right), draw.randrange(4)):
        given[name] = right[name]
    if draw.random() < 0.4:
        name = draw.choice(list(wrong))
        given[name] = wrong[name] if draw.random() < 0.7 else hostile(draw)
    return given


def call(draw: random.Random) -> tuple[str, Any]:
    tokens, heads, width = draw.choice((1, 5, 8)), draw.choice((1, 2, 4)), draw.choice((2, 4, 8))
    like = (2, tokens, heads, width)
    query, key, value = (tensor(draw, like) for _ in range(3))
    given = options(draw, tokens, width)
    function = draw.choice(FUNCTIONS)
    known = function.__code__.co_varnames[: function.__code__.co_argcount + function.__code__.co_kwonlyargcount]
    given = {name: value for name, value in given.items() if name in known}
    if function is af.attend:
        state: Any = (
            af.summarize(torch.randn(like), torch.randn(like), "mala") if draw.random() < 0.7 else hostile(draw)
        )
        given.pop("mechanism", None)
        inputs = (query, state)
    elif function is af.summarize:
        inputs = (key, value)
    elif function is af.weights:
        inputs = (query, key)
    else:
        inputs = (query, key, value)
    words = [*map(_told, inputs), *(f"{name}={_told(one)}" for name, one in given.items())]
    told = f"{function.__name__}({', '.join(words)})"
    return told, lambda: function(*inputs, **given)


def _told(value: Any) -> str:
    if isinstance(value, Tensor):
        shape = "nested" if value.is_nested else tuple(value.shape)
        return f"{value.dtype}{shape}{value.layout}{value.device}"
    return repr(value)[:80]


@pytest.mark.filterwarnings("ignore")  # torch's about nested tensors
def test_hostile_calls(tally: Tally, draw: random.Random):
    for _ in for_a_while():
        told, work = call(draw)
        found, result = tally.attempt(told, work, ValueError, guarded=False)
        if found and not isinstance(result, (Tensor, af.State, tuple)):
            tally.failures.append(f"{told} gave {type(result).__name__}")
    tally.check()
