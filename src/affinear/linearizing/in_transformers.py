"""Softmax attention in transformers' networks: everything that goes through its attention interface.

`AttentionInterface` hands us queries, keys and values as the teacher projected, normalised and turned them; a mask
function under the same name hands us the padding. Decoders get a hook beside, which gives their layers a memory of one
size in the cache that transformers made (`cache.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

from .. import ops
from . import scores
from .bias import add_position
from .cache import MemoryLayer, memory_layer, to_device
from .choices import Choices
from .core import LinearCore, Shape
from .sites import Site
from .staying import stay

CORE = "linearized"
NAME = "affinear"  # the implementation of linearized networks; layers without a core stay softmax there
MEMORY = "affinear_memory"
SOUNDS = ("max_source_positions",)  # what configurations of encoders of sound have
# Class tokens before the grid, of encoders of images.
IMAGES = {"vit": 1, "deit": 2, "beit": 1, "dinov2": 1, "clip_vision_model": 1, "siglip_vision_model": 0}


def register_names() -> None:
    """Make "affinear" and "affinear_" with each mechanism's name known to transformers, with their masks."""
    _register(NAME, None)
    for name, rule in ops.mechanisms().items():
        if rule.gain is not None:
            _register(f"{NAME}_{name}", LinearCore(Choices(name)))


def _register(name: str, core: LinearCore | None) -> None:
    AttentionInterface.register(name, partial(_attend, everywhere=core))
    AttentionMaskInterface.register(name, _mask)


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    **others: Any,
) -> Tensor | None:
    """The padding, (B, M) or None; whatever else a mask may say as (B, 1, N, M), for the layers that stay."""
    if mask_function not in (causal_mask_function, bidirectional_mask_function):
        others |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **others)
    if mask_function is causal_mask_function and not _fits(q_length, kv_length, q_offset, kv_offset):
        raise ValueError("past_key_values: expected a DynamicCache, got one of a fixed length")
    if attention_mask is None:
        return None
    mask = attention_mask[:, -kv_length:]
    return mask if torch.compiler.is_compiling() or not bool(mask.all()) else None


def _fits(q_length: int, kv_length: int, q_offset: Any, kv_offset: Any) -> bool:
    """Whether the queries are the latest of the keys."""
    return isinstance(q_offset, int) and kv_offset + kv_length == q_offset + q_length


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    *,
    everywhere: LinearCore | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: (B, H, N, D) in, (B, N, H, E) out."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    causal = bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
    memory = kwargs.pop(MEMORY, None)
    core = getattr(module, CORE, None)
    if core is None and everywhere is not None and not _stays(module):
        core = everywhere
    if core is None:
        padding = attention_mask
        if padding is not None and padding.ndim == 2:
            padding = padding[:, -key.shape[1] :]
        return stay(module, query, key, value, padding, scaling, causal, kwargs).contiguous(), None
    if kwargs.get("sliding_window") is not None:
        raise ValueError("sliding_window: expected None, as linear attention sees all tokens; leave this layer alone")
    assert isinstance(core, LinearCore)
    bias, mask = scores.bias_of(module, attention_mask, kwargs)
    mask = _keys_alone(mask, key.shape[1], causal)
    if not causal:
        out = core(query, key, value, scale=scaling, key_mask=mask)
        out = out if _is_cross(module) else _positioned(core, out, value, bias, mask)
        return out.contiguous(), None
    if isinstance(memory, MemoryLayer):
        before = to_device(memory.memory, query.device)
        out, memory.memory = core.step(query, key, value, before, scale=scaling, key_mask=mask)
        return out.contiguous(), None
    return _after_keys(core, query, key, value, scaling, mask).contiguous(), None


