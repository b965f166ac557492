"""Softmax attention in timm's networks: each class with its own forward, the teacher's weights, and ours in between.

A layer keeps its object, its names and its weights; its class becomes a subclass that attends linearly.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from timm.layers import Attention, AttentionRope, apply_rot_embed_cat
from timm.models import beit, cait, maxxvit, pvt_v2, swin_transformer
from timm.models.eva import EvaAttention
from torch import Tensor, nn
from torch.nn import functional as F

from .bias import add_position, attend_in_regions, regions_of
from .core import LinearCore, Shape
from .sites import Site

CORE = "linearized"  # the child that every swapped layer has


def _core(layer: nn.Module) -> LinearCore:
    core = getattr(layer, CORE)
    assert isinstance(core, LinearCore)
    return core


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1))


def _three(x: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values (B, N, H, D) of one projection (B, N, 3 * H * D)."""
    query, key, value = x.unflatten(-1, (3, heads, -1)).unbind(2)
    return query, key, value


def _check_mask(mask: Tensor | None) -> Tensor | None:
    """A mask over keys alone (B, M), of what timm gives as (B, 1, 1 or N, M)."""
    if mask is None:
        return None
    if mask.dtype != torch.bool or mask.ndim != 4 or mask.shape[2] != 1:
        raise ValueError(
            f"attn_mask: expected a boolean mask over keys, (B, 1, 1, M), got {mask.dtype} {tuple(mask.shape)}; "
            "linear attention has no place for a mask of each query and key"
        )
    return mask[:, 0, 0]


class LinearAttention(Attention):
    """The attention of ViT and DeiT."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Tokens (B, N, C) that have looked at each other."""
        query, key, value = _three(self.qkv(x), self.num_heads)
        query, key = self.q_norm(query), self.k_norm(key)
        out = _core(self)(query, key, value, causal=is_causal, key_mask=_check_mask(attn_mask))
        return _gated(self, x, out.flatten(2))


