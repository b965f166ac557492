"""The kernels as operators: what torch checks of any operator, compiled graphs, gradients, and what is refused."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._python_dispatch import TorchDispatchMode

import affinear as af
from affinear.ops import rotary_1d
from affinear.ops.triton import library

Randn = Callable[..., Tensor]
Error = Callable[[Tensor, Tensor], float]
Options = dict[str, Any]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTH, WIDTH, VALUES = 5, 8, 16
RULE = ("elu", "one_plus_reciprocal", False, 0.3)
BOUND = 3e-6  # of float32 against float64


def tokens(randn: Randn, length: int = LENGTH, *, batch: int = 1, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Queries of two heads for one key head, keys and values."""
    shapes = (length, 2, WIDTH), (length, 1, WIDTH), (length, 1, VALUES)
    return [randn(batch, *shape).to(DEVICE, dtype) for shape in shapes]


def table(length: int = LENGTH) -> Tensor:
    """Rotary tables as the kernels read them."""
    cos, sin = rotary_1d(length, WIDTH, device=DEVICE)
    return torch.stack((cos[:, ::2], sin[:, ::2]), dim=-1).flatten(1)


def learn(*tensors: Tensor) -> list[Tensor]:
    """Copies that take gradients, of those that can."""
    return [x.detach().clone().requires_grad_(x.is_floating_point()) for x in tensors]


def in_order(state: list[Tensor]) -> list[Tensor]:
    """A state that came out of an operator, as operators take it."""
    return [state[-1], *state[:-1]]


def arguments(name: str, randn: Randn) -> tuple[Any, ...]:
    """A call of an operator with everything that it takes, but for packed sequences."""
    query, key, value = tokens(randn)
    mask, turns = torch.tensor([[True, False, True, True, True]], device=DEVICE), table()
    grad, places = randn(1, LENGTH, 2, VALUES).float().to(DEVICE), (mask, None, turns)
    state = library.OPERATORS["summarize"](key, value, *places, RULE[0])
    one = [x[:, :1] for x in (query, key, value)]
    if name == "turns":
        return *rotary_1d(LENGTH, WIDTH, device=DEVICE), torch.float16
    if name in ("attention", "attention_forward"):
        inputs = learn(query, key, value) if name == "attention" else (query, key, value)
        return *inputs, *places, *RULE, None
    if name == "attention_backward":
        return grad, query, key, value, *places, *RULE, None, state
    if name == "summarize":
        return *learn(key, value), *places, RULE[0]
    if name == "summarize_backward":
        return randn(1, 2 * WIDTH + VALUES + WIDTH * VALUES).float().to(DEVICE), key, value, *places, RULE[0], state
    if name == "attend":
        return *learn(query, *in_order(state)), None, turns, *RULE
    if name == "attend_backward":
        return grad, query, *in_order(state), None, turns, *RULE
    if name == "causal":
        return *learn(query, key, value), *places, *RULE, *learn(*in_order(state))
    call = (query, key, value, *places, *RULE, *in_order(state))
    if name == "causal_forward":
        return call
    if name == "causal_backward":
        return grad, [torch.ones_like(x) for x in state[:-1]], *call, library.OPERATORS["causal_forward"](*call)[1:]
    rest = [torch.zeros_like(x) for x in state[:-1]]
    keep = (True,) if name == "decode" else ()
    return *one, *(x.clone() for x in in_order(state)), *rest, *keep, turns[:1], *RULE  # decode, decode_


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=pytest.mark.exhaustive if x.endswith("ward") else ()) for x in library.SCHEMAS],
)
def test_torch_has_nothing_against_an_operator(name: str, randn: Randn):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the checks themselves
        torch.library.opcheck(library.OPERATORS[name], arguments(name, randn))


