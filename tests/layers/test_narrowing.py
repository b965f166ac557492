"""Weights that are cast at once are those that autocast casts one by one."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from affinear.layers import DepthwiseConv
from affinear.layers.narrowing import with_narrow_weights


class Network(nn.Module):
    """Layers whose weights autocast casts, and one whose weights it is not to see."""

    def __init__(self, at_once: bool) -> None:
        super().__init__()
        self.at_once = at_once
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)
        self.conv = DepthwiseConv(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Maps of the same size."""
        return with_narrow_weights(self, lambda: self.run(x), x) if self.at_once else self.run(x)

    def run(self, x: Tensor) -> Tensor:
        """What the network does."""
        return self.conv(self.second(self.first(x).relu()))


def outcome(network: Network, x: Tensor, seen: Counter[str]) -> list[Tensor]:
    """Result and gradients of the compiled network under autocast, and which operations that took."""

    def count(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        seen.update(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    torch.compiler.reset()
    compiled = torch.compile(network, backend=aot_autograd(fw_compiler=count, bw_compiler=count), fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = compiled(x)
    out.float().square().sum().backward()
    return [out.detach(), *(p.grad for p in network.parameters() if p.grad is not None)]


def test_a_compiled_network_casts_its_weights_at_once_to_the_same_bits():
    x, networks = torch.randn(2, 4, 5, 8), [Network(at_once) for at_once in (True, False)]
    networks[1].load_state_dict(networks[0].state_dict())
    counts = [Counter[str](), Counter[str]()]
    ours, theirs = (outcome(network, x, seen) for network, seen in zip(networks, counts, strict=True))
    assert len(ours) == 6
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(ours, theirs, strict=True))
    assert counts[0]["affinear.cast.default"] == 2  # there and back
    # Two weights and a bias, in both directions.
    assert counts[1]["aten._to_copy.default"] - counts[0]["aten._to_copy.default"] == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_changes_outside_compiled_networks(dtype: torch.dtype):
    network, x = Network(True), torch.randn(1, 3, 3, 8)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        assert torch.equal(network(x), network.run(x))
    assert network.first.weight.dtype == torch.float32


def test_compilers_that_take_every_graph_for_an_export_are_not_asked():
    """As before torch 2.13."""
    handlers: Any = TorchInGraphFunctionVariable._get_handlers()  # pyright: ignore[reportPrivateUsage]
    always = {torch.compiler.is_exporting: lambda _self, tx, *_args, **_named: VariableTracker.build(tx, True)}
    seen = Counter[str]()
    with mock.patch.dict(handlers, always):
        torch.compiler.reset()
        assert torch.compile(lambda: torch.compiler.is_exporting(), backend="eager", fullgraph=True)()
        outcome(Network(True), torch.randn(2, 4, 5, 8), seen)
    assert seen["affinear.cast.default"] == 2


@pytest.mark.parametrize("strict", [True, False])
def test_exported_networks_cast_one_by_one(strict: bool):
    with torch.autocast("cpu", torch.bfloat16):
        exported = torch.export.export(Network(True), (torch.randn(2, 4, 5, 8),), strict=strict)
    assert "affinear.cast" not in exported.graph_module.print_readable(print_output=False)
