"""A wrong call is told which argument is wrong, what was expected, what came, and what to do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import affinear as af
from affinear.ops import rotary_1d

BATCH, TOKENS, HEADS, WIDTH = 2, 6, 4, 8


def tokens(*changes: tuple[int, int], **options: Any) -> Tensor:
    """Zeros (2, 6, 4, 8), but for the sizes in (dimension, size) pairs."""
    shape = [BATCH, TOKENS, HEADS, WIDTH]
    for dimension, size in changes:
        shape[dimension] = size
    return torch.zeros(shape, **options)


def mask(*shape: int, **options: Any) -> Tensor:
    """A mask that keeps everything."""
    return torch.ones(shape or (BATCH, TOKENS), dtype=torch.bool, **options)


X = tokens()
ONE = tokens((0, 1))
TABLES = rotary_1d(TOKENS, WIDTH)
WHOLE = torch.tensor([0, TOKENS])
META = torch.device("meta")
AWAY = X.to(META)
MALA = af.mechanisms()["mala"]
STATE = af.summarize(X, X)


def attention(**changes: Any) -> object:
    """A right call, but for the changes."""
    arguments: dict[str, Any] = {"query": X, "key": X, "value": X}
    return af.attention(**arguments | changes)


def packed(cu_seqlens_q: Any, cu_seqlens_k: Any, **changes: Any) -> object:
    """A call with packed sequences."""
    arguments: dict[str, Any] = {"query": ONE, "key": ONE, "value": ONE}
    return af.attention(**arguments | changes, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)


class Wrong(NamedTuple):
    """A wrong call, and the four things that its complaint says."""

    argument: str
    expected: str
    got: str
    advice: str
    call: Callable[[], object]


WRONG = {
    # Mechanisms and backends
    "mechanism unknown": Wrong(
        "mechanism", "one of linear, relu,", "'mila'", "affinear.register", lambda: attention(mechanism="mila")
    ),
    "mechanism not a name": Wrong(
        "mechanism", "or a Mechanism", "3", "affinear.register", lambda: attention(mechanism=3)
    ),
    "mechanism unknown to summarize": Wrong(
        "mechanism", "one of linear,", "'mila'", "affinear.register", lambda: af.summarize(X, X, "mila")
    ),
    "mechanism unknown to weights": Wrong(
        "mechanism", "one of linear,", "None", "affinear.register", lambda: af.weights(X, X, None)  # pyright: ignore
    ),
    "register a name": Wrong(
        "mechanism", "an affinear.Mechanism", "str", "make one first", lambda: af.register("mala")  # pyright: ignore
    ),
    "register without a name": Wrong(
        "mechanism.name", "a non-empty string", "''", "give it one",
        lambda: af.register(dataclasses.replace(MALA, name="")),
    ),
    "register a taken name": Wrong(
        "mechanism.name", "", "'linear'", "choose a new name",
        lambda: af.register(dataclasses.replace(MALA, name="linear")),
    ),
    "backend unknown": Wrong(
        "backend", "one of auto, reference, torch, triton", "'cuda'", "'auto' chooses",
        lambda: attention(backend="cuda"),
    ),
    "backend triton": Wrong(
        "backend", "CUDA tensors for 'triton'", "meta", "move them to a GPU, or pass backend='torch'",
        lambda: attention(query=AWAY, key=AWAY, value=AWAY, backend="triton"),
    ),
    "backend triton to summarize": Wrong(
        "backend", "CUDA tensors for 'triton'", "meta", "move them to a GPU, or pass backend='torch'",
        lambda: af.summarize(AWAY, AWAY, backend="triton"),
    ),
    "backend triton to attend": Wrong(
        "backend", "CUDA tensors for 'triton'", "meta", "move them to a GPU, or pass backend='torch'",
        lambda: af.attend(AWAY, STATE.to(META), backend="triton"),
    ),
    # Tensors one by one
    "query a list": Wrong(
        "query", "a torch.Tensor", "list", "torch.as_tensor", lambda: attention(query=X.tolist())
    ),
    "key None": Wrong(
        "key", "a torch.Tensor", "NoneType", "torch.as_tensor", lambda: attention(key=None)
    ),
    "value of an array library": Wrong(
        "value", "a torch.Tensor", "ndarray", "torch.as_tensor", lambda: attention(value=X.numpy())
    ),
    "query of integers": Wrong(
        "query", "float16, bfloat16, float32 or float64", "torch.int64", "cast it", lambda: attention(query=X.long())
    ),
    "key complex": Wrong(
        "key", "float16, bfloat16, float32 or float64", "torch.complex64", "cast it",
        lambda: attention(key=X.to(torch.complex64)),
    ),
    "value boolean": Wrong(
        "value", "float16, bfloat16, float32 or float64", "torch.bool", "cast it", lambda: attention(value=X.bool())
    ),
    "query without heads": Wrong(
        "query", "4 dimensions (batch, tokens, heads, head_dim)", "3 in shape (2, 6, 32)", "unflatten the heads",
        lambda: attention(query=X.flatten(2)),
    ),
    "key without batch": Wrong(
        "key", "4 dimensions (batch, tokens, heads, head_dim)", "3 in shape (6, 4, 8)", "add a batch dimension",
        lambda: attention(key=X[0]),
    ),
    "value of five dimensions": Wrong(
        "value", "4 dimensions", "5 in shape (1, 2, 6, 4, 8)", "batch dimension", lambda: attention(value=X[None])
    ),
    "no heads": Wrong(
        "key", "at least one head and one channel", "(2, 6, 0, 8)", "check the last two",
        lambda: attention(key=tokens((2, 0))),
    ),
    "no channels": Wrong(
        "query", "at least one head and one channel", "(2, 6, 4, 0)", "check the last two",
        lambda: attention(query=tokens((3, 0))),
    ),
    # Tensors together
    "value in another dtype": Wrong(
        "value", "the dtype of key, torch.float32", "torch.float16", "cast one", lambda: attention(value=X.half())
    ),
    "key and value in another dtype": Wrong(
        "key", "the dtype of query, torch.float32", "torch.float64", "cast one",
        lambda: attention(key=X.double(), value=X.double()),
    ),
    "value on another device": Wrong(
        "value", "the device of key, cpu", "meta", ".to()", lambda: attention(value=X.to(META))
    ),
    "query on another device": Wrong(
        "key", "the device of query, meta", "cpu", ".to()", lambda: attention(query=X.to(META))
    ),
    "fewer values than keys": Wrong(
        "value", "batch, tokens and heads of key, (2, 6, 4)", "(2, 5, 4)", "only the width",
        lambda: attention(value=tokens((1, 5))),
    ),
    "fewer value heads than key heads": Wrong(
        "value", "batch, tokens and heads of key, (2, 6, 4)", "(2, 6, 2)", "only the width",
        lambda: af.summarize(X, tokens((2, 2))),
    ),
    "another batch": Wrong(
        "key", "the batch size of query, 2", "1", "expand or repeat", lambda: attention(key=ONE, value=ONE)
    ),
    "another width": Wrong(
        "key", "the head width of query, 8", "16", "project both",
        lambda: attention(key=tokens((3, 16)), value=tokens((3, 16))),
    ),
    "heads that do not divide": Wrong(
        "query", "a multiple of the 3 key heads", "4 heads", "equally many",
        lambda: attention(key=tokens((2, 3)), value=tokens((2, 3))),
    ),
    "more key heads than query heads": Wrong(
        "query", "a multiple of the 8 key heads", "4 heads", "equally many", lambda: af.weights(X, tokens((2, 8)))
    ),
    # Scale
    "scale zero": Wrong("scale", "a positive finite number", "0", "None takes", lambda: attention(scale=0)),
    "scale negative": Wrong("scale", "a positive finite number", "-0.5", "None takes", lambda: attention(scale=-0.5)),
    "scale not a number": Wrong(
        "scale", "a positive finite number", "nan", "None takes", lambda: af.weights(X, X, scale=float("nan"))
    ),
    "scale infinite": Wrong(
        "scale", "a positive finite number", "inf", "None takes", lambda: af.attend(X, STATE, scale=float("inf"))
    ),
    "scale a tensor": Wrong(
        "scale", "a number or None", "Tensor", ".item()", lambda: attention(scale=torch.tensor(0.5))
    ),
    "scale a boolean": Wrong("scale", "a number or None", "bool", ".item()", lambda: attention(scale=True)),
    # Masks
    "mask of numbers": Wrong(
        "key_mask", "a boolean tensor, True where a key takes part", "torch.int64", "compare it",
        lambda: attention(key_mask=mask().long()),
    ),
    "mask a list": Wrong(
        "key_mask", "a boolean tensor", "list", "compare it", lambda: attention(key_mask=[[True] * TOKENS] * BATCH)
    ),
    "mask too short": Wrong(
        "key_mask", "(batch, keys) = (2, 6)", "(2, 5)", "no linear form", lambda: attention(key_mask=mask(BATCH, 5))
    ),
    "mask of queries by keys": Wrong(
        "key_mask", "(batch, keys) = (2, 6)", "(6, 6)", "use scaled_dot_product_attention",
        lambda: attention(key_mask=mask(TOKENS, TOKENS)),
    ),
    "mask of queries by keys in each batch": Wrong(
        "key_mask", "(batch, keys) = (2, 6)", "(2, 6, 6)", "use scaled_dot_product_attention",
        lambda: af.weights(X, X, key_mask=mask(BATCH, TOKENS, TOKENS)),
    ),
    "mask on another device": Wrong(
        "key_mask", "the device of key, cpu", "meta", ".to()", lambda: af.summarize(X, X, key_mask=mask(device=META))
    ),
    "mask beside packing": Wrong(
        "key_mask", "None beside cu_seqlens", "a mask", "leave masked tokens out",
        lambda: packed(WHOLE, WHOLE, key_mask=mask(1, TOKENS)),
    ),
    "mask beside packing in summarize": Wrong(
        "key_mask", "None beside cu_seqlens", "a mask", "leave masked tokens out",
        lambda: af.summarize(ONE, ONE, cu_seqlens_k=WHOLE, key_mask=mask(1, TOKENS)),
    ),
    # Packing
    "packed queries only": Wrong(
        "cu_seqlens_k", "a tensor beside cu_seqlens_q", "None", "pass one twice", lambda: packed(WHOLE, None)
    ),
    "packed keys only": Wrong(
        "cu_seqlens_q", "a tensor beside cu_seqlens_k", "None", "pass one twice", lambda: packed(None, WHOLE)
    ),
    "packing in floats": Wrong(
        "cu_seqlens_q", "an int32 or int64 tensor", "torch.float32", "cast it", lambda: packed(WHOLE.float(), WHOLE)
    ),
    "packing a list": Wrong(
        "cu_seqlens_k", "an int32 or int64 tensor", "list", "cast it", lambda: packed(WHOLE, [0, 6])
    ),
    "packing of two dimensions": Wrong(
        "cu_seqlens_q", "(sequences + 1,)", "(1, 2)", "start it with a zero", lambda: packed(WHOLE[None], WHOLE)
    ),
    "packing of no sequence": Wrong(
        "cu_seqlens_k", "at least one sequence", "(1,)", "start it with a zero",
        lambda: af.summarize(ONE, ONE, cu_seqlens_k=WHOLE[:1]),
    ),
    "packing not from zero": Wrong(
        "cu_seqlens_q", "from 0 up to the 6 tokens of query", "[1, 6]", "cumulative sum",
        lambda: packed(torch.tensor([1, 6]), WHOLE),
    ),
    "packing not to the end": Wrong(
        "cu_seqlens_k", "from 0 up to the 6 tokens of key", "[0, 5]", "cumulative sum",
        lambda: packed(WHOLE, torch.tensor([0, 5])),
    ),
    "packing that falls": Wrong(
        "cu_seqlens_q", "never falling", "[0, 4, 3, 6]", "cumulative sum",
        lambda: af.attend(ONE, STATE, cu_seqlens_q=torch.tensor([0, 4, 3, 6])),
    ),
    "packing of a batch": Wrong(
        "cu_seqlens_k", "key with batch size 1", "2", "end to end", lambda: af.summarize(X, X, cu_seqlens_k=WHOLE)
    ),
    "packing on another device": Wrong(
        "cu_seqlens_q", "the device of query, cpu", "meta", ".to()", lambda: packed(WHOLE.to(META), WHOLE)
    ),
    "packing of different numbers of sequences": Wrong(
        "cu_seqlens_k", "as many sequences as cu_seqlens_q, 1", "2", "repeated number",
        lambda: packed(WHOLE, torch.tensor([0, 3, 6])),
    ),
    "causal packing of different lengths": Wrong(
        "cu_seqlens_k", "the values of cu_seqlens_q for causal attention, [0, 2, 6]", "[0, 3, 6]", "initial_state",
        lambda: packed(torch.tensor([0, 2, 6]), torch.tensor([0, 3, 6]), causal=True),
    ),
    "causal with more keys than queries": Wrong(
        "causal", "as many queries as keys", "3 queries and 6 keys", "initial_state",
        lambda: attention(query=tokens((1, 3)), causal=True),
    ),
    # Rotary tables
    "rotary one table": Wrong(
        "rotary", "a pair (cos, sin)", "Tensor", "rotary_1d", lambda: attention(rotary=TABLES[0])
    ),
    "rotary three tables": Wrong(
        "rotary", "a pair (cos, sin)", "tuple", "rotary_1d", lambda: attention(rotary=(*TABLES, TABLES[0]))
    ),
    "rotary of integers": Wrong(
        "rotary", "a floating-point tensor as sin", "torch.int64", "rotary_1d",
        lambda: attention(rotary=(TABLES[0], TABLES[1].long())),
    ),
    "rotary for other tokens": Wrong(
        "rotary", "cos of shape (tokens, head_dim) = (6, 8)", "(7, 8)", "slice the table",
        lambda: attention(rotary=rotary_1d(7, WIDTH)),
    ),
    "rotary for half the channels": Wrong(
        "rotary", "cos of shape (tokens, head_dim) = (6, 8), that of key", "(6, 4)", "slice the table",
        lambda: af.summarize(X, X, rotary=rotary_1d(TOKENS, 4)),
    ),
    "rotary on another device": Wrong(
        "rotary", "cos on the device of query, cpu", "meta", "move it",
        lambda: attention(rotary=rotary_1d(TOKENS, WIDTH, device=META)),
    ),
    "rotary of an odd width": Wrong(
        "rotary", "an even head width", "3", "in pairs",
        lambda: af.summarize(X[..., :3], X, rotary=(TABLES[0][:, :3], TABLES[1][:, :3])),
    ),
    "rotary for more keys than queries": Wrong(
        "rotary", "as many queries as keys", "3 and 6", "summarize and attend",
        lambda: attention(query=X[:, :3], rotary=TABLES),
    ),
    # States
    "summarize softmax": Wrong(
        "mechanism", "one with a state", "'softmax'", "choose a linear mechanism", lambda: af.summarize(X, X, "softmax")
    ),
    "state of softmax": Wrong(
        "mechanism", "one with a state", "'softmax'", "attention without states",
        lambda: attention(mechanism="softmax", return_state=True),
    ),
    "softmax from a state": Wrong(
        "mechanism", "one with a state", "'softmax'", "attention without states",
        lambda: attention(mechanism="softmax", initial_state=STATE),
    ),
    "state a tuple": Wrong(
        "state", "an affinear.State", "tuple", "summarize makes one", lambda: af.attend(X, (X, X))  # pyright: ignore
    ),
    "initial state a tensor": Wrong(
        "initial_state", "an affinear.State", "Tensor", "summarize makes one", lambda: attention(initial_state=X)
    ),
    "state of another mechanism": Wrong(
        "initial_state", "a state of 'nala'", "one of 'mala'", "one mechanism throughout",
        lambda: attention(mechanism="nala", initial_state=STATE),
    ),
    "initial state of another batch": Wrong(
        "initial_state", "batch size 2", "1", "one entry per sequence",
        lambda: attention(initial_state=af.summarize(ONE, ONE)),
    ),
    "initial state of other sequences": Wrong(
        "initial_state", "batch size 1", "2", "one entry per sequence",
        lambda: packed(WHOLE, WHOLE, initial_state=STATE),
    ),
    "state of another batch": Wrong(
        "state", "batch size 1", "2", "one entry per sequence", lambda: af.attend(ONE, STATE)
    ),
    "state in another dtype": Wrong(
        "state", "torch.float64 statistics for torch.float64 tokens", "torch.float32", ".to(torch.float64)",
        lambda: af.attend(X.double(), STATE),
    ),
    "state in half precision": Wrong(
        "initial_state", "torch.float32 statistics for torch.float16 tokens", "torch.float16", ".to(torch.float32)",
        lambda: attention(query=X.half(), key=X.half(), value=X.half(), initial_state=STATE.to(torch.float16)),
    ),
    "state on another device": Wrong(
        "state", "the device of the tokens, cpu", "meta", ".to()", lambda: af.attend(X, STATE.to(META))
    ),
    "state of other heads": Wrong(
        "initial_state", "4 heads, those of key", "2", "the same layer",
        lambda: attention(initial_state=af.summarize(X[:, :, :2], X[:, :, :2])),
    ),
    "state of heads that do not divide": Wrong(
        "query", "a multiple of the 3 key heads", "4 heads", "equally many",
        lambda: af.attend(X, af.summarize(X[:, :, :3], X[:, :, :3])),
    ),
    "state of another key width": Wrong(
        "state", "features 8 wide, as 'mala' makes them", "4", "one head width",
        lambda: af.attend(X, af.summarize(X[..., :4], X)),
    ),
    "state of another feature width": Wrong(
        "state", "features 16 wide, as 'nala' makes them", "8", "one head width",
        lambda: af.attend(X, af.summarize(X[..., :4], X, "nala")),
    ),
    "state of another value width": Wrong(
        "initial_state", "values 8 wide", "5", "one value width",
        lambda: attention(initial_state=af.summarize(X, X[..., :5])),
    ),
    "state with rotary, call without": Wrong(
        "rotary", "what state was made with, rotary positions", "a call without tables", "pass",
        lambda: af.attend(X, af.summarize(X, X, rotary=TABLES)),
    ),
    "state without rotary, call with": Wrong(
        "rotary", "what initial_state was made with, no rotary positions", "a call with tables", "pass",
        lambda: attention(initial_state=STATE, rotary=TABLES),
    ),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_wrong_call_says(wrong: Wrong):
    with pytest.raises(ValueError, match=rf"^{wrong.argument}: ") as error:
        wrong.call()
    complaint, _, advice = str(error.value).rpartition("; ")
    expected, _, got = complaint.rpartition(" got ")
    assert wrong.expected in expected
    assert wrong.got in got
    assert wrong.advice in advice


def test_the_right_call_says_nothing():
    assert isinstance(attention(), Tensor)
    assert isinstance(packed(WHOLE, WHOLE), Tensor)
    assert isinstance(attention(initial_state=STATE, key_mask=mask(), scale=1), Tensor)


def test_registering_a_mechanism_twice_is_no_mistake():
    assert af.register(MALA) is MALA


def test_the_registry_cannot_be_changed_by_hand():
    with pytest.raises(TypeError):
        af.mechanisms()["mine"] = MALA  # pyright: ignore[reportIndexIssue]
    assert "mine" not in af.mechanisms()


def test_a_long_list_of_lengths_is_shortened():
    wrong = torch.arange(1000)
    with pytest.raises(ValueError, match=r"got \[0, 1, 2, 3, \.\.\., 999\]; "):
        packed(wrong, wrong)


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_every_backend_complains_alike(backend: str):
    messages = []
    for chosen in ("auto", backend):
        with pytest.raises(ValueError, match="value: ") as error:
            attention(value=X[:, :2], backend=chosen)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


@pytest.mark.filterwarnings("ignore")  # torch's about nested tensors
def test_nested_tokens_are_refused_by_every_function():
    nested, plain = torch.nested.nested_tensor([torch.randn(3, 2, 4), torch.randn(5, 2, 4)]), torch.randn(2, 5, 2, 4)
    for call in (
        lambda: af.attention(nested, plain, plain),
        lambda: af.summarize(nested, plain),
        lambda: af.weights(nested, plain),
        lambda: af.attend(nested, af.summarize(plain, plain)),
    ):
        with pytest.raises(ValueError, match="expected a dense tensor, got a nested one"):
            call()
