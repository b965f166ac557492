"""What a forward pass leaves behind for backward, counted on torch's meta device: no memory is needed for any size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Left:
    """Bytes that are kept until backward.

    Attributes:
        activations: All but weights of attention, and but the network's own parameters.
        weights: Those of attention: maps of one number for each pair of tokens.
    """

    activations: int
    weights: int


def left_behind(make: Callable[[], nn.Module], shape: tuple[int, ...], tokens: frozenset[int]) -> Left:
    """Count what a network keeps for images of a shape, every tensor once.

    Args:
        make: Makes it, in training mode.
        shape: Of the images (B, 3, H, W).
        tokens: How many its layers of attention have: a tensor that ends in two such sides is one of weights.
    """
    found: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        found[_place(tensor)] = tensor  # which also keeps it, so that no other takes its place
        return tensor

    with torch.device("meta"):
        network = make()
        own = {_place(tensor) for tensor in (*network.parameters(), *network.buffers())}
        images = torch.empty(shape, dtype=next(network.parameters()).dtype)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            maps = network(images)
    kept, weights = dict.fromkeys((False, True), 0), {id(one) for one in found.values() if _is_square(one, tokens)}
    for place, tensor in found.items():
        if place not in own:
            kept[id(tensor) in weights] += tensor.untyped_storage().nbytes()
    del maps
    return Left(kept[False], kept[True])


def _place(tensor: Tensor) -> int:
    """Of a tensor's storage; views of one tensor have one."""
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def _is_square(tensor: Tensor, tokens: frozenset[int]) -> bool:
    return tensor.ndim >= 3 and tensor.shape[-1] == tensor.shape[-2] and tensor.shape[-1] in tokens
