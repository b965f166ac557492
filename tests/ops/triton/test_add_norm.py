"""The pass that is a sum and its norm, judged by torch's own in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs

from affinear.ops import add_norm
from affinear.ops.triton import adding

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COMPILED = not knobs.runtime.interpret
pytestmark = pytest.mark.skipif(COMPILED and DEVICE == "cpu", reason="needs a GPU, or TRITON_INTERPRET=1")
HALF = torch.bfloat16 if COMPILED else torch.float16  # the interpreter cuts bfloat16 off
Dtypes = tuple[torch.dtype, torch.dtype, torch.dtype]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch):
    """Several blocks of rows for every program that walks over them, even of few rows."""
    monkeypatch.setattr(adding, "HELD", 128)
    monkeypatch.setattr(adding, "SHARES", 3)


def arguments(*shape: int, dtypes: Dtypes = (torch.float32,) * 3) -> list[Tensor]:
    """Two tensors, a weight, a bias; and gradients of the sum and of its norm."""
    x, other, *grads = torch.randn(4, *shape, device=DEVICE).unbind()
    weight, bias = torch.randn(2, shape[-1], device=DEVICE).to(dtypes[2]).unbind()
    return [x.to(dtypes[0]) + 3, other.to(dtypes[1]), weight, bias, *grads]


def outcome(given: list[Tensor], backend: str, dtype: torch.dtype | None = None) -> list[Tensor]:
    """The sum, its norm and all gradients."""
    leaves = [x.to(dtype or x.dtype).detach().requires_grad_() for x in given[:4]]
    outs = add_norm(*leaves, eps=1e-3, backend=backend)  # pyright: ignore[reportArgumentType]
    grads = [grad.to(out.dtype) for grad, out in zip(given[4:], outs, strict=True)]
    return [*outs, *torch.autograd.grad(outs, leaves, grads)]


@pytest.mark.parametrize("shape", [(2, 9, 24), (40, 8), (1, 130), (3, 1), (4, 1, 64)])
def test_results_and_gradients_are_torchs(shape: tuple[int, ...]):
    given = arguments(*shape)
    for ours, theirs in zip(outcome(given, "triton"), outcome(given, "torch", torch.float64), strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).norm() < 1e-6 * max(theirs.norm(), 1)


@pytest.mark.parametrize(
    "dtypes", [(HALF, HALF, HALF), (HALF, HALF, torch.float32), (HALF, torch.float32, torch.float32), (torch.half,) * 3]
)
def test_half_precision_is_as_torch_rounds_it(dtypes: Dtypes):
    given = arguments(50, 24, dtypes=dtypes)
    ours, theirs, exact = outcome(given, "triton"), outcome(given, "torch"), outcome(given, "torch", torch.float64)
    assert torch.equal(ours[0], theirs[0])
    for one, other, truth in zip(ours, theirs, exact, strict=True):
        assert one.dtype == other.dtype
        assert (one - truth).norm() <= 1.5 * (other - truth).norm() + 1e-6 * truth.norm()


def test_a_norm_is_of_the_sum_as_it_was_rounded():
    x, other, weight, bias, *_ = arguments(20, 16, dtypes=(HALF, HALF, torch.float32))
    total, normed = add_norm(x, other, weight, bias, backend="triton")
    assert torch.equal(add_norm(total, torch.zeros_like(total), weight, bias, backend="triton")[1], normed)


def test_rows_are_alike_in_any_company():
    x, other, weight, bias, *_ = arguments(30, 16)
    whole = add_norm(x, other, weight, bias, backend="triton")
    some = add_norm(x[7:12], other[7:12], weight, bias, backend="triton")
    assert all(torch.equal(a[7:12], b) for a, b in zip(whole, some, strict=True))


def test_what_lies_apart_is_read_as_what_lies_together():
    x, other, weight, bias, *_ = arguments(6, 5, 16)
    turned = [tensor.transpose(0, 1) for tensor in (x, other)]
    ours = add_norm(*turned, weight, bias, backend="triton")
    theirs = add_norm(*(tensor.contiguous() for tensor in turned), weight, bias, backend="triton")
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_weights_that_lie_apart_are_read_as_those_that_lie_together():
    given = arguments(6, 16)
    apart = [*given[:2], *torch.stack(given[2:4], 1).unbind(1), *given[4:]]
    assert all(map(torch.equal, outcome(apart, "triton"), outcome(given, "triton")))


def test_gradients_come_out_the_same_every_time():
    given = arguments(40, 16)
    assert all(map(torch.equal, outcome(given, "triton"), outcome(given, "triton")))


@pytest.mark.parametrize("chosen", [0, 1], ids=["the sum", "the norm"])
def test_a_gradient_of_one_result_alone_is_enough(chosen: int):
    given = arguments(10, 16)

    def gradients(backend: str) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in given[:4]]
        out = add_norm(*leaves, backend=backend)[chosen]  # pyright: ignore[reportArgumentType]
        return list(torch.autograd.grad(out, leaves[: 2 + 2 * chosen], given[4]))

    for ours, theirs in zip(gradients("triton"), gradients("torch"), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_under_autocast_the_norm_is_what_a_linear_layer_takes(backend: str):
    x, other, weight, bias, *_ = arguments(10, 16, dtypes=(HALF, torch.float32, torch.float32))
    with torch.autocast(DEVICE, HALF):
        total, normed = add_norm(x, other, weight, bias, backend=backend)
    assert (total.dtype, normed.dtype) == (torch.float32, HALF)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_under_autocast_narrow_weights_serve_wide_tokens(backend: str):
    x, other, weight, bias, *_ = arguments(10, 16, dtypes=(torch.float32, torch.float32, HALF))
    wide = add_norm(x, other, weight.float(), bias.float(), backend="torch")[1]
    with torch.autocast(DEVICE, HALF):
        normed = add_norm(x, other, weight, bias, backend=backend)[1]
    torch.testing.assert_close(normed, wide.to(HALF), rtol=2 * torch.finfo(HALF).eps, atol=1e-3)


def test_an_empty_batch_has_an_empty_sum_and_norm():
    _, _, weight, bias, *_ = arguments(1, 16)
    nothing = torch.empty(0, 16, device=DEVICE)
    assert [x.shape for x in add_norm(nothing, nothing, weight, bias, backend="triton")] == [(0, 16)] * 2


def test_second_derivatives_and_gradients_of_many_are_refused():
    leaves: Any = [x.requires_grad_() for x in arguments(4, 8)[:4]]
    _, normed = add_norm(*leaves, backend="triton")
    with pytest.raises(RuntimeError, match="expected first derivatives"):
        torch.autograd.grad(normed.square().sum(), leaves, create_graph=True)
    _, normed = add_norm(*leaves, backend="triton")
    with pytest.raises(RuntimeError, match="expected gradients one by one"):
        torch.autograd.grad(normed, leaves, torch.ones(2, *normed.shape, device=DEVICE), is_grads_batched=True)


class Watching(TorchDispatchMode):
    """Sees every operation of torch, as those who count them do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Listening(TorchFunctionMode):
    """Sees every call of torch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_who_watches_operations_sees_torchs_own():
    given: Any = arguments(3, 8)[:4]
    with Watching(), pytest.raises(ValueError, match="expected plain tensors and no dispatch mode"):
        add_norm(*given, backend="triton")
    with Listening():
        add_norm(*given, backend="triton")
    with Watching():
        add_norm(*given)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": torch.zeros(())}, "x: expected channels on its last axis, got a number"),
        ({"other": torch.zeros(3, 8)}, r"other: expected \(2, 8\) on .*, as x has, got \(3, 8\)"),
        ({"bias": torch.zeros(3)}, r"bias: expected \(8,\) on .*, got \(3,\)"),
        ({"weight": torch.zeros(8).half()}, "weight: expected torch.float32, and bias the same, got torch.float16"),
        ({"backend": "cuda"}, "backend: expected 'auto', 'torch' or 'triton', got 'cuda'"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, object], message: str):
    names = {"x": (2, 8), "other": (2, 8), "weight": (8,), "bias": (8,)}
    given: dict[str, object] = {name: torch.zeros(shape) for name, shape in names.items()} | changed
    given |= {name: tensor.to(DEVICE) for name, tensor in given.items() if isinstance(tensor, Tensor)}
    with pytest.raises(ValueError, match=message):
        add_norm(**given)  # pyright: ignore[reportArgumentType]


def test_what_the_kernels_cannot_serve_is_told_and_left_to_torch():
    wide: Any = arguments(1, 5000)[:4]
    with pytest.raises(ValueError, match=r"expected up to 4096 channels .* got 5000; pass backend='torch'"):
        add_norm(*wide, backend="triton")
    assert add_norm(*wide)[1].shape == (1, 5000)
    with pytest.raises(ValueError, match=r"got torch\.float64"):
        add_norm(*(x.double() for x in wide), backend="triton")  # pyright: ignore[reportArgumentType]
