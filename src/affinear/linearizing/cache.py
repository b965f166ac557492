"""The layers of a cache that transformers made, as linear decoder layers fill them."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from ..layers import memory
from .window import Memory


class MemoryLayer(memory.MemoryLayer[Memory]):
    """What a linear decoder layer keeps of the tokens so far. It takes a layer's place in a `DynamicCache`.

    transformers' layers call `update` before they attend: here it hands back the new keys and values alone, as the
    memory has the rest.
    """

    def __init__(self) -> None:
        super().__init__(Memory())


def memory_layer(cache: Any, index: int) -> MemoryLayer:
    """The memory of layer `index` in a cache; an empty layer of another kind gives it its place.

    Raises:
        ValueError: If the cache cannot hold one.
    """
    held = getattr(cache, "self_attention_cache", cache)
    if not isinstance(held, Cache):
        raise ValueError(f"past_key_values: expected a DynamicCache, got {type(cache).__name__}")
    while len(held.layers) <= index:
        held.layers.append(DynamicLayer())
    layer = held.layers[index]
    if isinstance(layer, MemoryLayer):
        return layer
    if not isinstance(layer, DynamicLayer):
        raise ValueError(
            f"past_key_values: expected a DynamicCache, which linear layers fill with memories of one size, got layers "
            f"of {type(layer).__name__}; leave cache_implementation out"
        )
    if layer.get_seq_length():
        raise ValueError("past_key_values: expected a cache that this network filled, got keys of another")
    held.layers[index] = made = MemoryLayer()
    return made


def to_device(memory: Memory, device: torch.device) -> Memory:
    """The memory where the layer computes."""
    places: set[torch.device] = set()
    memory.map(lambda x: places.add(x.device) or x)
    return memory if places <= {device} else memory.map(lambda x: x.to(device))
