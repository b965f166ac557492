"""The pass that is a depthwise convolution, judged by torch's own in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from triton import knobs

from affinear.ops import depthwise
from affinear.ops.triton import convolving

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COMPILED = not knobs.runtime.interpret
pytestmark = pytest.mark.skipif(COMPILED and DEVICE == "cpu", reason="needs a GPU, or TRITON_INTERPRET=1")
ADDITIONS = {"alone": (False, False, False), "itself": (True, False, False), "gated": (False, True, True)}
Arguments = dict[str, Tensor]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch):
    """The interpreter takes a program at a time: few of them then, which walk on as those of large maps do."""
    monkeypatch.setattr(convolving, "span_of", convolving.span_of.__wrapped__)
    monkeypatch.setattr(convolving, "PROGRAMS", 4)
    monkeypatch.setattr(convolving, "SHARES", 2)


@pytest.fixture
def arguments() -> Callable[..., Arguments]:
    """Fresh maps, of which the last two lie inside wider ones; a kernel and a bias."""

    def make(side: int, channels: int = 24, size: tuple[int, int] = (5, 6), dtype: torch.dtype = torch.float32):
        x, grad = torch.randn(2, 2, *size, channels, device=DEVICE).to(dtype).unbind()
        added, gate = torch.randn(2, *size, 2, channels, device=DEVICE).to(dtype).unbind(3)
        weight, bias = torch.randn(channels, 1, side, side, device=DEVICE), torch.randn(channels, device=DEVICE)
        return {"x": x, "weight": weight, "bias": bias, "added": added, "gate": gate, "grad": grad}

    return make


def outcome(given: Arguments, additions: str, backend: str, dtype: torch.dtype | None = None) -> list[Tensor]:
    """The result and all gradients."""
    itself, added, gated = ADDITIONS[additions]
    names = ["x", "weight", "bias", *(["added"] if added else []), *(["gate"] if gated else [])]
    leaves = {name: given[name].to(dtype or given[name].dtype).detach().requires_grad_() for name in names}
    out = depthwise(**leaves, itself=itself, backend=backend)  # pyright: ignore[reportArgumentType]
    return [out, *torch.autograd.grad(out, list(leaves.values()), given["grad"].to(out.dtype))]


@pytest.mark.parametrize(
    ("side", "additions"),
    [
        (3, "gated"),
        (5, "itself"),
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in ((3, "alone"), (3, "itself"), (5, "gated"))),
    ],
)
def test_results_and_gradients_are_torchs(arguments: Callable[..., Arguments], side: int, additions: str):
    given = arguments(side)
    for ours, theirs in zip(
        outcome(given, additions, "triton"), outcome(given, additions, "torch", torch.float64), strict=True
    ):
        assert ours.shape == theirs.shape
        assert (ours - theirs).norm() < 1e-6 * theirs.norm()


@pytest.mark.parametrize(
    ("size", "channels"),
    [((1, 1), 8), *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in (((2, 17), 40), ((19, 3), 72)))],
)
def test_any_size_of_map_is_served(arguments: Callable[..., Arguments], size: tuple[int, int], channels: int):
    given = arguments(3, channels, size)
    for ours, theirs in zip(
        outcome(given, "itself", "triton"), outcome(given, "itself", "torch", torch.float64), strict=True
    ):
        assert (ours - theirs).norm() < 1e-6 * theirs.norm()


@pytest.mark.exhaustive
def test_half_precision_rounds_once(arguments: Callable[..., Arguments]):
    given = arguments(3, dtype=torch.float16)
    ours, exact = outcome(given, "gated", "triton"), outcome(given, "gated", "torch", torch.float64)
    for one, other in zip(ours[:2], exact[:2], strict=True):
        assert one.dtype == torch.float16
        assert (one - other).norm() < 2.0**-11 * other.norm()


def test_a_bias_that_lies_apart_is_read_as_one_that_lies_together(arguments: Callable[..., Arguments]):
    given = arguments(3)
    apart = {**given, "bias": torch.stack([given["bias"], torch.randn_like(given["bias"])], 1)[:, 0]}
    assert not apart["bias"].is_contiguous()
    assert all(map(torch.equal, outcome(apart, "gated", "triton"), outcome(given, "gated", "triton")))


def test_an_image_is_served_alike_in_any_batch(arguments: Callable[..., Arguments]):
    given = arguments(3)
    whole = convolving.convolve(given["x"], given["weight"], given["bias"], itself=True)
    alone = convolving.convolve(given["x"][1:2], given["weight"], given["bias"], itself=True)
    assert torch.equal(whole[1:2], alone)


def test_gradients_of_the_kernel_come_out_the_same_every_time(arguments: Callable[..., Arguments]):
    given = arguments(3)
    first, second = (convolving.taps_gradient(given["grad"], given["x"], given["weight"]) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": torch.zeros(2, 3, 8)}, r"x: expected maps \(B, H, W, C\), got \(2, 3, 8\)"),
        ({"weight": torch.zeros(8, 1, 3, 5)}, r"weight: expected \(8, 1, K, K\), K odd, for 8 channels, got"),
        ({"bias": torch.zeros(3)}, r"bias: expected \(8,\), got \(3,\)"),
        ({"gate": torch.zeros(1, 2, 2, 8, dtype=torch.half)}, r"gate: expected .* as x, got .* in torch.float16"),
        ({"backend": "cudnn"}, r"backend: expected 'auto', 'torch' or 'triton', got 'cudnn'"),
        (
            {"weight": torch.zeros(8, 1, 9, 9), "backend": "triton"},
            r"backend: expected kernels .* pass backend='torch'",
        ),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, object], message: str):
    given: dict[str, object] = {"x": torch.zeros(1, 2, 2, 8), "weight": torch.zeros(8, 1, 3, 3)} | changed
    given |= {name: tensor.to(DEVICE) for name, tensor in given.items() if isinstance(tensor, Tensor)}
    with pytest.raises(ValueError, match=message):
        depthwise(**given)  # pyright: ignore[reportArgumentType]
