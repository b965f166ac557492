"""Which language models there are by name, and with which sizes: ours, and the ones they are measured against."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from ...models import making

# How documents are kept apart: by where they begin, by positions that begin anew, or each in a row of its own.
PACKED, POSITIONS, ROWS = "packed", "positions", "rows"


@dataclass(frozen=True)
class Family:
    """Language models of one kind.

    Attributes:
        takes: Fields of its configuration that a user may set.
        apart: How documents are kept apart in it.
        make: A network out of fields.
        needs: The package it comes from.
    """

    takes: tuple[str, ...]
    apart: str
    make: Callable[[Mapping[str, Any]], Any]
    needs: str = "transformers"


@dataclass(frozen=True)
class Shape:
    """A family with sizes.

    Attributes:
        family: Its name.
        fields: Of its configuration.
    """

    family: str
    fields: Mapping[str, Any]


def _affinear(fields: Mapping[str, Any]) -> Any:
    from ...models.language import AffinearConfig, AffinearForCausalLM

    return AffinearForCausalLM(AffinearConfig(**fields))


def _llama(fields: Mapping[str, Any]) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**fields))


def _mamba(fields: Mapping[str, Any]) -> Any:
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(MambaConfig(**fields))


def _mamba2(fields: Mapping[str, Any]) -> Any:
    from transformers import Mamba2Config, Mamba2ForCausalLM

    return Mamba2ForCausalLM(Mamba2Config(**fields))


def _fla(kind: str) -> Callable[[Mapping[str, Any]], Any]:
    def make(fields: Mapping[str, Any]) -> Any:
        import fla.models  # noqa: F401  # pyright: ignore[reportMissingImports, reportUnusedImport]  # registers itself
        from transformers import AutoConfig, AutoModelForCausalLM

        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields))

    return make


_SIZES = ("hidden_size", "num_hidden_layers", "tie_word_embeddings", "initializer_range")
_HEADS = (*_SIZES, "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
_OURS = ("mechanism", "softmax_every", "layer_types", "rope_theta", "qk_norm", "gate", "conv_size", "loss_chunk")
_STATES = (*_SIZES, "state_size", "expand", "conv_kernel")
_FLA = (*_SIZES, "num_heads", "intermediate_size", "expand_k", "expand_v")

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "affinear": Family((*_HEADS, *_OURS), PACKED, _affinear),
        "llama": Family(_HEADS, POSITIONS, _llama),
        "mamba": Family((*_STATES, "time_step_rank"), ROWS, _mamba),
        "mamba2": Family((*_STATES, "head_dim", "num_heads", "n_groups", "chunk_size"), ROWS, _mamba2),
        **{
            f"fla_{name}": Family(_FLA, PACKED, _fla(kind), "fla")
            for name, kind in (("linear", "linear_attn"), ("gla", "gla"), ("retnet", "retnet"), ("delta", "delta_net"))
        },
    }
)

# About 15M and 340M parameters, with a vocabulary of 16,384 and 32,000.
_SMALL = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 13, "num_attention_heads": 4}
_LARGE = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24, "num_attention_heads": 16}
_TINY = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
_TIED = {"tie_word_embeddings": True}

SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        "affinear_tiny": Shape("affinear", {**_TINY, **_TIED, "mechanism": "mala"}),
        "affinear_small": Shape("affinear", {**_SMALL, **_TIED, "mechanism": "mala"}),
        "affinear_mala_300m": Shape("affinear", {**_LARGE, **_TIED, "mechanism": "mala"}),
        "affinear_nala_340m": Shape("affinear", {**_LARGE, **_TIED, "mechanism": "nala"}),
        "llama_tiny": Shape("llama", {**_TINY, **_TIED}),
        "llama_small": Shape("llama", {**_SMALL, **_TIED}),
        "llama_340m": Shape("llama", {**_LARGE, **_TIED}),
        "mamba_small": Shape("mamba", {"hidden_size": 256, "num_hidden_layers": 24, "state_size": 16, **_TIED}),
        "mamba2_tiny": Shape(
            "mamba2",
            {
                "hidden_size": 128,
                "num_hidden_layers": 2,
                "state_size": 64,
                "head_dim": 64,
                "num_heads": 4,
                "n_groups": 1,
                **_TIED,
            },
        ),
        "mamba2_small": Shape(
            "mamba2",
            {
                "hidden_size": 256,
                "num_hidden_layers": 23,
                "state_size": 128,
                "head_dim": 64,
                "num_heads": 8,
                "n_groups": 1,
                **_TIED,
            },
        ),
        **{
            f"fla_{name}_small": Shape(
                f"fla_{name}", {"hidden_size": 256, "num_hidden_layers": 13, "num_heads": 4, **_TIED}
            )
            for name in ("linear", "gla", "retnet", "delta")
        },
    }
)


def shape_of(model: str, given: Mapping[str, Any]) -> tuple[Family, dict[str, Any]]:
    """The family of a name and all fields it is made with, but for the vocabulary.

    Raises:
        ValueError: If there is no such name or field, a value is not plain, or the package is missing.

    Example:
        >>> from affinear.tasks.language.shapes import shape_of
        >>> shape_of("affinear_small", {"mechanism": "nala"})[1]["mechanism"]
        'nala'
    """
    if model not in SHAPES:
        near = get_close_matches(model[:100], SHAPES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"model: expected one of {', '.join(SHAPES)}, got {making.short(model)}{hint}")
    shape = SHAPES[model]
    family = FAMILIES[shape.family]
    for name, value in given.items():
        if name not in family.takes:
            near = get_close_matches(name, family.takes, n=2)
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"it takes {', '.join(family.takes)}"
            raise ValueError(f"model_args: {model} takes no {name!r}; {hint}")
        making.check_plain(value, f"model_args: {name}")
    if find_spec(family.needs) is None:
        raise ValueError(f"model: {model} needs {family.needs}, which is not installed; ours need transformers alone")
    return family, {**shape.fields, **{k: list(v) if isinstance(v, tuple) else v for k, v in given.items()}}
