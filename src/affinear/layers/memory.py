"""A layer of transformers' cache that holds something of one size in place of keys and values.

Loaded only by what has transformers: decoders that were linearized, and language models of our own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin
from typing_extensions import Self


class Kept(Protocol):
    """What such a layer may hold."""

    @property
    def seen(self) -> int:
        """How many tokens, padding counted."""
        ...

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """The same with the function, which may choose among the batch, applied to each tensor."""
        ...


Content = TypeVar("Content", bound=Kept)


class MemoryLayer(CacheLayerMixin, Generic[Content]):
    """All that a linear layer keeps of the tokens so far. It takes a layer's place in a cache of transformers.

    Args:
        blank: What it holds before the first token.
    """

    is_compileable = False
    is_croppable = False
    supports_early_init = False
    is_sliding = False

    def __init__(self, blank: Content) -> None:
        super().__init__()
        self.blank = self.memory = blank

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the first tokens make the memory."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The new keys and values, as they are: the memory has the rest."""
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
        self.memory, self.is_initialized = self.blank, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """For beam search: the sequences that go on."""
        self.memory = self.memory.map(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence so many times."""
        self.memory = self.memory.map(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """These sequences alone."""
        self.memory = self.memory.map(lambda x: x[indices.to(x.device)])

    def crop(self, tokens_to_remove: int) -> None:
        """Only no tokens can be removed: a sum does not tell what went into it."""
        if tokens_to_remove:
            raise ValueError(
                "crop: a linear layer cannot forget its latest tokens; generate without an assistant, or keep a copy "
                "of the cache"
            )
