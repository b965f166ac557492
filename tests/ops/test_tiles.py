"""Working tile by tile changes the memory and the speed, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import affinear as af
from affinear.ops import rotary_1d, tiles
from affinear.ops.layout import CHUNK
from affinear.ops.mechanisms import reciprocal

LENGTH = 3 * CHUNK + 17  # three whole tiles and a piece
NAMES = ["linear", "relu", "focused", "inline", "mala", "nala", "nala_cosine", "mala_released", "nala_released"]


@pytest.fixture(autouse=True)
def smallest_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "CPU_TILE", 1)


Tokens = tuple[Tensor, Tensor, Tensor]


def tokens(dtype: torch.dtype = torch.float64, batch: int = 2, length: int = LENGTH) -> Tokens:
    query = torch.randn(batch, length, 4, 8, dtype=dtype).requires_grad_()
    key = torch.randn(batch, length, 2, 8, dtype=dtype).requires_grad_()
    return query, key, torch.randn(batch, length, 2, 5, dtype=dtype).requires_grad_()


def changed(inputs: Tokens, function: Callable[[Tensor], Tensor]) -> Tokens:
    query, key, value = (function(x.detach()) for x in inputs)
    return query, key, value


def options(case: str, name: str) -> dict[str, Any]:
    if case == "masked":
        mask = torch.rand(2, LENGTH) < 0.6
        mask[1, :70] = False  # a whole tile that nobody sees
        return {"key_mask": mask}
    if case == "rotary":
        return {"rotary": rotary_1d(LENGTH, 8)}
    if case == "continued":
        key, value = torch.randn(2, 30, 2, 8, dtype=torch.float64), torch.randn(2, 30, 2, 5, dtype=torch.float64)
        state = af.summarize(key, value, name)
        return {"initial_state": state.map(lambda x: x.requires_grad_() if x.is_floating_point() else x)}
    return {}


def differentiate(inputs: Tokens, **call: Any) -> list[Tensor]:
    """Answers, state and gradients of a call, with a gradient coming into every output."""
    out, state = af.attention(*inputs, return_state=True, **call)
    outputs = [out, state.key_mean, state.value_mean, state.covariance]
    cotangents = [torch.cos(torch.arange(x.numel(), dtype=x.dtype)).view_as(x) for x in outputs]
    start = call.get("initial_state")
    leaves = [*inputs, *([] if start is None else [start.key_mean, start.value_mean, start.covariance])]
    return [*outputs, *torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True, materialize_grads=True)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("case", ["plain", "masked", "rotary", "continued"])
def test_tiles_give_what_the_whole_gives(name: str, causal: bool, case: str, monkeypatch: pytest.MonkeyPatch):
    inputs, call = tokens(), {"mechanism": name, "causal": causal, **options(case, name)}
    if case == "rotary" and name in ("relu", "focused", "nala"):
        # z = 0 below rotated scores has no well-posed answer.
        inputs = changed(inputs, lambda x: x.abs().requires_grad_())
    by_tiles = differentiate(inputs, **call)
    monkeypatch.setattr(tiles, "CPU_TILE", 2**40)
    for tiled, whole in zip(by_tiles, differentiate(inputs, **call), strict=True):
        assert (tiled - whole).norm() <= 1e-11 * whole.norm() + 1e-13


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("continued", [False, True], ids=["alone", "continued"])
def test_second_derivatives_pass_through_tiles(causal: bool, continued: bool, monkeypatch: pytest.MonkeyPatch):
    query, key, value = inputs = tokens(batch=1, length=2 * CHUNK)

    def penalty() -> tuple[Tensor, ...]:
        # A state made of the same keys: their gradient has two ways back, and neither may be counted twice.
        before = af.summarize(key[:, :40], value[:, :40]) if continued else None
        out = af.attention(query, key, value, causal=causal, initial_state=before)
        first = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
        return *first, *torch.autograd.grad(torch.stack([x.square().sum() for x in first]).sum(), inputs)

    by_tiles = penalty()
    monkeypatch.setattr(tiles, "CPU_TILE", 2**40)
    for tiled, whole in zip(by_tiles, penalty(), strict=True):
        torch.testing.assert_close(tiled, whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_half_precision_keeps_its_dtype_through_tiles(dtype: torch.dtype, causal: bool):
    inputs = tokens(dtype)
    out = af.attention(*inputs, causal=causal)
    out.sum().backward()
    exact = af.attention(*changed(inputs, Tensor.double), causal=causal, backend="reference")
    assert out.dtype == dtype
    assert all(x.grad is not None and x.grad.dtype == dtype for x in inputs)
    assert (out - exact).norm() <= torch.finfo(dtype).eps * exact.norm()


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_parameters_inside_a_feature_map_get_their_gradient(causal: bool):
    projection = nn.Linear(8, 12, dtype=torch.float64)

    def learned(x: Tensor) -> Tensor:
        return projection(x).exp()

    mechanism = af.Mechanism("learned", learned, learned, reciprocal, nonnegative=True, paper="this test")
    inputs = tokens()
    grads: dict[str, Tensor] = {}
    for backend in ("torch", "reference"):
        out = af.attention(*inputs, mechanism, causal=causal, backend=backend)
        (grads[backend],) = torch.autograd.grad(out.square().sum(), projection.weight)
    assert (grads["torch"] - grads["reference"]).norm() <= 1e-11 * grads["reference"].norm()


def test_learned_rotary_tables_get_their_gradient():
    cos, sin = (table.double().requires_grad_() for table in rotary_1d(LENGTH, 8))
    af.attention(*tokens(), rotary=(cos, sin)).square().sum().backward()
    assert cos.grad is not None
    assert cos.grad.abs().max() > 0


def test_inference_keeps_nothing_for_a_backward_pass():
    inputs = tokens()
    with torch.no_grad():
        assert not af.attention(*inputs, causal=True).requires_grad
    assert af.attention(*changed(inputs, Tensor.clone), causal=True).grad_fn is None
