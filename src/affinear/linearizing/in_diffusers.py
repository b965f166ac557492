"""Softmax attention in diffusers' networks: processors that use a layer's own projections and attend linearly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from diffusers.models import attention_processor
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers import transformer_flux
from torch import Tensor, nn

from .core import LinearCore, Shape
from .sites import Site

CORE = "linearized"


def _core(layer: nn.Module) -> LinearCore:
    core = getattr(layer, CORE)
    assert isinstance(core, LinearCore)
    return core


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1))


def _keys_alone(mask: Tensor | None) -> Tensor | None:
    """Which keys there are (B, M), of a bias (B, 1, M) that diffusers makes from a mask: 0 where they are."""
    if mask is None:
        return None
    if mask.ndim == 3 and mask.shape[1] == 1:
        mask = mask[:, 0]
    if mask.ndim != 2:
        raise ValueError(
            f"attention_mask: expected a mask over keys, (B, M) or (B, 1, M), got {tuple(mask.shape)}; "
            "linear attention has no place for a mask of each query and key"
        )
    return mask if mask.dtype == torch.bool else mask > -1.0


def _normalised(norm: nn.Module | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


class Linear:
    """Attention of one sequence over itself or over another: UNets, DiT, PixArt."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
    ) -> Tensor:
        """Tokens (B, N, C), or maps (B, C, H, W), that have looked."""
        residual, size = hidden_states, hidden_states.shape[2:]
        if attn.spatial_norm is not None:
            hidden_states = attn.spatial_norm(hidden_states, temb)
        if residual.ndim == 4:
            hidden_states = hidden_states.flatten(2).transpose(1, 2)
        if attn.group_norm is not None:
            hidden_states = attn.group_norm(hidden_states.transpose(1, 2)).transpose(1, 2)
        memory = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        if encoder_hidden_states is not None and attn.norm_cross:
            memory = attn.norm_encoder_hidden_states(memory)
        query = _normalised(attn.norm_q, _heads(attn.to_q(hidden_states), attn.heads))
        key = _normalised(attn.norm_k, _heads(attn.to_k(memory), attn.heads))
        value = _heads(attn.to_v(memory), attn.heads)
        out = _core(attn)(query, key, value, key_mask=_keys_alone(attention_mask)).flatten(2)
        out = attn.to_out[1](attn.to_out[0](out))
        if residual.ndim == 4:
            out = out.transpose(1, 2).unflatten(-1, size)
        if attn.residual_connection:
            out = out + residual
        return out / attn.rescale_output_factor


class LinearJoint:
    """Attention of image and text together, as in Stable Diffusion 3."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Tokens of the image, and those of the text where there are any."""
        projections = (attn.to_q, attn.to_k, attn.to_v)
        query, key, value = (_heads(project(hidden_states), attn.heads) for project in projections)
        query, key = _normalised(attn.norm_q, query), _normalised(attn.norm_k, key)
        if encoder_hidden_states is not None:
            projections = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
            text = [_heads(project(encoder_hidden_states), attn.heads) for project in projections]
            text[0], text[1] = _normalised(attn.norm_added_q, text[0]), _normalised(attn.norm_added_k, text[1])
            query, key, value = (torch.cat(pair, dim=1) for pair in zip((query, key, value), text, strict=True))
        out = _core(attn)(query, key, value, key_mask=_keys_alone(attention_mask)).flatten(2)
        image, words = out[:, : hidden_states.shape[1]], out[:, hidden_states.shape[1] :]
        image = attn.to_out[1](attn.to_out[0](image))
        if encoder_hidden_states is None:
            return image
        return image, words if attn.context_pre_only else attn.to_add_out(words)


class LinearFlux:
    """Attention of text and image together, with positions that turn, as in Flux."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Tokens of the image, and those of the text where they come apart."""
        projections = (attn.to_q, attn.to_k, attn.to_v)
        query, key, value = (project(hidden_states).unflatten(-1, (-1, attn.head_dim)) for project in projections)
        query, key = attn.norm_q(query), attn.norm_k(key)
        if encoder_hidden_states is not None:
            projections = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
            text = [project(encoder_hidden_states).unflatten(-1, (-1, attn.head_dim)) for project in projections]
            text[0], text[1] = attn.norm_added_q(text[0]), attn.norm_added_k(text[1])
            query, key, value = (torch.cat(pair, dim=1) for pair in zip(text, (query, key, value), strict=True))
        if image_rotary_emb is not None:
            query = apply_rotary_emb(query, image_rotary_emb, sequence_dim=1)
            key = apply_rotary_emb(key, image_rotary_emb, sequence_dim=1)
        out = _core(attn)(query, key, value, key_mask=_keys_alone(attention_mask)).flatten(2)
        if encoder_hidden_states is None:
            return out
        words, image = out[:, : encoder_hidden_states.shape[1]], out[:, encoder_hidden_states.shape[1] :]
        return attn.to_out[1](attn.to_out[0](image)), attn.to_add_out(words)


PROCESSORS: dict[type, Callable[[], Any]] = {
    attention_processor.AttnProcessor: Linear,
    attention_processor.AttnProcessor2_0: Linear,
    attention_processor.JointAttnProcessor2_0: LinearJoint,
    transformer_flux.FluxAttnProcessor: LinearFlux,
}


def sites(model: nn.Module) -> Iterator[Site]:
    """Every attention layer of a network of diffusers, in order."""
    for name, module in model.named_modules():
        processor = getattr(module, "processor", None)
        if processor is None or not hasattr(module, "set_processor"):
            continue
        kind, was = type(processor), type(module).__name__
        if kind in PROCESSORS:
            yield _site(name, module, was, kind)
        else:
            yield Site(name, module, was, reason=f"its processor, {kind.__name__}, is not known here")


def _site(name: str, module: Any, was: str, kind: type) -> Site:
    heads = int(module.heads)
    width, value_width = module.to_k.out_features // heads, module.to_v.out_features // heads

    def install(core: LinearCore) -> None:
        module.add_module(CORE, core)
        module.set_processor(PROCESSORS[kind]())

    cross = bool(getattr(module, "is_cross_attention", False))
    return Site(name, module, was, Shape(heads, heads, width, value_width), install, grid_known=False, optional=cross)