@pytest.mark.parametrize("name", ["attention", "causal"])
def test_gradients_are_registered_for_calls_without_any_extras(name: str, randn: Randn):
    rest = (None,) if name == "attention" else (None,) * 5
    call = (*learn(*tokens(randn)), None, None, None, *RULE, *rest)
    torch.library.opcheck(library.OPERATORS[name], call, test_utils="test_autograd_registration")


@pytest.mark.parametrize("name", ["attention_forward", "causal_forward"])
def test_shapes_of_packed_calls_are_known_without_numbers(name: str, randn: Randn):
    bounds = torch.tensor([0, 2, 2, LENGTH], dtype=torch.int32, device=DEVICE)
    rest = (bounds,) if name == "attention_forward" else (None,) * 5
    call = (*tokens(randn), None, bounds, None, *RULE, *rest)
    real = library.OPERATORS[name](*call)
    with FakeTensorMode() as mode:
        fake = library.OPERATORS[name](*(mode.from_tensor(x) if isinstance(x, Tensor) else x for x in call))
    assert [(x.shape, x.dtype, x.stride()) for x in fake] == [(x.shape, x.dtype, x.stride()) for x in real]


def test_tracing_causal_attention_asks_nothing_of_the_length(randn: Randn):
    # Short sequences have no states between segments and long ones many, in one and the same graph.
    env, real = ShapeEnv(), tokens(randn, batch=3)
    fixed, free = DimDynamic.STATIC, DimDynamic.DUCK
    with FakeTensorMode(shape_env=env) as mode:
        inputs = [
            mode.from_tensor(x, symbolic_context=StatelessSymbolicContext(dynamic_sizes=[fixed, free, fixed, fixed]))
            for x in real
        ]
        results = library.OPERATORS["causal_forward"](*inputs, None, None, None, *RULE, *(None,) * 5)
    assert isinstance(results[-1].shape[0], torch.SymInt)
    assert not env.guards


# Compiling


def operate(query: Tensor, key: Tensor, value: Tensor, given: Options) -> Tensor:
    return af.attention(query, key, value, backend="triton", **given)


def in_two_steps(query: Tensor, key: Tensor, value: Tensor, given: Options) -> Tensor:
    state = af.summarize(key, value, backend="triton", **given)
    return af.attend(query, state + state, backend="triton", rotary=given.get("rotary"))


