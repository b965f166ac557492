"""Which calls the Triton backend takes, what it says to the others, and that it answers as the torch backend does."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad

import affinear as af
from affinear.ops import rotary_1d, torch_backend
from affinear.ops.triton import backend, library
from affinear.ops.triton.backend import decode

Randn = Callable[..., Tensor]
Error = Callable[[Tensor, Tensor], float]
Options = dict[str, Any]

operator = importlib.import_module("affinear.ops.attention")  # the name in the package is the function's
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LINEAR = [name for name, mechanism in af.mechanisms().items() if mechanism.gain is not None]
LENGTH, WIDTH, VALUES = 6, 8, 16
MALA = af.mechanisms()["mala"]


def tokens(randn: Randn, length: int = LENGTH, *, batch: int = 2, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Queries of two heads for one key head, keys and values."""
    shapes = (length, 2, WIDTH), (length, 1, WIDTH), (length, 1, VALUES)
    return [randn(batch, *shape).to(DEVICE, dtype) for shape in shapes]


def zeros(*, width: int = WIDTH, values: int = VALUES, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Tokens of other widths and types, on the device where the kernels run."""
    return [torch.zeros(1, 2, 1, size, dtype=dtype, device=DEVICE) for size in (width, width, values)]


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """What was found out about this machine is forgotten, before and after."""
    backend._found_lacking.cache_clear()
    monkeypatch.setattr(backend, "_found_lacking", backend._found_lacking.__wrapped__)
    return monkeypatch


# Refusals


def learning_tables() -> tuple[Tensor, Tensor]:
    cos, sin = rotary_1d(2, WIDTH, device=DEVICE)
    return cos.requires_grad_(), sin


def own() -> af.Mechanism:
    return dataclasses.replace(MALA, name="mine", query_map=torch.exp, key_map=torch.exp)


class Unhashable:
    """A feature map that no dictionary takes."""

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __call__(self, x: Tensor) -> Tensor:
        return x.exp()


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "another device": (
        lambda: af.attention(*(x.to("meta") for x in zeros()), backend="triton"),
        "expected CUDA tensors for 'triton', got meta; move them to a GPU",
    ),
    "double precision": (
        lambda: af.attention(*zeros(dtype=torch.float64), backend="triton"),
        "expected float16, bfloat16 or float32 for 'triton', got torch.float64; cast the tokens",
    ),
    "softmax": (
        lambda: af.attention(*zeros(), "softmax", backend="triton"),
        "expected a linear mechanism of affinear's own for 'triton', got 'softmax'; choose one",
    ),
    "a mechanism of one's own": (
        lambda: af.summarize(*zeros()[1:], own(), backend="triton"),
        "expected a linear mechanism of affinear's own for 'triton', got 'mine'; choose one",
    ),
    "a mechanism without a hash": (
        lambda: af.attention(*zeros(), dataclasses.replace(own(), key_map=Unhashable()), backend="triton"),
        "expected a linear mechanism of affinear's own for 'triton', got 'mine'; choose one",
    ),
    "odd heads": (
        lambda: af.attention(*zeros(width=12), backend="triton"),
        "expected heads and values 8, 16, 24 ... 256 wide for 'triton', got 12 and 16; pad them",
    ),
    "wide heads": (
        lambda: af.attend(zeros(width=264)[0], af.summarize(*zeros(width=264)[1:], backend="torch"), backend="triton"),
        "expected heads and values 8, 16, 24 ... 256 wide for 'triton', got 264 and 16; pad them",
    ),
    "odd values": (
        lambda: af.attend(zeros()[0], af.summarize(*zeros(values=3)[1:], backend="torch"), backend="triton"),
        "expected heads and values 8, 16, 24 ... 256 wide for 'triton', got 8 and 3; pad them",
    ),
    "learning tables": (
        lambda: af.attention(*zeros(), rotary=learning_tables(), backend="triton"),
        "expected rotary tables without gradients for 'triton', got tables that need them; detach them",
    ),
    "torch.func": (
        lambda: torch.func.vmap(lambda x: af.attention(x, x, x, backend="triton"))(
            torch.zeros(3, 1, 2, 1, 8, device=DEVICE)
        ),
        "expected a call outside torch.func for 'triton', got one inside; use torch.autograd",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_call_that_cannot_be_served_is_told_why(name: str):
    call, reason = REFUSED[name]
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        call()
    assert str(raised.value) == f"backend: {reason}, or pass backend='torch'"


def test_tangents_are_refused_rather_than_lost():
    query, key, value = zeros()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(query, torch.ones_like(query))
        with pytest.raises(ValueError, match=r"outside torch\.autograd.forward_ad for 'triton', got one inside"):
            af.attention(dual, key, value, backend="triton")


def test_without_triton_the_complaint_says_what_to_install(fresh: pytest.MonkeyPatch):
    fresh.setitem(sys.modules, "triton", None)
    with pytest.raises(
        ValueError, match=r"Triton 3\.6 or newer for 'triton', got none .*'affinear\[triton\]', or pass"
    ):
        af.attention(*zeros(), backend="triton")


def test_an_old_triton_is_refused(fresh: pytest.MonkeyPatch):
    fresh.setattr(importlib.import_module("triton"), "__version__", "3.2.0")
    with pytest.raises(ValueError, match=r"Triton 3\.6 or newer for 'triton', got 3\.2\.0; pip install"):
        af.attention(*zeros(), backend="triton")


def test_an_old_gpu_is_refused(fresh: pytest.MonkeyPatch):
    fresh.setattr(torch.cuda, "is_available", lambda: True)
    fresh.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    fresh.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    fresh.setattr(torch.version, "hip", None)
    assert backend.lacks(0) == "expected an NVIDIA GPU as new as Ampere for 'triton', got Tesla T4; choose another one"


# Choice


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
def test_auto_leaves_the_cpu_to_torch(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object, **__: object) -> None:
        pytest.fail("the kernels were asked")

    for name in ("attention", "summarize", "attend"):
        monkeypatch.setattr(backend, name, refuse)
    state = af.summarize(*zeros()[1:])
    af.attend(zeros()[0], state)
    af.attention(*zeros())


def test_auto_takes_triton_for_what_it_can_serve_on_a_gpu(fresh: pytest.MonkeyPatch):
    fresh.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    with FakeTensorMode():
        served, wide, twice = (torch.empty(1, 2, 1, width, device="cuda") for width in (64, 512, 64))
        assert operator._engine("auto", MALA, served, 64, None) is backend
        assert operator._engine("auto", MALA, wide, 64, None) is torch_backend
        assert operator._engine("auto", af.mechanisms()["softmax"], served, 64, None) is torch_backend
        assert operator._engine("torch", MALA, served, 64, None) is torch_backend
        assert operator._engine("triton", MALA, served, 64, None) is backend
        assert af.attention(served, twice, twice).device.type == "cuda"


# Agreement


def options(case: str, length: int = LENGTH, batch: int = 2) -> Options:
    """What a case hands over, by the words of its name."""
    found: Options = {}
    if "causal" in case:
        found["causal"] = True
    if "masked" in case:
        found["key_mask"] = torch.rand(batch, length, device=DEVICE) < 0.7
    if "rotary" in case:
        found["rotary"] = rotary_1d(length, WIDTH, device=DEVICE)
    if "packed" in case:
        bounds = torch.tensor([0, length // 3, length // 3, length], device=DEVICE)
        found["cu_seqlens_q"] = found["cu_seqlens_k"] = bounds
    return found


def tensors(state: af.State) -> list[Tensor]:
    found: list[Tensor] = []
    dataclasses.replace(state, rest=None).map(lambda x: found.append(x) or x)
    return found


def assert_same(got: af.State, expected: af.State) -> None:
    assert got.mechanism == expected.mechanism
    for x, y in zip(tensors(got), tensors(expected), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mechanism", LINEAR)
def test_every_mechanism_answers_as_with_torch(mechanism: str, randn: Randn, relative_error: Error):
    inputs, given = tokens(randn, batch=1), options("rotary")
    out = af.attention(*inputs, mechanism, **given, backend="triton")
    truth = af.attention(*(x.double() for x in inputs), mechanism, **given, backend="torch")
    assert out.dtype == torch.float32
    assert relative_error(out, truth) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_answers_in_kind(dtype: torch.dtype, randn: Randn, relative_error: Error):
    inputs, given = tokens(randn, batch=1, dtype=dtype), options("rotary")
    out = af.attention(*inputs, **given, backend="triton")
    truth = af.attention(*(x.double() for x in inputs), **given, backend="torch")
    assert out.dtype == dtype
    assert relative_error(out, truth) < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("case", ["plain", "masked", "packed rotary", "causal masked", "causal packed rotary"])
@pytest.mark.parametrize("with_states", [False, True], ids=["alone", "with states"])
def test_every_form_agrees_with_torch(case: str, with_states: bool, randn: Randn):
    batch = 1 if "packed" in case else 2
    inputs, given = tokens(randn, batch=batch), options(case, batch=batch)
    given["scale"] = 0.4
    if not with_states:
        answers = (af.attention(*inputs, **given, backend=name) for name in ("triton", "torch"))
        return torch.testing.assert_close(*answers, rtol=1e-5, atol=1e-5)
    number = 3 if "packed" in case else batch
    past = tokens(randn, 4, batch=number)
    given["initial_state"] = af.summarize(*past[1:], rotary=options(case, 4).get("rotary"), backend="torch")
    got, expected = (af.attention(*inputs, **given, return_state=True, backend=name) for name in ("triton", "torch"))
    torch.testing.assert_close(got[0], expected[0], rtol=1e-5, atol=1e-5)
    return assert_same(got[1], expected[1])


@pytest.mark.parametrize("case", ["plain", "masked rotary"])
def test_summarize_and_attend_agree_with_torch(case: str, randn: Randn):
    query, key, value = tokens(randn)
    given = options(case)
    got, expected = (af.summarize(key, value, **given, backend=name) for name in ("triton", "torch"))
    assert_same(got, expected)
    rotary = given.get("rotary")
    answers = (af.attend(query, got, rotary=rotary, backend=name) for name in ("triton", "torch"))
    torch.testing.assert_close(*answers, rtol=1e-5, atol=1e-5)


def test_a_state_may_be_expanded(randn: Randn):
    query, key, value = tokens(randn)
    state = af.summarize(key[:1], value[:1], backend="torch").map(lambda x: x.expand(2, *x.shape[1:]))
    answers = (af.attend(query, state, backend=name) for name in ("triton", "torch"))
    torch.testing.assert_close(*answers, rtol=1e-5, atol=1e-5)


def test_autocast_changes_nothing(randn: Randn):
    inputs = tokens(randn, batch=1)
    plain = af.attention(*inputs, backend="triton")
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        out = af.attention(*inputs, backend="triton")
    torch.testing.assert_close(out, plain, rtol=0, atol=0)


# Decoding


@pytest.mark.parametrize("in_place", [False, True], ids=["anew", "in place"])
@pytest.mark.parametrize("case", ["plain", "rotary"])
def test_decoding_is_causal_attention_one_token_at_a_time(case: str, in_place: bool, randn: Randn):
    inputs, given = tokens(randn, 4), options(case, 4)
    whole, end = af.attention(*inputs, causal=True, **given, return_state=True, backend="torch")
    rotary = given.get("rotary")
    first = None if rotary is None else (rotary[0][:2], rotary[1][:2])
    state = af.summarize(*(x[:, :2] for x in inputs[1:]), rotary=first, backend="torch")
    for i in (2, 3):
        here = None if rotary is None else (rotary[0][i : i + 1], rotary[1][i : i + 1])
        before = state
        out, state = decode(*(x[:, i : i + 1] for x in inputs), state, rotary=here, in_place=in_place)
        assert (state.covariance is before.covariance) == in_place
        assert state.rest is not None
        assert state.rest[2] is None
        torch.testing.assert_close(out, whole[:, i : i + 1], rtol=1e-5, atol=1e-5)
    assert_same(state, end)


def test_attention_over_one_token_is_decoded(randn: Randn, monkeypatch: pytest.MonkeyPatch):
    calls: list[str] = []
    for name in ("decode", "causal"):
        run = getattr(library, name)
        monkeypatch.setattr(library, name, lambda *args, name=name, run=run: calls.append(name) or run(*args))
    query, key, value = tokens(randn, 1)
    state = af.summarize(key, value, backend="torch")
    given: Options = {"causal": True, "initial_state": state, "return_state": True}
    got, expected = (af.attention(query, key, value, **given, backend=name) for name in ("triton", "torch"))
    torch.testing.assert_close(got[0], expected[0], rtol=1e-5, atol=1e-5)
    assert_same(got[1], expected[1])
    af.attention(query.requires_grad_(), key, value, **given, backend="triton")
    assert calls == ["decode", "causal"]


def test_decoding_says_what_is_wrong():
    one = [x[:, :1] for x in zeros()]
    state = af.summarize(*one[1:], backend="torch")
    with pytest.raises(ValueError, match="query: expected one token per sequence, got 2; call affinear"):
        decode(*zeros(), state)
    with pytest.raises(
        ValueError, match=r"query: expected float16, .* got torch.float64; .*, or call affinear.attention"
    ):
        decode(*(x.double() for x in one), state.to(torch.float64))
    with pytest.raises(ValueError, match="state: expected values 8 wide, got 16"):
        decode(one[0], one[1], one[2][..., :8], state)
    with pytest.raises(
        ValueError, match=r"query: expected tokens and a state that need no gradient, .* torch\.no_grad"
    ):
        decode(one[0].clone().requires_grad_(), *one[1:], state)
    with pytest.raises(ValueError, match="state: expected contiguous tensors to write to, got strided ones; pass"):
        decode(*one, state.map(lambda x: torch.stack((x, x), dim=-1)[..., 0]), in_place=True)
    with pytest.raises(ValueError, match=r"state: expected an affinear\.State, got NoneType"):
        decode(*one, None)


# Heads that turn differently


@pytest.mark.parametrize("options", ["plain", "causal", "masked", "state"])
def test_heads_that_turn_differently_are_served(options: str, randn: Randn, relative_error: Error):
    query, key, value = (randn(2, 19, 3, WIDTH).to(DEVICE) for _ in range(3))
    angle = randn(19, 3, WIDTH // 2).repeat_interleave(2, dim=-1).to(DEVICE)
    tables = angle.cos(), angle.sin()
    given: Options = {
        "plain": {},
        "causal": {"causal": True},
        "masked": {"key_mask": torch.arange(19, device=DEVICE).expand(2, -1) % 3 > 0},
        "state": {"return_state": True, "initial_state": af.summarize(key, value, "mala", rotary=tables)},
    }[options]
    truth: Any = af.attention(query, key, value, "mala", rotary=tables, backend="reference", **given)
    if options == "state":
        given["initial_state"] = given["initial_state"].to(torch.float32)
    leaves = [x.float().requires_grad_(options != "state") for x in (query, key, value)]
    out: Any = af.attention(*leaves, "mala", rotary=tables, backend="triton", **given)
    if options == "state":
        assert relative_error(out[1].covariance, truth[1].covariance) <= 2e-6
        assert (
            relative_error(
                af.attend(leaves[0], out[1], rotary=tables, backend="triton"), af.attend(query, truth[1], rotary=tables)
            )
            <= 2e-6
        )
        out, truth = out[0], truth[0]
    else:
        exact = [x.clone().requires_grad_() for x in (query, key, value)]
        expected = af.attention(*exact, "mala", rotary=tables, backend="reference", **given)
        for ours, theirs in zip(
            torch.autograd.grad(out.square().sum(), leaves),
            torch.autograd.grad(expected.square().sum(), exact),
            strict=True,
        ):
            assert relative_error(ours, theirs) <= 5e-6
    assert relative_error(out, truth) <= 2e-6


def test_decoding_refuses_tables_of_each_head(randn: Randn):
    token = randn(1, 1, 2, WIDTH).float().to(DEVICE)
    tables = torch.ones(1, 2, WIDTH, device=DEVICE), torch.zeros(1, 2, WIDTH, device=DEVICE)
    state = af.summarize(token, token, rotary=tables)
    with pytest.raises(ValueError, match="rotary: expected one table for all heads to decode with, got one for each"):
        decode(token, token, token, state, rotary=tables)
