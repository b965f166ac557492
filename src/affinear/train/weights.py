"""Weights by name, put into a network: all of them, or a sentence that says which do not fit."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn


def fill(network: nn.Module, tensors: Mapping[str, Tensor], source: str, *, fresh: tuple[str, ...] = ()) -> list[str]:
    """Load weights into a network.

    Args:
        network: Of any kind.
        tensors: By name.
        source: What they came from, for the error.
        fresh: How the names of weights begin that keep their fresh values where the file's have another shape.

    Returns:
        The names that were left as they are.

    Raises:
        ValueError: If a tensor is missing, unexpected or of another shape; the first few are named.
    """
    own = network.state_dict()
    other = [name for name in own if name in tensors and tensors[name].shape != own[name].shape]
    kept = [name for name in other if name.startswith(fresh)] if fresh else []
    wrong = [
        f"{name} is {tuple(tensors[name].shape)}, not {tuple(own[name].shape)}" for name in other if name not in kept
    ]
    wrong += [
        f"{name} is of {tensors[name].dtype}, not {own[name].dtype}"
        for name in own
        if name in tensors and tensors[name].is_floating_point() != own[name].is_floating_point()
    ]
    wrong += [f"{name} is missing" for name in own if name not in tensors]
    wrong += [f"{name} is unexpected" for name in tensors if name not in own]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(f"{source}: these weights are of another network: {'; '.join(wrong[:3])}{more}")
    network.load_state_dict({name: own[name] if name in kept else tensors[name] for name in own})
    return kept
