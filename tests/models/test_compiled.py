"""Networks in `torch.compile`: what a compiler is led to do with them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import timm
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

import affinear.models  # noqa: F401  # pyright: ignore[reportUnusedImport]  # registers the names
from affinear.layers import convolution
from affinear.ops import depthwise
from affinear.ops.triton import backend

needs_kernels = pytest.mark.skipif(
    not (backend.INTERPRETED or torch.cuda.is_available()), reason="needs a GPU, or TRITON_INTERPRET=1"
)
DEVICE = "cpu" if backend.INTERPRETED else "cuda"
SIDES = (64, 96)
# Of all stages but the last: beyond its last convolution a compiler keeps every layout as it is.
MAPS = {(SIDES[0] // stride, SIDES[1] // stride) for stride in (4, 8, 16)}


def kept(network: nn.Module, images: Tensor) -> list[Tensor]:
    """What a compiled forward pass hands to the backward pass, inputs and weights apart; nothing is computed."""
    found: list[Tensor] = []

    def look(graph: Any, inputs: Any) -> Any:
        (out,) = graph.graph.find_nodes(op="output")
        results = [node.meta["val"] for node in out.args[0]]
        found.extend(one for one, node in zip(results, out.args[0], strict=True) if node.op != "placeholder")
        return make_boxed_func(lambda *_: [torch.empty(one.shape) if isinstance(one, Tensor) else 1 for one in results])

    split = aot_autograd(fw_compiler=look, partition_fn=min_cut_rematerialization_partition)  # pyright: ignore
    torch.compiler.reset()
    torch.compile(network, backend=split, fullgraph=True)(images)
    return [one for one in found if isinstance(one, Tensor)]


@needs_kernels
@pytest.mark.parametrize("name", ["mavit_tiny", "nalaformer_xtiny", "mila_tiny"])
def test_no_map_with_its_channels_last_is_kept_as_four_axes(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(convolution, "depthwise", partial(depthwise, backend="triton"))
    network = timm.create_model(name, num_classes=3).to(DEVICE).train()
    shapes = [tuple(one.shape) for one in kept(network, torch.randn(2, 3, *SIDES, device=DEVICE))]
    assert len(shapes) > 50
    assert [shape for shape in shapes if len(shape) == 4 and shape[1:3] in MAPS and shape[3] > 1] == []
