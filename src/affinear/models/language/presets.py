"""Shapes of language models that have a name."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from ...ops.mechanisms import near_miss
from .config import AffinearConfig

# The papers say "340M" and "0.3B" on 15B tokens, and no more. The shape is assumed, as is usual for that size:
# 24 layers, 1024 wide, 32,000 tokens, a SwiGLU of 8 / 3 of the width; with tied embeddings it has 341M parameters.
_COMMON = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
}
_PRESETS: dict[str, dict[str, Any]] = {
    "small": {
        "vocab_size": 16384,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 13,
        "num_attention_heads": 4,
        "tie_word_embeddings": True,
        "mechanism": "mala",
    },
    "nala_340m": {**_COMMON, "mechanism": "nala"},
    "mala_0.3b": {**_COMMON, "mechanism": "mala"},
}


def presets() -> MappingProxyType[str, dict[str, Any]]:
    """What each preset says, by name."""
    return MappingProxyType({name: dict(values) for name, values in _PRESETS.items()})


def preset(name: str, **changes: Any) -> AffinearConfig:
    """The configuration of a name, with changes.

    Args:
        name: "small", about 15M parameters; "nala_340m", as NaLaFormer's experiment; "mala_0.3b", as MALA's.
        changes: Fields of `AffinearConfig` to have otherwise.

    Raises:
        ValueError: If there is no such preset.

    Example:
        >>> from affinear.models.language import preset
        >>> preset("nala_340m", mechanism="mala", softmax_every=6).layer_types.count("full_attention")
        4
    """
    if name not in _PRESETS:
        raise ValueError(
            f"preset: expected one of {', '.join(_PRESETS)}, got {name!r}; {near_miss(name, _PRESETS)}".rstrip("; ")
        )
    return AffinearConfig(**{**_PRESETS[name], **changes})