class LinearAttentionRope(AttentionRope):
    """The attention of ViTs whose positions turn."""

    def forward(
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Tokens (B, N, C) that have looked at each other."""
        if self.qkv is not None:
            query, key, value = _three(self.qkv(x), self.num_heads)
        else:
            projections = cast("tuple[nn.Linear, nn.Linear, nn.Linear]", (self.q_proj, self.k_proj, self.v_proj))
            counts = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
            query, key, value = (_heads(p(x), heads) for p, heads in zip(projections, counts, strict=True))
        query, key = _turned(self, self.q_norm(query), self.k_norm(key), rope)
        out = _core(self)(query, key, value, causal=is_causal, key_mask=_check_mask(attn_mask))
        return _gated(self, x, out.flatten(2))


class LinearEvaAttention(EvaAttention):
    """The attention of EVA."""

    def forward(
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Tokens (B, N, C) that have looked at each other."""
        if self.qkv is not None:
            query, key, value = _three(_biased(self, x), self.num_heads)
        else:
            projections = cast("tuple[nn.Linear, nn.Linear, nn.Linear]", (self.q_proj, self.k_proj, self.v_proj))
            query, key, value = (_heads(projection(x), self.num_heads) for projection in projections)
        query, key = _turned(self, self.q_norm(query), self.k_norm(key), rope)
        out = _core(self)(query, key, value, causal=is_causal, key_mask=_check_mask(attn_mask))
        return _gated(self, x, out.flatten(2))


class LinearBeitAttention(beit.Attention):
    """The attention of BEiT."""

    def forward(self, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        """Tokens (B, N, C) that have looked at each other."""
        query, key, value = _three(_biased(self, x), self.num_heads)
        out = _core(self)(query, key, value)
        if _core(self).choices.bias == "position":
            own = None if self.relative_position_bias_table is None else self._get_rel_pos_bias()[0]
            shared = None if shared_rel_pos_bias is None else shared_rel_pos_bias.reshape(-1, *x.shape[1:2] * 2)
            for bias in (own, shared):
                out = out if bias is None else add_position(out, value, bias)
        return self.proj_drop(self.proj(out.flatten(2)))


class LinearWindowAttention(swin_transformer.WindowAttention):
    """The attention of Swin, within its windows."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Tokens of windows (B * W, N, C) that have looked at each other; a mask (W, N, N) cuts them into regions."""
        query, key, value = _three(self.qkv(x), self.num_heads)
        if mask is None:
            out = _core(self)(query, key, value)
        else:
            out = attend_in_regions(_core(self), query, key, value, regions_of(mask))
        if _core(self).choices.bias == "position":
            bias = self._get_rel_pos_bias()[0]
            if mask is not None:
                bias = (bias + mask[:, None]).repeat(x.shape[0] // mask.shape[0], 1, 1, 1)
            out = add_position(out, value, bias)
        return self.proj_drop(self.proj(out.flatten(2)))


class LinearPvtAttention(pvt_v2.Attention):
    """The attention of PVTv2, whose keys may be fewer than its queries."""

    def forward(self, x: Tensor, feat_size: list[int]) -> Tensor:
        """Tokens (B, N, C) that have looked at the reduced ones."""
        query = _heads(self.q(x), self.num_heads)
        if self.sr is not None:
            maps = x.transpose(1, 2).unflatten(-1, tuple(feat_size))
            maps = self.sr(maps if self.pool is None else self.pool(maps))
            x = cast(nn.Module, self.norm)(maps.flatten(2).transpose(1, 2))
            x = x if self.act is None else self.act(x)
        key, value = self.kv(x).unflatten(-1, (2, self.num_heads, -1)).unbind(2)
        out = _core(self)(query, key, value)
        return self.proj_drop(self.proj(out.flatten(2)))


class LinearTalkingHeads(cait.TalkingHeadAttn):
    """The attention of CaiT, whose heads mix their scores before softmax and their weights after it.

    Mixed scores of head h are the product of the keys of all heads, side by side, with the queries, each times its
    share in h. So all heads have one wide key and one wide value, and the weights are mixed in the answers.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (B, N, C) that have looked at each other."""
        query, key, value = _three(self.qkv(x), self.num_heads)
        shares = self.proj_l.weight  # (to, from); its bias is the same for all keys, which softmax does not see
        # Scores carry D ** -0.5 of a single head, and the wide query has H times as many channels.
        wide = (query[:, :, None] * shares[:, :, None].to(query.dtype)).flatten(3) * self.num_heads**0.5
        out = _core(self)(wide, key.flatten(2)[:, :, None], value.flatten(2)[:, :, None])
        mixed = torch.einsum("bnfhe,hf->bnhe", out.unflatten(-1, (self.num_heads, -1)), self.proj_w.weight)
        mixed = mixed + self.proj_w.bias[:, None] * value.sum(1, keepdim=True)
        return self.proj_drop(self.proj(mixed.flatten(2)))


class LinearAttentionCl(maxxvit.AttentionCl):
    """The attention of MaxViT over windows and grids, channels last."""

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        """Maps (B, ..., C) whose places have looked at each other."""
        tokens = self.qkv(x).flatten(1, -2)
        if self.head_first:
            query, key, value = tokens.unflatten(-1, (self.num_heads, 3, -1)).unbind(3)
        else:
            query, key, value = _three(tokens, self.num_heads)
        out = _positioned(self, _core(self)(query, key, value), value, shared_rel_pos)
        return self.proj_drop(self.proj(out.flatten(2).unflatten(1, x.shape[1:-1])))


class LinearAttention2d(maxxvit.Attention2d):
    """The attention of MaxViT and CoAtNet over maps, channels first."""

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        """Maps (B, C, H, W) whose places have looked at each other."""
        split = (self.num_heads, 3, -1) if self.head_first else (3, self.num_heads, -1)
        parts = self.qkv(x).flatten(2).unflatten(1, split).unbind(2 if self.head_first else 1)
        query, key, value = (part.permute(0, 3, 1, 2) for part in parts)
        out = _positioned(self, _core(self)(query, key, value), value, shared_rel_pos)
        return self.proj_drop(self.proj(out.flatten(2).transpose(1, 2).unflatten(-1, x.shape[2:])))


def _biased(layer: EvaAttention | beit.Attention, x: Tensor) -> Tensor:
    """The projection of layers that keep their biases apart."""
    projection = cast(nn.Linear, layer.qkv)
    if layer.q_bias is None:
        return projection(x)
    bias = torch.cat([cast(Tensor, part) for part in (layer.q_bias, layer.k_bias, layer.v_bias)])
    return projection(x) + bias if layer.qkv_bias_separate else F.linear(x, projection.weight, bias)


def _turned(
    layer: AttentionRope | EvaAttention, query: Tensor, key: Tensor, rope: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Queries and keys (B, N, H, D), turned as timm turns them: class tokens stay."""
    if rope is None:
        return query, key
    first, half = layer.num_prefix_tokens, bool(getattr(layer, "rotate_half", False))

    def turn(x: Tensor) -> Tensor:
        turned = apply_rot_embed_cat(x[:, first:].transpose(1, 2), rope, half=half).transpose(1, 2)
        return torch.cat((x[:, :first], turned.to(x.dtype)), dim=1)

    return turn(query), turn(key)


def _gated(layer: Any, x: Tensor, out: Tensor) -> Tensor:
    """Norm, gate and projection of the answers (B, N, C)."""
    out = layer.norm(out)
    if layer.gate is not None:
        out = out * layer.gate(x).sigmoid()
    return layer.proj_drop(layer.proj(out))


def _positioned(layer: Any, out: Tensor, value: Tensor, shared: Tensor | None) -> Tensor:
    if _core(layer).choices.bias != "position":
        return out
    bias = layer.rel_pos.get_bias() if layer.rel_pos is not None else shared
    return out if bias is None else add_position(out, value, bias.reshape(-1, *bias.shape[-2:]))


KINDS: dict[type[nn.Module], type[nn.Module]] = {
    Attention: LinearAttention,
    AttentionRope: LinearAttentionRope,
    EvaAttention: LinearEvaAttention,
    beit.Attention: LinearBeitAttention,
    swin_transformer.WindowAttention: LinearWindowAttention,
    pvt_v2.Attention: LinearPvtAttention,
    cait.TalkingHeadAttn: LinearTalkingHeads,
    maxxvit.AttentionCl: LinearAttentionCl,
    maxxvit.Attention2d: LinearAttention2d,
}
ONE_QUERY = {"ClassAttn", "AttentionPoolLatent", "ClassAttention", "MultiQueryAttentionPool", "AttentionPool2d"}


def is_layer(module: nn.Module) -> bool:
    """Whether it is an attention layer of timm's, wherever it stands."""
    kind = type(module)
    return kind in KINDS or (kind.__module__.startswith("timm.") and _attends(kind) and not _holds_known(module))


def sites(model: nn.Module) -> Iterator[Site]:
    """Every attention layer of a network made by timm, in order."""
    prefix = getattr(model, "num_prefix_tokens", None)
    shared = _shares_bias(model)
    for name, module in model.named_modules():
        kind = type(module)
        if kind in KINDS:
            yield _site(name, module, prefix, shared)
        elif is_layer(module):
            reason = "it has one query, and is linear in tokens as it is" if kind.__name__ in ONE_QUERY else ""
            reason = reason or f"{kind.__module__}.{kind.__name__} is not known here"
            yield Site(name, module, kind.__name__, reason=reason)


def _attends(kind: type[nn.Module]) -> bool:
    """Whether a class sounds like an attention of tokens; those of channels (ECA, squeeze ...) do not."""
    name = kind.__name__
    return ("Attn" in name or "Attention" in name) and not any(
        other in name for other in ("Block", "Channel", "Eca", "Gate")
    )


def _holds_known(module: nn.Module) -> bool:
    """Whether it is a shell around a layer that is known."""
    return any(type(inner) in KINDS for inner in module.modules())


def _shares_bias(model: nn.Module) -> bool:
    """Whether one bias of position is made for all layers and handed down."""
    return getattr(model, "rel_pos_bias", None) is not None


def _site(name: str, module: Any, prefix: Any, shared: bool) -> Site:
    heads = int(module.num_heads)
    if isinstance(module, Attention | AttentionRope):
        shape = Shape(heads, int(getattr(module, "num_kv_heads", heads)), int(module.head_dim), int(module.head_dim))
    elif isinstance(module, cait.TalkingHeadAttn):
        wide = module.proj.in_features
        shape = Shape(heads, 1, wide, wide)
    elif isinstance(module, maxxvit.AttentionCl | maxxvit.Attention2d):
        shape = Shape(heads, heads, int(module.dim_head), int(module.dim_head))
    else:
        width = (module.proj.in_features) // heads
        shape = Shape(heads, heads, width, width)
    tables = [getattr(module, part, None) for part in ("relative_position_bias_table", "rel_pos")]
    biased = any(table is not None for table in tables) or (shared and isinstance(module, beit.Attention))
    notes: list[str] = []
    dropout = getattr(module, "attn_drop", None)
    if isinstance(dropout, nn.Dropout) and dropout.p:
        notes.append(f"dropout of attention weights ({dropout.p}) is gone, as there are none")
    if isinstance(module, swin_transformer.WindowAttention | maxxvit.AttentionCl | maxxvit.Attention2d):
        notes.append("it stays within windows, where linear attention is not faster")
    if isinstance(module, cait.TalkingHeadAttn):
        notes.append("its heads share one key of all channels, so that they can mix as they did")

    def install(core: LinearCore) -> None:
        module.add_module(CORE, core)
        setattr(module, "__class__", KINDS[type(module)])  # noqa: B010, as no type says that a class may change

    # CaiT keeps its class token away from these layers.
    before = 0 if isinstance(module, cait.TalkingHeadAttn) else prefix
    known = isinstance(module, Attention | AttentionRope | EvaAttention | beit.Attention | cait.TalkingHeadAttn)
    known = known and isinstance(before, int)
    return Site(
        name, module, type(module).__name__, shape, install,
        biased=biased, prefix_tokens=before if known else None, grid_known=known, note="; ".join(notes),
    )  # fmt: skip
