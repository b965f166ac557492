"""The cache of a language model: a state for every linear layer, keys and values for every softmax one."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from ...layers.memory import MemoryLayer
from ...ops import State
from .config import LINEAR, SOFTMAX, AffinearConfig

if TYPE_CHECKING:
    from .model import AffinearPreTrainedModel

# What makes the caches of two models alike.
SHAPE = (
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "mechanism", "layer_types",
    "conv_size", "rope_theta",
)  # fmt: skip


@dataclass(frozen=True)
class Past:
    """All that a linear layer keeps of a text, of one size however long that is.

    Attributes:
        state: Of the attention; None before the first token.
        recent: (B, K - 1, C), the latest tokens, for a convolution of K taps; None without one.
        seen: How many tokens, padding counted.
    """

    state: State | None = None
    recent: Tensor | None = None
    seen: int = 0

    def map(self, function: Callable[[Tensor], Tensor]) -> Past:
        """The same with the function applied to each tensor."""
        state = None if self.state is None else self.state.map(function)
        return replace(self, state=state, recent=None if self.recent is None else function(self.recent))


class StateLayer(MemoryLayer[Past]):
    """A linear layer's part of the cache."""

    def __init__(self) -> None:
        super().__init__(Past())

    @property
    def recent(self) -> Tensor | None:
        """The latest tokens, for the convolution."""
        return self.memory.recent

    def to(self, device: torch.device) -> None:
        """Move to where the layer computes, if it is elsewhere."""
        state = self.memory.state
        if state is not None and state.device != device:
            self.memory = self.memory.map(lambda x: x.to(device))


class KeysLayer(DynamicLayer):
    """A softmax layer's part of the cache: keys and values of all tokens, and the latest tokens for a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.recent: Tensor | None = None

    def reset(self) -> None:
        """As if no token had been seen."""
        self.keys = self.values = self.recent = None
        self.is_initialized = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """For beam search: the sequences that go on."""
        self.choose(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence so many times."""
        self.choose(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """These sequences alone."""
        self.choose(lambda x: x[indices.to(x.device)])

    def choose(self, function: Callable[[Tensor], Tensor]) -> None:
        """Put each tensor through a function that chooses among the batch."""
        self.recent = None if self.recent is None else function(self.recent)
        if self.is_initialized:
            assert self.keys is not None
            assert self.values is not None
            self.keys, self.values = function(self.keys), function(self.values)


class AffinearCache(Cache):
    """What a language model keeps of a text, to go on from. Linear layers keep a state, whose size is that of no text.

    `generate` and the model make it; pass it as `past_key_values`. It knows the padding of what it has seen, so that
    an `attention_mask` may be of the new tokens alone.

    Args:
        config: Of the model.

    Example:
        >>> import torch
        >>> from affinear.models.language import AffinearCache, AffinearForCausalLM, preset
        >>> config = preset("small", vocab_size=100, num_hidden_layers=2, hidden_size=32, num_attention_heads=2)
        >>> model = AffinearForCausalLM(config).eval()
        >>> cache = AffinearCache(config)
        >>> for piece in torch.randint(100, (1, 90)).split(30, dim=1):
        ...     out = model(piece, past_key_values=cache)
        >>> cache.get_seq_length(), cache.numbers() == AffinearCache.size(config)
        (90, True)
    """

    def __init__(self, config: AffinearConfig) -> None:
        assert config.layer_types is not None
        super().__init__(layers=[StateLayer() if kind == LINEAR else KeysLayer() for kind in config.layer_types])
        self.config = config
        self.key_mask: Tensor | None = None  # (B, seen), where softmax layers would see padding otherwise

    @staticmethod
    def size(config: AffinearConfig, batch: int = 1) -> int:
        """How many numbers the states of a model without softmax layers hold, whatever they have seen."""
        from ...ops.mechanisms import find

        width = config.head_width
        features = find(config.mechanism).key_map(torch.zeros(1, 1, 1, width)).shape[-1]
        means = features * (1 if config.rope_theta is None else 2) + width
        recent = max(config.conv_size - 1, 0) * width * (config.num_attention_heads + 2 * config.key_heads)
        return batch * config.num_hidden_layers * (config.key_heads * (features * width + means + 1) + recent)

    def check_fits(self, config: AffinearConfig) -> None:
        """Raise ValueError unless it is the cache of a model of this shape."""
        if self.config is config:
            return
        for name in SHAPE:
            own, other = getattr(self.config, name), getattr(config, name)
            if own != other:
                raise ValueError(
                    f"past_key_values: expected a cache of this model, with {name} {other}, got one with {own}"
                )

    def numbers(self) -> int:
        """How many numbers it holds now."""
        from .keeping import tensors_of

        return sum(x.numel() for x in tensors_of(self).values())

    def extend_mask(self, mask: Tensor | None, batch: int, length: int, device: torch.device) -> Tensor | None:
        """Take in the padding of new tokens, and tell that of all, (B, seen + N); None where there is none."""
        if SOFTMAX not in (self.config.layer_types or ()) or (mask is None and self.key_mask is None):
            return None
        seen = self.get_seq_length()
        before = self.key_mask
        if before is None:
            before = torch.ones(batch, seen, dtype=torch.bool, device=device)
        new = torch.ones(batch, length, dtype=torch.bool, device=device) if mask is None else mask
        self.key_mask = torch.cat((before.to(device), new), dim=1)
        return self.key_mask

    def mask_with(self, input_ids: Tensor) -> Tensor:
        """An `attention_mask` that tells `generate` that tokens (B, N) come after all that were seen, (B, seen + N).

        transformers takes `input_ids` as long as their mask for the whole text, from its beginning.
        """
        batch, length = input_ids.shape
        seen = self.get_seq_length()
        mask = torch.ones(batch, seen + length, dtype=torch.bool, device=input_ids.device)
        if self.key_mask is not None:
            mask[:, :seen] = self.key_mask.to(mask.device)
        return mask

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """For beam search: the sequences that go on."""
        super().reorder_cache(beam_idx)  # pyright: ignore[reportArgumentType]
        self._choose(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence so many times."""
        super().batch_repeat_interleave(repeats)
        self._choose(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """These sequences alone."""
        super().batch_select_indices(indices)
        self._choose(lambda x: x[indices.to(x.device)])

    def reset(self) -> None:
        """As if no token had been seen."""
        super().reset()
        self.key_mask = None

    def _choose(self, function: Callable[[Tensor], Tensor]) -> None:
        self.key_mask = None if self.key_mask is None else function(self.key_mask)

    def save(self, path: str | os.PathLike[str], model: AffinearPreTrainedModel) -> Path:
        """Write it to a sealed safetensors file: of one size where all layers are linear, however long the text was.

        Args:
            path: A file that does not exist yet. It appears under its name when it is whole.
            model: The model that it is of. The file remembers which one.

        Returns:
            The path.

        Raises:
            ValueError: If the file exists, the cache is empty, or is not of this model.
        """
        from . import keeping

        return keeping.save(self, path, model)

    @staticmethod
    def load(path: str | os.PathLike[str], model: AffinearPreTrainedModel) -> AffinearCache:
        """The cache that `save` wrote, on the device of the model.

        Raises:
            ValueError: If the file is no such cache, is damaged, or is of another model, dtype or shape.
        """
        from . import keeping

        return keeping.load(path, model)
