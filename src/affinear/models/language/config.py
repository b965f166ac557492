"""The configuration of a language model, as transformers keeps it beside the weights."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from ...ops.mechanisms import find, near_miss

LINEAR, SOFTMAX = "linear_attention", "full_attention"


class AffinearConfig(PreTrainedConfig):
    """A Llama-shaped decoder around causal attention of any mechanism.

    Attributes:
        vocab_size: Tokens that there are.
        hidden_size: Width of a token.
        intermediate_size: Width within the SwiGLU.
        num_hidden_layers: Layers.
        num_attention_heads: Heads of queries.
        num_key_value_heads: Heads of keys and values, a divisor of them; None for as many.
        head_dim: Width of a head; None for `hidden_size / num_attention_heads`.
        mechanism: Name of the attention, such as "mala". "softmax" makes a Transformer of the same shape.
        softmax_every: n for softmax in every n-th layer, the last of each n; 0 for none.
        layer_types: "linear_attention" or "full_attention" for each layer, where `softmax_every` does not say it.
        rope_theta: Base of rotary positions; None for none.
        qk_norm: Whether queries and keys pass a norm, each head by itself.
        gate: Whether answers are multiplied with a SiLU of the tokens.
        conv_size: Taps of a short causal convolution of queries, keys and values; 0 for none.
        rms_norm_eps: Of all norms.
        initializer_range: Deviation of fresh weights.
        max_position_embeddings: What tools take for the longest text; the network itself knows no longest.
        tie_word_embeddings: Whether the head is the embedding.
        use_cache: Whether to return a state to go on from, outside training.
        loss_chunk: Tokens whose logits are in memory at once when a loss is asked for.
        pad_token_id: As transformers has it.
        bos_token_id: The same.
        eos_token_id: The same.

    Example:
        >>> from affinear.models.language import AffinearConfig
        >>> AffinearConfig(num_hidden_layers=4, softmax_every=2).layer_types
        ['linear_attention', 'full_attention', 'linear_attention', 'full_attention']
    """

    model_type: ClassVar[str] = "affinear"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    vocab_size: int = 32000
    hidden_size: int = 1024
    intermediate_size: int = 2816
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    mechanism: str = "mala"
    softmax_every: int = 0
    layer_types: list[str] | None = None
    rope_theta: float | None = 10000.0
    qk_norm: bool = False
    gate: bool = False
    conv_size: int = 0
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    max_position_embeddings: int = 2**20
    tie_word_embeddings: bool = True
    use_cache: bool = True
    loss_chunk: int = 2048
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        # transformers keeps whatever it is given; a name that is nearly one of ours was meant for it.
        own = [name for name in AffinearConfig.__annotations__ if not hasattr(PreTrainedConfig, name)]
        for name in kwargs:
            if not hasattr(PreTrainedConfig, name) and (hint := near_miss(name, own)):
                raise ValueError(f"{name}: expected a name that AffinearConfig knows; {hint.strip()}")
        _check(self)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.layer_types is None:
            self.layer_types = _pattern(self)
        super().__post_init__(**kwargs)

    @property
    def key_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_width(self) -> int:
        """Width of a head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    def mechanism_of(self, layer: int) -> str:
        """Name of the attention of a layer."""
        assert self.layer_types is not None
        return self.mechanism if self.layer_types[layer] == LINEAR else "softmax"


def _pattern(config: AffinearConfig) -> list[str]:
    """What each layer is, from the mechanism and `softmax_every`."""
    if find(config.mechanism).gain is None:
        return [SOFTMAX] * config.num_hidden_layers
    every = config.softmax_every
    return [SOFTMAX if every and (i + 1) % every == 0 else LINEAR for i in range(config.num_hidden_layers)]


def _check(config: AffinearConfig) -> None:
    """Raise ValueError for sizes that make no network."""
    find(config.mechanism)
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "loss_chunk")
    for name in sizes:
        _check_whole(name, getattr(config, name), at_least=1)
    for name in ("softmax_every", "conv_size"):
        _check_whole(name, getattr(config, name), at_least=0)
    for name in ("num_key_value_heads", "head_dim"):
        if getattr(config, name) is not None:
            _check_whole(name, getattr(config, name), at_least=1)
    _check_numbers(config)
    heads, keys = config.num_attention_heads, config.num_key_value_heads
    if config.head_dim is None and config.hidden_size % heads:
        raise ValueError(
            f"num_attention_heads: expected a divisor of hidden_size {config.hidden_size}, got {heads}; "
            "choose another, or give head_dim"
        )
    if keys is not None and heads % keys:
        raise ValueError(f"num_key_value_heads: expected a divisor of num_attention_heads {heads}, got {keys}")
    if config.rope_theta is not None and config.head_width % 2:
        raise ValueError(
            f"head_dim: expected an even width to turn by rotary positions, got {config.head_width}; "
            "choose another, or rope_theta=None"
        )
    _check_types(config)


def _check_numbers(config: AffinearConfig) -> None:
    """Raise ValueError for what would make all answers NaN, or be taken for its opposite."""
    if config.rope_theta is not None:
        _check_positive("rope_theta", config.rope_theta, "a positive number or None")
    _check_positive("rms_norm_eps", config.rms_norm_eps, "a positive number")
    for name in ("qk_norm", "gate", "tie_word_embeddings"):
        value = getattr(config, name)
        if not isinstance(value, bool):
            raise ValueError(f"{name}: expected True or False, got {value!r}")


def _check_positive(name: str, value: object, expected: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise ValueError(f"{name}: expected {expected}, got {value!r}")


def _check_types(config: AffinearConfig) -> None:
    types = config.layer_types
    if types is None:
        return
    wrong = [name for name in types if name not in (LINEAR, SOFTMAX)]
    if len(types) != config.num_hidden_layers or wrong:
        raise ValueError(
            f"layer_types: expected {config.num_hidden_layers} of {LINEAR!r} and {SOFTMAX!r}, one for each layer, got "
            + (repr(wrong[0]) if wrong else f"{len(types)}")
        )
    if LINEAR in types and find(config.mechanism).gain is None:
        raise ValueError(
            f"layer_types: expected only {SOFTMAX!r} with the mechanism {config.mechanism!r}, got {LINEAR!r}; choose a "
            "linear mechanism"
        )


def _check_whole(name: str, value: object, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ValueError(f"{name}: expected a whole number, {at_least} or more, got {value!r}")