def _positioned(core: LinearCore, out: Tensor, value: Tensor, bias: Tensor | None, mask: Tensor | None) -> Tensor:
    """Answers with a bias (1 or B, H, N, M) as attention by position alone, where that was chosen."""
    if bias is None or core.choices.bias != "position":
        return out
    if mask is not None:
        # Finite, as a text that is padding alone would have no share that is a number.
        bias = bias.masked_fill(~mask[:, None, None], torch.finfo(bias.dtype).min)
        value = value.masked_fill(~mask[..., None, None], 0)
    bias = bias.expand(value.shape[0], -1, -1, -1)
    return add_position(out, value.repeat_interleave(out.shape[2] // value.shape[2], dim=2), bias)


def _keys_alone(mask: Tensor | None, keys: int, causal: bool) -> Tensor | None:
    """The padding of the keys that are here: with a memory, the latest of all."""
    if mask is None:
        return None
    # The same for all heads and queries, some encoders' way; where there is but one query it may be any pattern.
    if mask.ndim == 4 and mask.shape[1] == mask.shape[2] == 1 and not causal:
        mask = mask[:, 0, 0] if mask.dtype == torch.bool else mask[:, 0, 0] > -1
    if mask.ndim != 2:
        raise ValueError(
            f"attention_mask: expected padding alone, (B, M), got {tuple(mask.shape)}; linear attention has no place "
            "for a mask of each query and key, as windows, packed sequences and patterns make one; pass "
            "attention_mask= and no position_ids of packed sequences, or leave this layer alone"
        )
    return mask[:, -keys:].to(torch.bool)


def _after_keys(
    core: LinearCore, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, mask: Tensor | None
) -> Tensor:
    """Causal answers where a cache has kept earlier keys: their memory first, then the queries' own tokens."""
    earlier = key.shape[1] - query.shape[1]
    if not earlier:
        return core(query, key, value, scale=scaling, causal=True, key_mask=mask)
    heads = query.shape[2] // key.shape[2]
    asked = key[:, :earlier].repeat_interleave(heads, dim=2)  # what they answer is not looked at
    before = core.step(asked, key[:, :earlier], value[:, :earlier], None, key_mask=_part(mask, 0, earlier))[1]
    rest = _part(mask, earlier, key.shape[1])
    return core.step(query, key[:, earlier:], value[:, earlier:], before, scale=scaling, key_mask=rest)[0]


def _part(mask: Tensor | None, start: int, end: int) -> Tensor | None:
    return None if mask is None else mask[:, start:end]


def _stays(module: nn.Module) -> bool:
    """Whether a layer stays softmax when a mechanism is asked for by its name."""
    near = scores.slides(module) or scores.is_chunked(module)
    return _beside_encoder(module) or _is_cross(module) or near or bool(scores.impossible(module))


def _beside_encoder(module: nn.Module) -> bool:
    config = getattr(module, "config", None)
    both = bool(getattr(config, "is_encoder_decoder", False))
    return both and bool(getattr(module, "is_decoder", False) or getattr(module, "is_causal", False))


def _is_cross(module: nn.Module) -> bool:
    cross = "Cross" in type(module).__name__ or bool(getattr(module, "is_cross_attention", False))
    return cross or (bool(getattr(module, "is_decoder", False)) and not getattr(module, "is_causal", False))


def sites(model: PreTrainedModel) -> Iterator[Site]:
    """Every attention layer of a network of transformers, in order."""
    for name, module in model.named_modules():
        kind = type(module)
        if isinstance(module, nn.MultiheadAttention):
            yield Site(name, module, kind.__name__, reason="torch's own attention, which takes no other")
        elif kind.__module__.startswith("transformers.") and scores.uses_interface(kind):
            yield _site(model, name, module)
        elif kind.__module__.startswith("transformers.") and scores.computes_softmax(kind):
            reason = "it computes its softmax itself and does not go through transformers' attention interface"
            yield Site(name, module, kind.__name__, reason=reason)


def _site(model: PreTrainedModel, name: str, module: nn.Module) -> Site:
    kind, causal, cross = type(module).__name__, bool(getattr(module, "is_causal", False)), _is_cross(module)
    biased = not cross and scores.is_biased(module)  # between two sequences nobody has positions in common
    reason = _why_never(module, causal, cross, biased)
    if reason:
        return Site(name, module, kind, reason=reason)

    def install(core: LinearCore) -> None:
        module.add_module(CORE, core)
        if causal:
            module.register_forward_pre_hook(_with_memory, with_kwargs=True)

    config = getattr(module, "config", model.config)
    prefix = IMAGES.get(getattr(config, "model_type", ""))
    return Site(
        name, module, kind, _shape(module), install, causal=causal and not cross, optional=cross, biased=biased,
        prefix_tokens=prefix, grid_known=prefix is not None or causal or _is_line(config), note=_note(module),
    )  # fmt: skip


def _is_line(config: Any) -> bool:
    """Whether tokens come one after the other: words, or moments of sound. Patches and queries of objects do not."""
    return not hasattr(config, "image_size") and any(hasattr(config, name) for name in ("vocab_size", *SOUNDS))


def _why_never(module: nn.Module, causal: bool, cross: bool, biased: bool) -> str:
    """Why a layer stays as it is, whatever is chosen; empty if it does not."""
    if _beside_encoder(module) and not cross:
        return "a decoder beside an encoder, whose cache is of two parts"
    if scores.slides(module):
        return "it sees a sliding window of tokens, and is linear as it is"
    if scores.is_chunked(module):
        return "it sees a chunk of tokens, and is linear as it is"
    if causal and getattr(module, "layer_idx", None) is None:
        return "it does not know its place in the cache (layer_idx)"
    if causal and scores.asks_more_than_once(type(module)):
        return "it attends twice for the same tokens, and one memory cannot count them twice"
    if causal and biased:
        return "its bias of position is of each query and all keys before it, of which a memory keeps none"
    return scores.impossible(module)


def _with_memory(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Give a decoder layer its memory: in the cache it was called with, and as an argument that reaches `_attend`."""
    # Most call it past_key_values, some layer_past.
    cache = next((given for given in (*args, *kwargs.values()) if hasattr(given, "get_seq_length")), None)
    if cache is None:
        return args, kwargs
    index = cast(int, module.layer_idx)
    return args, {**kwargs, MEMORY: memory_layer(cache, index)}


def _note(module: nn.Module) -> str:
    cap = scores.cap_of(module)
    notes = [] if cap is None else [f"the cap on its scores ({cap}) is gone, as there are none"]
    for name in ("attention_dropout", "dropout", "attn_dropout"):
        rate = getattr(module, name, 0.0)
        rate = rate.p if isinstance(rate, nn.Dropout) else rate
        if isinstance(rate, float) and rate:
            notes.append(f"dropout of attention weights ({rate}) is gone, as there are none")
            break
    return "; ".join(notes)


def _shape(module: nn.Module) -> Shape | None:
    """Heads of a layer, under the names that transformers' models have for them."""
    config = getattr(module, "config", None)
    heads = _first(module, "num_heads", "num_attention_heads", "n_heads") or _first(config, "num_attention_heads")
    width = _first(module, "qk_head_dim", "head_dim", "attention_head_size", "head_size", "key_value_proj_dim")
    if heads is None or width is None:
        return None
    groups = _first(module, "num_key_value_groups")
    keys = _first(module, "num_key_value_heads") or (heads if groups is None else heads // groups)
    return Shape(heads, keys, width, _first(module, "v_head_dim") or width)


def _first(owner: Any, *names: str) -> int | None:
    values = (getattr(owner, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and not isinstance(value, bool)), None)
