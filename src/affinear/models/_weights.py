"""How fresh weights are drawn."""

from __future__ import annotations

from torch import nn


def draw(network: nn.Module, *kinds: type[nn.Linear | nn.Conv2d]) -> None:
    """Weights of all layers of these kinds from a normal of deviation 0.02, their biases zero.

    The papers cut theirs at a hundred deviations, which is no cut; timm's way of cutting makes one in 2 ** 24 a -2.
    """
    for module in network.modules():
        if isinstance(module, kinds):
            nn.init.normal_(module.weight, std=0.02)
            for name, parameter in module.named_parameters():
                if name == "bias":
                    nn.init.zeros_(parameter)
