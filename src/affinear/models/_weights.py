"""How fresh weights are drawn."""

from __future__ import annotations

from timm.layers import trunc_normal_
from torch import nn


def draw(network: nn.Module, *kinds: type[nn.Linear | nn.Conv2d]) -> None:
    """Weights of all layers of these kinds from a truncated normal of deviation 0.02, their biases zero."""
    for module in network.modules():
        if isinstance(module, kinds):
            trunc_normal_(module.weight, std=0.02)
            for name, parameter in module.named_parameters():
                if name == "bias":
                    nn.init.zeros_(parameter)