def options(case: str, length: int) -> Options:
    """What a case hands over, by the words of its name."""
    found: Options = {}
    if "causal" in case:
        found["causal"] = True
    if "masked" in case:
        found["key_mask"] = (torch.arange(length, device=DEVICE) % 3 > 0)[None]
    if "rotary" in case:
        found["rotary"] = rotary_1d(length, WIDTH, device=DEVICE)
    if "packed" in case:
        bounds = torch.tensor([0, length // 3, length], dtype=torch.int32, device=DEVICE)
        found["cu_seqlens_q"] = found["cu_seqlens_k"] = bounds
    return found


@pytest.mark.parametrize(
    ("function", "case", "learning"),
    [
        (operate, "plain", False),
        (operate, "rotary masked", True),
        (operate, "packed", True),
        (operate, "causal rotary", False),
        (operate, "causal packed", True),
        (in_two_steps, "masked", False),
        (in_two_steps, "rotary", True),
    ],
)
def test_one_graph_serves_all_lengths(function: Callable[..., Tensor], case: str, learning: bool, randn: Randn):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor" if DEVICE == "cuda" else "aot_eager")
    compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=True)
    for length in (6, 9):
        inputs, given = tokens(randn, length), options(case, length)
        if learning:
            inputs = learn(*inputs)
        out = compiled(*inputs, given)
    truth = function(*inputs, given)
    torch.testing.assert_close(out, truth)
    if learning:
        grads = (torch.autograd.grad(x.square().sum(), inputs) for x in (out, truth))
        torch.testing.assert_close(*grads)
    assert counter.frame_count == 1


# Gradients


class Names(TorchDispatchMode):
    """Collects the names of the library's operators as they run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func.name().partition("::")
        if space == "affinear":
            self.seen.append(name)
        return func(*args, **kwargs or {})


def seen(call: Callable[[], object]) -> list[str]:
    with Names() as names:
        call()
    return names.seen


def test_statistics_are_kept_only_for_gradients(randn: Randn):
    inputs = learn(*tokens(randn))
    with torch.no_grad():
        assert seen(lambda: operate(*inputs, {})) == ["attention"]
        assert seen(lambda: operate(*inputs, {"causal": True})) == ["causal"]
    assert seen(lambda: operate(*(x.detach() for x in inputs), {})) == ["attention"]
    assert seen(lambda: operate(*inputs, {})) == ["attention_forward"]


def final(state: af.State) -> Tensor:
    """A number that depends on all of a state."""
    parts = [state.key_mean, state.value_mean, state.covariance]
    if state.rotated_key_mean is not None:
        parts.append(state.rotated_key_mean)
    return sum((x.sin().sum() for x in parts), start=torch.zeros((), device=DEVICE))


def composed(name: str, query: Tensor, key: Tensor, value: Tensor, given: Options) -> Tensor:
    """A number that depends on all that an operator returns; a state that it takes depends on the tokens too."""
    if name == "attention":
        return af.attention(query, key, value, **given).sin().sum()
    rotary, backend = given.get("rotary"), given["backend"]
    before = af.summarize(key.flip(1), value, rotary=rotary, backend=backend)
    if name == "summarize":
        return final(before)
    if name == "attend":
        return af.attend(query, before, rotary=rotary, backend=backend).sin().sum()
    state_only = name == "final state"
    out, after = af.attention(query, key, value, causal=True, initial_state=before, return_state=True, **given)
    return final(after) if state_only else out.sin().sum() + final(after)


@pytest.mark.parametrize("name", ["attention", "summarize", "attend", "causal", "final state"])
@pytest.mark.parametrize("case", ["plain", "rotary"])
def test_gradients_are_those_of_float64(name: str, case: str, randn: Randn, relative_error: Error):
    given = options(case, LENGTH)
    wide = learn(*tokens(randn, dtype=torch.float64))
    narrow = learn(*(x.float() for x in wide))
    truth = torch.autograd.grad(
        composed(name, *wide, {**given, "backend": "torch"}), wide, allow_unused=True, materialize_grads=True
    )
    grads = torch.autograd.grad(
        composed(name, *narrow, {**given, "backend": "triton"}), narrow, allow_unused=True, materialize_grads=True
    )
    for got, expected in zip(grads, truth, strict=True):
        assert relative_error(got, expected) < BOUND


@pytest.mark.parametrize("case", ["plain", "packed"])
def test_states_between_segments_reach_the_backward_pass(
    case: str, randn: Randn, relative_error: Error, monkeypatch: pytest.MonkeyPatch
):
    calls = importlib.import_module("affinear.ops.triton.causal.calls")
    shape_for = calls.shape_for
    monkeypatch.setattr(calls, "shape_for", lambda *widths: shape_for(*widths[:4], 16))
    given = {**options(case, 24), "causal": True}
    wide = learn(*tokens(randn, 24, dtype=torch.float64))
    narrow = learn(*(x.float() for x in wide))
    bounds = given.get("cu_seqlens_k")
    call = (*narrow, None, bounds, None, *RULE, *(None,) * 5)
    assert library.OPERATORS["causal_forward"](*call)[-1].shape[0] == (2 if case == "plain" else 3)
    out, truth = operate(*narrow, given), af.attention(*wide, **given, backend="torch")
    grads, expected = (torch.autograd.grad(x.sin().sum(), y) for x, y in ((out, narrow), (truth, wide)))
    for got, want in zip((out, *grads), (truth, *expected), strict=True):
        assert relative_error(got, want) < BOUND


def test_only_some_inputs_learn(randn: Randn):
    query, key, value = tokens(randn)
    (value,) = learn(value)
    operate(query, key, value, {}).sum().backward()
    assert value.grad is not None
    # Weights sum to one, so the gradients of all values add up to one for each of the ten queries.
    torch.testing.assert_close(value.grad.sum(), torch.tensor(10.0 * VALUES, device=DEVICE))


def test_a_second_derivative_is_refused_when_it_is_taken(randn: Randn):
    inputs = learn(*tokens(randn))
    grads = torch.autograd.grad(operate(*inputs, {}).square().sum(), inputs, create_graph=True)
    with pytest.raises(RuntimeError, match=r"expected first derivatives of 'triton', got a second.*backend='torch'"):
        grads[0].sum().backward()


def test_many_gradients_at_once_are_refused(randn: Randn):
    inputs = learn(*tokens(randn))
    out = operate(*inputs, {})
    many = torch.ones(2, *out.shape, device=DEVICE)
    with pytest.raises(RuntimeError, match=r"expected gradients one by one of 'triton', got many.*backend='torch'"):
        torch.autograd.grad(out, inputs, many, is_grads_batched=True)


# Strides and sizes


def test_strides_are_read_as_they_are(randn: Randn):
    inputs = tokens(randn)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2)[..., :] for x in inputs]
    strided[2] = torch.stack((strided[2], strided[2]), dim=-1)[..., 0]
    state = library.OPERATORS["summarize"](*inputs[1:], None, None, None, "elu")
    spread = [torch.stack((x, x), dim=-1)[..., 0] for x in state]
    # Compiled, values that do not lie side by side go to other threads, and are summed in another order.
    torch.testing.assert_close(
        operate(*strided, {}), operate(*inputs, {}), rtol=0, atol=1e-6 if DEVICE == "cuda" else 0
    )
    answers = (library.OPERATORS["attend"](inputs[0], *in_order(x), None, None, None, *RULE) for x in (state, spread))
    torch.testing.assert_close(*answers, rtol=0, atol=0)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("batch", "length"), [(0, LENGTH), (1, 0)])
def test_no_tokens_make_no_answers(causal: bool, batch: int, length: int, randn: Randn):
    inputs = learn(*tokens(randn, length, batch=batch))
    out, state = af.attention(*inputs, causal=causal, return_state=True, backend="triton")
    assert out.shape == (batch, length, 2, VALUES)
    assert state.covariance.shape == (batch, 1, WIDTH, VALUES)
    assert not state.count.any()
    (out.sum() + final(state)).backward()
    assert all(x.grad is not None and x.grad.shape == x.shape for x in inputs)


def test_without_keys_answers_are_zero_and_so_are_gradients(randn: Randn):
    query, key, value = tokens(randn)
    inputs = learn(query, key[:, :0], value[:, :0])
    out = operate(*inputs, {})
    assert not out.any()
    out.sum().backward()
    assert inputs[0].grad is not None
    assert not inputs[0].grad.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_tables_are_laid_side_by_side_from_any_strides(dtype: torch.dtype):
    cos, sin = rotary_1d(70, 24, device=DEVICE)
    expected = torch.stack((cos[:, ::2], sin[:, ::2]), dim=-1).flatten(1).to(dtype)
    packed = library.turns(cos.T.contiguous().T, sin.double(), dtype)
    torch.testing.assert_close(packed, expected, rtol=0, atol=0)


def test_writing_over_a_state_is_seen_by_autograd(randn: Randn):
    state = in_order(library.OPERATORS["summarize"](*tokens(randn)[1:], None, None, None, "elu"))
    one = [x[:, :1] for x in tokens(randn)]
    versions = [x._version for x in state]
    library.decode_(*one, *state, None, *[None] * 4, None, *RULE)
    assert [x._version for x in state] == [version + 1 for version in versions]
    assert state[0].item() == LENGTH + 1
