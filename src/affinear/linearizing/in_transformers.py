"""Softmax attention in transformers' networks: everything that goes through its attention interface.

`AttentionInterface` hands us queries, keys and values as the teacher projected, normalised and turned them; a mask
function under the same name hands us the padding. Decoders get a hook beside, which gives their layers a memory of one
size in the cache that transformers made (`cache.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from .. import ops
from ..ops.softmax import attend_latest
from .cache import MemoryLayer, memory_layer, to_device
from .choices import Choices
from .core import LinearCore, Shape
from .sites import Site

CORE = "linearized"
NAME = "affinear"  # the implementation of linearized networks; layers without a core stay softmax there
MEMORY = "affinear_memory"
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
    **_: Any,
) -> Tensor | None:
    """The padding, (B, M) or None; whatever else a mask may say is refused."""
    if mask_function not in (causal_mask_function, bidirectional_mask_function):
        raise ValueError(
            "attention_mask: expected padding alone, got a mask with windows, packed sequences or a pattern of its "
            "own, which linear attention has no place for; pass attention_mask= and no position_ids of packed sequences"
        )
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
    mask = _keys_alone(attention_mask, key.shape[1])
    causal = bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
    memory = kwargs.get(MEMORY)
    core = getattr(module, CORE, None)
    if core is None and everywhere is not None and not _stays(module):
        core = everywhere
    if kwargs.get("sliding_window") is not None and core is not None:
        raise ValueError("sliding_window: expected None, as linear attention sees all tokens; leave this layer alone")
    if core is None:
        return _softmax(query, key, value, scaling, causal, mask), None
    assert isinstance(core, LinearCore)
    if not causal:
        return core(query, key, value, scale=scaling, key_mask=mask), None
    if isinstance(memory, MemoryLayer):
        before = to_device(memory.memory, query.device)
        out, memory.memory = core.step(query, key, value, before, scale=scaling, key_mask=mask)
        return out, None
    return _after_keys(core, query, key, value, scaling, mask), None


def _keys_alone(mask: Tensor | None, keys: int) -> Tensor | None:
    """The padding of the keys that are here: with a memory, the latest of all."""
    if mask is None:
        return None
    if mask.ndim != 2:
        raise ValueError(
            f"attention_mask: expected padding, (B, M), got {tuple(mask.shape)}; linear attention has no place for a "
            "mask of each query and key"
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


def _softmax(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, causal: bool, mask: Tensor | None
) -> Tensor:
    """Softmax, for the layers that stay."""
    if causal:
        return attend_latest(query, key, value, mask, scaling)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    seen = None if mask is None else (mask | ~mask.any(-1, keepdim=True))[:, None, None]
    grouped = query.shape[1] != key.shape[1]
    attention = torch.nn.functional.scaled_dot_product_attention
    return attention(query, key, value, attn_mask=seen, scale=scaling, enable_gqa=grouped).transpose(1, 2)


def _stays(module: nn.Module) -> bool:
    """Whether a layer stays softmax when a mechanism is asked for by its name: decoders beside an encoder."""
    return _beside_encoder(module) or _is_cross(module)


def _beside_encoder(module: nn.Module) -> bool:
    config = getattr(module, "config", None)
    both = bool(getattr(config, "is_encoder_decoder", False))
    return both and bool(getattr(module, "is_decoder", False) or getattr(module, "is_causal", False))


def _is_cross(module: nn.Module) -> bool:
    cross = "Cross" in type(module).__name__ or bool(getattr(module, "is_cross_attention", False))
    return cross or (bool(getattr(module, "is_decoder", False)) and not getattr(module, "is_causal", False))


@cache
def _uses_interface(kind: type[nn.Module]) -> bool:
    """Whether a class attends through transformers' interface, which only its source tells."""
    try:
        return "ALL_ATTENTION_FUNCTIONS" in inspect.getsource(kind.forward)
    except (OSError, TypeError):
        return False


def _sounds_like_attention(kind: type[nn.Module]) -> bool:
    """Whether a class without the interface may compute a softmax of its own, and is no shell around another."""
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):
        return False
    return "Attention" in kind.__name__ and "softmax" in source


def sites(model: PreTrainedModel) -> Iterator[Site]:
    """Every attention layer of a network of transformers, in order."""
    for name, module in model.named_modules():
        kind = type(module)
        if isinstance(module, nn.MultiheadAttention):
            yield Site(name, module, kind.__name__, reason="torch's own attention, which takes no other")
        elif kind.__module__.startswith("transformers.") and _uses_interface(kind):
            yield _site(model, name, module)
        elif kind.__module__.startswith("transformers.") and _sounds_like_attention(kind):
            reason = "it computes its softmax itself and does not go through transformers' attention interface"
            yield Site(name, module, kind.__name__, reason=reason)


def _site(model: PreTrainedModel, name: str, module: nn.Module) -> Site:
    kind, causal = type(module).__name__, bool(getattr(module, "is_causal", False))
    if _beside_encoder(module) and not _is_cross(module):
        return Site(name, module, kind, reason="a decoder beside an encoder, whose cache is of two parts")
    if getattr(module, "sliding_window", None) is not None:
        return Site(name, module, kind, reason="it sees a sliding window of tokens, and is linear as it is")
    if causal and getattr(module, "layer_idx", None) is None:
        return Site(name, module, kind, reason="it does not know its place in the cache (layer_idx)")

    def install(core: LinearCore) -> None:
        module.add_module(CORE, core)
        if causal:
            module.register_forward_pre_hook(_with_memory, with_kwargs=True)

    config = getattr(module, "config", model.config)
    prefix = IMAGES.get(getattr(config, "model_type", ""))
    images = hasattr(config, "image_size")
    cross = _is_cross(module)
    return Site(
        name, module, kind, _shape(module), install, causal=causal and not cross, optional=cross,
        prefix_tokens=prefix, grid_known=not images or prefix is not None, note=_note(module),
    )  # fmt: skip


def _with_memory(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Give a decoder layer its memory: in the cache it was called with, and as an argument that reaches `_attend`."""
    cache = kwargs.get("past_key_values")
    if cache is None:
        cache = next((arg for arg in args if hasattr(arg, "get_seq_length")), None)
    if cache is None:
        return args, kwargs
    index = cast(int, module.layer_idx)
    return args, {**kwargs, MEMORY: memory_layer(cache, index)}


def _note(module: nn.Module) -> str:
    for name in ("attention_dropout", "dropout", "attn_dropout"):
        rate = getattr(module, name, 0.0)
        rate = rate.p if isinstance(rate, nn.Dropout) else rate
        if isinstance(rate, float) and rate:
            return f"dropout of attention weights ({rate}) is gone, as there are none"
    return ""


def _shape(module: nn.Module) -> Shape | None:
    """Heads of a layer, under the names that transformers' models have for them."""
    config = getattr(module, "config", None)
    heads = _first(module, "num_heads", "num_attention_heads", "n_heads") or _first(config, "num_attention_heads")
    width = _first(module, "head_dim", "attention_head_size")
    if heads is None or width is None:
        return None
    groups = _first(module, "num_key_value_groups")
    keys = _first(module, "num_key_value_heads") or (heads if groups is None else heads // groups)
    return Shape(heads, keys, width, width)


def _first(owner: Any, *names: str) -> int | None:
    values = (getattr(owner, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and not isinstance(value, bool)), None)
