"""Memories of linear layers in a cache that transformers made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from affinear.linearizing import Choices, LinearCore
from affinear.linearizing.cache import MemoryLayer, memory_layer, to_device
from affinear.linearizing.core import Shape

from .conftest import Hugging

MEANS: list[dict[str, Any]] = [
    {},
    {"window": 3, "sinks": 1},
    {"mechanism": "none", "window": 3},
    {"convolution": 3},
]


def three(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of one text, two heads."""
    query, key, value = torch.randn(3, 1, tokens, 2, 4).unbind()
    return query, key, value


@pytest.mark.parametrize("given", MEANS, ids=str)
def test_all_of_a_memory_goes_where_its_layer_computes(given: dict[str, Any]):
    core = LinearCore(Choices(**given), Shape(2, 2, 4, 4))
    _, memory = core.step(*three(7), None)
    assert to_device(memory, torch.device("cpu")) is memory
    kinds: set[str] = set()
    to_device(memory, torch.device("meta")).map(lambda x: kinds.add(x.device.type) or x)
    assert kinds == {"meta"}


@pytest.mark.parametrize("given", MEANS, ids=str)
def test_a_memory_holds_on_to_nothing_of_the_text_it_was_made_of(given: dict[str, Any]):
    core = LinearCore(Choices(**given), Shape(2, 2, 4, 4))
    _, memory = core.step(*three(500), None)
    for tokens in (1, 300, 1):
        _, memory = core.step(*three(tokens), memory)
        held: list[Tensor] = []
        memory.map(lambda x, held=held: held.append(x) or x)
        assert all(x.untyped_storage().nbytes() <= 2 * x.nbytes for x in held)


def test_a_layer_has_one_memory_whenever_it_asks():
    cache = DynamicCache()
    found = memory_layer(cache, 2)
    assert isinstance(found, MemoryLayer)
    assert memory_layer(cache, 2) is found
    assert len(cache.layers) == 3


def test_a_cache_that_cannot_hold_a_memory_is_refused():
    with pytest.raises(ValueError, match="expected a DynamicCache, got tuple"):
        memory_layer((), 0)
    cache = DynamicCache()
    key, value = torch.randn(2, 1, 2, 5, 4).unbind()
    cache.update(key, value, 0)
    with pytest.raises(ValueError, match="got keys of another"):
        memory_layer(cache, 0)
    config = Hugging("llama").model.config
    with pytest.raises(ValueError, match="leave cache_implementation out"):
        memory_layer(StaticCache(config=config, max_cache_len=8), 0)
