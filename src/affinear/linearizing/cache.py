"""A layer of transformers' cache that holds a memory of one size in place of keys and values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from .window import Memory


class MemoryLayer(CacheLayerMixin):
    """What a linear decoder layer keeps of the tokens so far. It takes a layer's place in a `DynamicCache`.

    transformers' layers call `update` before they attend: here it hands back the new keys and values alone, as the
    memory has the rest.
    """

    is_compileable = False
    is_croppable = False
    supports_early_init = False
    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the first tokens make the memory."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The new keys and values, as they are."""
        self.is_initialized = True
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Tokens seen, padding counted."""
        return self.memory.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As of a layer that keeps all keys: padding is told for the whole sequence, and the latest part is used."""
        return self.memory.seen + query_length, 0

    def get_max_length(self) -> int:
        """There is no longest sequence."""
        return -1

    def get_max_cache_shape(self) -> int:
        """The same, as transformers before 5.20 asks for it."""
        return -1

    def offload(self) -> None:
        """To the CPU."""
        self.memory = self.memory.map(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Back to where the layer computes happens when it is used."""

    def reset(self) -> None:
        """As if no token had been seen."""
        self.memory, self.is_initialized = Memory(), False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """For beam search: the sequences that go on."""
        self.memory = self.memory.map(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence so many times."""
        self.memory = self.memory.map(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """These sequences alone."""
        self.memory = self.memory.map(lambda x: x[indices])

    def crop(self, tokens_to_remove: int) -> None:
        """Only no tokens can be removed: a sum does not tell what went into it."""
        if tokens_to_remove:
            raise ValueError(
                "crop: a linear layer cannot forget its latest tokens; generate without an assistant, or keep a copy "
                "of the cache"
            )


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
    held.layers[index] = memory = MemoryLayer()
    return memory


def to_device(memory: Memory, device: torch.device) -> Memory:
    """The memory where the layer computes."""
    if memory.state is None or memory.state.device == device:
        return memory
    return memory.map(lambda x: x.to(device))
