"""Passes of networks at real sizes, and a compiled network: as good as torch's own in the same dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from affinear.models import MAViT
from affinear.ops import add_norm, depthwise

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
Size = Callable[[int, int], int]


def relative_error(these: list[Tensor], truth: list[Tensor]) -> float:
    """Of all together."""
    pairs = list(zip(these, truth, strict=True))
    error = sum((a.double() - b.double()).square().sum().item() for a, b in pairs)
    return (error / sum(b.double().square().sum().item() for _, b in pairs)) ** 0.5


@pytest.mark.parametrize("gated", [False, True], ids=["itself", "gated"])
@pytest.mark.parametrize(("side", "length", "channels"), [(3, 56, 64), (3, 13, 224), (5, 28, 128), (5, 7, 512)])
def test_depthwise_passes_and_all_their_gradients(side: int, length: int, channels: int, gated: bool, size: Size):
    length, channels = size(length, 3), size(channels, 16)
    x, added, gate, grad = torch.randn(4, size(8, 1), length, length, channels, device=DEVICE).bfloat16().unbind()
    weight, bias = torch.randn(channels, 1, side, side, device=DEVICE) / side, torch.randn(channels, device=DEVICE)

    def outcome(backend: str, dtype: torch.dtype | None) -> list[Tensor]:
        leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in (x, weight, bias, added, gate)]
        more = {"added": leaves[3], "gate": leaves[4]} if gated else {"itself": True}
        out = depthwise(*leaves[:3], **more, backend=backend)  # pyright: ignore[reportArgumentType]
        return [out, *torch.autograd.grad(out, leaves if gated else leaves[:3], grad.to(out.dtype))]

    truth = outcome("torch", torch.float64)
    for ours, theirs, exact in zip(outcome("triton", None), outcome("torch", None), truth, strict=True):
        assert ours.dtype == theirs.dtype
        bound = relative_error([theirs], [exact])
        assert relative_error([ours], [exact]) <= 2 * bound + torch.finfo(torch.float32).eps


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("length", "channels"), [(56, 64), (13, 224), (7, 512), (4, 1536)])
def test_sums_and_their_norms_and_all_their_gradients(length: int, channels: int, weights: torch.dtype, size: Size):
    length, channels = size(length, 3), size(channels, 16)
    x, other, *grads = torch.randn(4, size(8, 1), length, length, channels, device=DEVICE).bfloat16().unbind()
    weight, bias = torch.randn(2, channels, device=DEVICE).to(weights).unbind()

    def outcome(backend: str, dtype: torch.dtype | None) -> list[Tensor]:
        leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in (x, other, weight, bias)]
        outs = add_norm(*leaves, backend=backend)  # pyright: ignore[reportArgumentType]
        given = [grad.to(out.dtype) for grad, out in zip(grads, outs, strict=True)]
        return [*outs, *torch.autograd.grad(outs, leaves, given)]

    truth = outcome("torch", torch.float64)
    for ours, theirs, exact in zip(outcome("triton", None), outcome("torch", None), truth, strict=True):
        assert ours.dtype == theirs.dtype
        bound = relative_error([theirs], [exact])
        assert relative_error([ours], [exact]) <= 2 * bound + torch.finfo(torch.float32).eps


@pytest.mark.skipif(not CUDA, reason="what differs is what a compiler of kernels makes of it")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_network_is_as_good_as_an_eager_one(backend: str):
    widths: dict[str, Any] = {"embed_dims": (32, 64, 96, 128), "num_heads": (1, 1, 1, 2), "depths": (1, 1, 1, 1)}
    network = MAViT(num_classes=10, projection=64, **widths).to(DEVICE)
    images = torch.randn(4, 3, 96, 96, device=DEVICE)

    def outcome(run: nn.Module, dtype: torch.dtype | None) -> tuple[list[Tensor], list[Tensor]]:
        network.zero_grad(set_to_none=True)
        with torch.autocast(DEVICE, dtype or torch.bfloat16, enabled=dtype is not None):
            out = run(images if dtype is not None else images.double())
        out.double().square().sum().backward()
        return [out.detach()], [p.grad.clone() for p in network.parameters() if p.grad is not None]

    torch.compiler.reset()
    network.eval()  # no path is dropped
    compiled: Any = torch.compile(network, backend=backend, dynamic=False)
    ours, theirs = outcome(compiled, torch.bfloat16), outcome(network, torch.bfloat16)
    network.double()
    truth = outcome(network, None)
    for one, other, exact in zip(ours, theirs, truth, strict=True):
        assert len(one) == len(exact) > 0
        assert relative_error(one, exact) <= 2 * relative_error(other, exact)
