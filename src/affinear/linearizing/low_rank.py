"""Low-rank updates of a network's linear layers: they learn alone, and are merged into the weights when all is done.

A layer answers W x + B (A x), A of `rank` rows drawn at random, B of zeros: it begins as it was. Only A and B learn,
so that what the network knew stays near. `merge` adds B A to W and leaves no trace: nothing is slower, and nothing
else has to know of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import Tensor, nn

DOWN, UP = "low_rank_down", "low_rank_up"


class _LowRank(nn.Module):
    """What a linear layer's class gets before it: the same answer, and the update's."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) to (..., outputs)."""
        down, up = cast(Tensor, getattr(self, DOWN)), cast(Tensor, getattr(self, UP))
        update = (x.to(down.dtype) @ down.mT) @ up.mT
        plain: Tensor = super().forward(x)
        return plain + update.to(plain.dtype)


def add_low_rank(model: nn.Module, rank: int, names: Sequence[str] = ("*",)) -> list[str]:
    """Give linear layers a low-rank update, in place. It begins as nothing; what else may learn is left as it is.

    Args:
        model: Any network with layers of `nn.Linear`, or of transformers' `Conv1D`.
        rank: Of the update.
        names: Patterns of the names of layers, such as "*.q_proj".

    Returns:
        The names of the layers.

    Raises:
        ValueError: If the rank is none, or no linear layer is called so.

    Example:
        >>> import torch
        >>> from affinear.linearizing.low_rank import add_low_rank, merge
        >>> network = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        >>> add_low_rank(network, 2)
        ['0', '2']
        >>> merge(network)
        ['0', '2']
    """
    if rank < 1:
        raise ValueError(f"low_rank: expected a rank of at least 1, got {rank}")
    found = [(n, layer) for n, layer in _linear(model) if any(fnmatchcase(n, pattern) for pattern in names)]
    if not found:
        known = ", ".join(name for name, _ in list(_linear(model))[:3]) or "none"
        raise ValueError(f"low_rank_on: expected names of linear layers such as {known}, got {', '.join(names)}")
    for _, layer in found:
        weight = cast(Tensor, layer.weight)
        outputs, inputs = _sides(layer)
        down = torch.empty(rank, inputs, device=weight.device, dtype=weight.dtype)
        nn.init.kaiming_uniform_(down, a=math.sqrt(5))
        layer.register_parameter(DOWN, nn.Parameter(down))
        layer.register_parameter(UP, nn.Parameter(weight.new_zeros(outputs, rank)))
        layer.__class__ = _with_update(type(layer))
    return [name for name, _ in found]


def merge(model: nn.Module) -> list[str]:
    """Add every low-rank update to the weights it stands beside, and take it away; the names of those layers."""
    names: list[str] = []
    for name, layer in model.named_modules():
        if not isinstance(layer, _LowRank):
            continue
        down, up = cast(Tensor, getattr(layer, DOWN)), cast(Tensor, getattr(layer, UP))
        weight = cast(Tensor, layer.weight)
        with torch.no_grad():
            update = up.double() @ down.double()
            weight.copy_(weight.double() + (update.mT if _is_turned(layer) else update))
        delattr(layer, DOWN)
        delattr(layer, UP)
        layer.__class__ = type(layer).__bases__[1]
        names.append(name)
    return names


def parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Those of all low-rank updates."""
    for name, parameter in model.named_parameters():
        if name.endswith((DOWN, UP)):
            yield parameter


def _linear(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) or _is_turned(module):
            yield name, module


def _is_turned(layer: nn.Module) -> bool:
    """Whether its weight is (inputs, outputs), as in transformers' Conv1D."""
    return any(kind.__name__ == "Conv1D" for kind in type(layer).__mro__)


def _sides(layer: Any) -> tuple[int, int]:
    """Outputs and inputs."""
    outputs, inputs = layer.weight.shape
    return (inputs, outputs) if _is_turned(layer) else (outputs, inputs)


def _with_update(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"LowRank{kind.__name__}", (_LowRank, kind), {})
