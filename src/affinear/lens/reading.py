"""Queries and keys out of a layer: what it was called with, sent through its own projections once more.

One reader per kind of attention, ours and timm's. timm is imported only where it is installed.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

import affinear
from affinear.layers import Attention, Windows
from affinear.lens.scene import Scene
from affinear.ops import Mechanism, find

HIDDEN = -50.0  # a bias below this hides a key: timm writes -100 where others write minus infinity


@dataclass(frozen=True)
class Look:
    """A scene, and what a layer adds to it: a bias of the scores, keys that are hidden, queries that are padding.

    Attributes:
        scene: Queries and keys; windows are entries of the batch, those of one image after each other.
        bias: (P, 1 or H, N, M), added to the scores of softmax; entry b of the batch has number b modulo P.
        key_mask: (B, M), False where a key is hidden.
        real: (B, N), False where a query is padding, whose row nobody uses.
        windows: Entries of the batch that are one image.
        kind: (B,), which of the P biases each entry has; None for the rule above.

    Example:
        >>> import torch
        >>> from affinear.lens.reading import Look
        >>> from affinear.lens.scene import Scene
        >>> query, key = torch.randn(2, 4, 9, 2, 8).unbind()
        >>> look = Look(Scene(query, key, "softmax"), bias=torch.full((1, 1, 9, 9), -torch.inf).triu(1))
        >>> look.weights(torch.tensor([0, 5])).shape
        torch.Size([4, 2, 2, 9])
        >>> look.seen(torch.tensor([0, 5])).sum(-1)[0]
        tensor([1, 6])
    """

    scene: Scene
    bias: Tensor | None = None
    key_mask: Tensor | None = None
    real: Tensor | None = None
    windows: int = 1
    kind: Tensor | None = None

    @property
    def mechanism(self) -> Mechanism:
        """What turns scores into weights."""
        return find(self.scene.mechanism)

    def only(self, entries: Tensor) -> Look:
        """The same for these entries of the batch."""
        kind = self.kind
        if self.bias is not None:
            kind = entries % len(self.bias) if kind is None else kind[entries]
        scene = replace(self.scene, query=self.scene.query[entries], key=self.scene.key[entries])
        mask, real = (None if x is None else x[entries] for x in (self.key_mask, self.real))
        return replace(self, scene=scene, key_mask=mask, real=real, kind=kind)

    def weights(self, rows: Tensor) -> Tensor:
        """Weights (B, H, R, M) of the queries with these numbers."""
        scene = self.scene
        if self.bias is None:
            return affinear.weights(
                scene.query,
                scene.key,
                scene.mechanism,
                scale=scene.scale,
                rotary=scene.rotary,
                key_mask=self.key_mask,
                rows=rows,
            )
        query = scene.query[:, rows]
        key = scene.key.repeat_interleave(query.shape[2] // scene.key.shape[2], dim=2)
        scale = query.shape[-1] ** -0.5 if scene.scale is None else scene.scale
        scores = scale * torch.einsum("brhd,bmhd->bhrm", query, key) + self._bias(rows)
        if self.key_mask is not None:
            scores = scores.masked_fill(~self.key_mask[:, None, None], -torch.inf)
        return scores.softmax(dim=-1)

    def seen(self, rows: Tensor) -> Tensor:
        """Which keys these queries may look at, (B or 1, R, M)."""
        entries, keys = self.scene.key.shape[:2]
        seen = torch.ones(1, len(rows), keys, dtype=torch.bool, device=self.scene.key.device)
        if self.bias is not None:
            seen = (self._bias(rows) > HIDDEN).any(1).expand(entries, -1, -1)
        return seen if self.key_mask is None else seen & self.key_mask[:, None]

    def _bias(self, rows: Tensor) -> Tensor:
        """(B, 1 or H, R, M); only the chosen rows are written out."""
        assert self.bias is not None
        entries = len(self.scene.query)
        kind = torch.arange(entries, device=rows.device) % len(self.bias) if self.kind is None else self.kind
        return self.bias[kind[:, None], :, rows[None]].transpose(1, 2).to(self.scene.query.dtype)


@dataclass
class Around:
    """What a layer cannot know by itself: the images that the network it belongs to was last called with.

    Attributes:
        prefix_tokens: Class tokens of the network; None if it does not say.
        images: How many images came; None if not known.
        grid: Rows and columns of their patches; None if not known.
    """

    prefix_tokens: int | None = None
    images: int | None = None
    grid: tuple[int, int] | None = None

    def windows(self, entries: int) -> int:
        """How many entries of a batch are one image."""
        return entries // self.images if self.images and entries % self.images == 0 else 1

    def lies(self, tokens: int) -> tuple[int, int] | None:
        """The grid of so many tokens, class tokens included; None if they are others than the patches of the image."""
        if self.prefix_tokens is None:
            return None
        places = tokens - self.prefix_tokens
        if self.grid is not None:
            return self.grid if math.prod(self.grid) == places else None
        side = math.isqrt(max(places, 0))
        return (side, side) if side and side * side == places else None


Reader = Callable[[Any, Mapping[str, Any], Around], tuple[Look, ...]]


@dataclass(frozen=True)
class Readers:
    """Which layers can be read, and how.

    Attributes:
        known: Classes and their readers. A subclass is read if it keeps the forward of the class.
    """

    known: tuple[tuple[type[nn.Module], Reader], ...] = field(default_factory=lambda: _known())

    def find(self, layer: nn.Module) -> Reader | None:
        """The reader of a layer; None if nothing is known about it."""
        linear = hasattr(layer, "linearized")  # by affinear.linearize, which keeps all but the middle of a layer
        for kind, reader in self.known:
            if isinstance(layer, kind) and linear and reader in (_timm, _timm_reduced):
                return partial(_linearized, reader)
            if isinstance(layer, kind) and type(layer).forward is kind.forward:
                return reader
        return None

    @property
    def names(self) -> list[str]:
        """Modules and classes that can be read."""
        return [f"{kind.__module__}.{kind.__qualname__}" for kind, _ in self.known]


def read(
    reader: Reader, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], around: Around
) -> tuple[Look, ...]:
    """The looks of a layer that was called with these arguments, one for each kind of heads it has."""
    given = inspect.signature(layer.forward).bind(*args, **kwargs).arguments
    return reader(layer, given, around)


def _known() -> tuple[tuple[type[nn.Module], Reader], ...]:
    if find_spec("timm") is None:
        return ((Attention, _ours),)
    from timm.layers import Attention as TimmAttention
    from timm.layers import AttentionRope as TimmAttentionRope
    from timm.models.eva import EvaAttention
    from timm.models.pvt_v2 import Attention as TimmReducedAttention
    from timm.models.swin_transformer import WindowAttention as TimmWindowAttention

    from affinear.models.inline_cswin import StripeAttention
    from affinear.models.inline_pvt import ReducedAttention
    from affinear.models.inline_swin import WindowAttention

    return (
        (Attention, _ours),
        (WindowAttention, _our_windows),
        (StripeAttention, _our_stripes),
        (ReducedAttention, _our_reduced),
        (TimmAttention, _timm),
        (TimmAttentionRope, _timm),
        (EvaAttention, _timm),
        (TimmWindowAttention, _timm_windows),
        (TimmReducedAttention, _timm_reduced),
    )


def _ours(layer: Any, given: Mapping[str, Any], around: Around) -> tuple[Look, ...]:
    x, mask = given["x"], given.get("key_mask")
    query, key, *_ = layer.project(x, given["grid"], mask)
    query, key, mechanism, rotary = layer.operands(query, key, given.get("rotary"), mask)
    scene = _scene(query, key, mechanism, given["grid"], layer.prefix_tokens)
    scene = replace(scene, rotary=rotary)
    return (Look(scene, key_mask=mask, real=mask, windows=around.windows(len(x))),)


def _our_windows(layer: Any, given: Mapping[str, Any], around: Around) -> tuple[Look, ...]:
    x, windows = given["x"], given["windows"]
    query, key, _ = layer.qkv(windows.split(x)).unflatten(-1, (3, layer.num_heads, -1)).unbind(2)
    bias, visible = layer._bias(windows.window)[None], windows.visible(x.device)
    if visible is not None:
        bias = bias.masked_fill(~visible[:, None], -torch.inf)
    scene = _scene(query, key, layer.mechanism, windows.window)
    return (Look(scene, bias, real=_real(windows, x), windows=math.prod(windows.number)),)


def _our_stripes(layer: Any, given: Mapping[str, Any], around: Around) -> tuple[Look, ...]:
    x, grid = given["x"], given["grid"]
    height, width = (min(layer.stripe, side) for side in grid)
    halves = layer.qkv(x).unflatten(1, grid).unflatten(-1, (3, 2, -1)).unbind(-2)
    found: list[Look] = []
    for half, window in zip(halves, ((grid[0], width), (height, grid[1])), strict=True):
        windows = Windows(grid, window)
        tokens = windows.split(half.flatten(-2)).unflatten(-1, (3, layer.num_heads // 2, -1))
        scene = _scene(tokens[:, :, 0], tokens[:, :, 1], layer.mechanism, window)
        real = _real(windows, x)
        found.append(Look(scene, key_mask=real, real=real, windows=math.prod(windows.number)))
    return tuple(found)


def _our_reduced(layer: Any, given: Mapping[str, Any], around: Around) -> tuple[Look, ...]:
    x, grid = given["x"], given["grid"]
    source = x
    if layer.reduction > 1:
        below, right = (max(layer.reduction - side, 0) for side in grid)
        places = nn.functional.pad(x.unflatten(1, grid).permute(0, 3, 1, 2), (0, right, 0, below))
        source = layer.norm(layer.sr(places).flatten(2).transpose(1, 2))
    query = layer.q(x).unflatten(-1, (layer.num_heads, -1))
    key = layer.kv(source).unflatten(-1, (2, layer.num_heads, -1))[:, :, 0]
    return (Look(_scene(query, key, layer.mechanism, grid if layer.reduction == 1 else None)),)


def _timm(layer: Any, given: Mapping[str, Any], around: Around) -> tuple[Look, ...]:
    x, rope = given["x"], given.get("rope")
    if layer.qkv is not None:
        query, key, _ = _timm_qkv(layer, x).unflatten(-1, (3, layer.num_heads, -1)).permute(2, 0, 3, 1, 4)
    else:
        query, key = (f(x).unflatten(-1, (-1, layer.head_dim)).transpose(1, 2) for f in (layer.q_proj, layer.k_proj))
    query, key = layer.q_norm(query), layer.k_norm(key)
    if rope is not None:
        query, key = (_turned(layer, tokens, rope) for tokens in (query, key))
    query, key = query.transpose(1, 2), key.transpose(1, 2)
    scene = _scene(query, key, "softmax", around.lies(x.shape[1]), around.prefix_tokens or 0)
    scene = replace(scene, scale=float(layer.scale))
    bias = _timm_bias(given.get("attn_mask"), given.get("is_causal", False), query)
    return (Look(scene, bias, windows=around.windows(len(x))),)


def _linearized(reader: Reader, layer: Any, given: Mapping[str, Any], around: Around) -> tuple[Look, ...]:
    """What a layer of timm's attends with once it is linear; gains and convolutions are no part of a map."""
    (look,) = reader(layer, given, around)
    if look.bias is not None:
        raise ValueError("layers: a linearized layer that was called with a mask has no map to look at")
    scene = look.scene
    query, key, mechanism = layer.linearized.operands(scene.query, scene.key, scene.scale)
    return (replace(look, scene=replace(scene, query=query, key=key, mechanism=mechanism, scale=None)),)


def _timm_qkv(layer: Any, x: Tensor) -> Tensor:
    """Queries, keys and values (B, N, 3 C); EVA keeps their biases apart."""
    if getattr(layer, "q_bias", None) is None:
        return layer.qkv(x)
    bias = torch.cat((layer.q_bias, layer.k_bias, layer.v_bias))
    return layer.qkv(x) + bias if layer.qkv_bias_separate else nn.functional.linear(x, layer.qkv.weight, bias)


def _turned(layer: Any, tokens: Tensor, rope: Tensor) -> Tensor:
    """Queries or keys (B, H, N, D) of timm, turned as timm turns them."""
    from timm.layers import apply_rot_embed_cat

    first = layer.num_prefix_tokens
    turned = apply_rot_embed_cat(tokens[:, :, first:], rope, half=getattr(layer, "rotate_half", False))
    return torch.cat((tokens[:, :, :first], turned.type_as(tokens)), dim=2)


def _timm_bias(mask: Tensor | None, causal: bool, query: Tensor) -> Tensor | None:
    """What timm adds to the scores, (1 or B, 1 or H, N, N)."""
    tokens = query.shape[1]
    if causal:
        mask = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).tril()
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, -torch.inf)
    mask = mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))
    return mask.expand(-1, -1, tokens, tokens)


def _timm_windows(layer: Any, given: Mapping[str, Any], around: Around) -> tuple[Look, ...]:
    x, mask = given["x"], given.get("mask")
    query, key, _ = layer.qkv(x).unflatten(-1, (3, layer.num_heads, -1)).unbind(2)
    bias = layer._get_rel_pos_bias()
    if mask is not None:
        bias = bias + mask[:, None]
    scene = replace(_scene(query, key, "softmax", tuple(layer.window_size)), scale=float(layer.scale))
    # timm pads after the norm, with zeros, and looks at them like at any other token.
    padding = (x == 0).all(-1)
    return (Look(scene, bias, real=~padding if padding.any() else None, windows=around.windows(len(x))),)


def _timm_reduced(layer: Any, given: Mapping[str, Any], around: Around) -> tuple[Look, ...]:
    x, (height, width) = given["x"], given["feat_size"]
    source = x
    if layer.pool is not None or layer.sr is not None:
        places = x.transpose(1, 2).unflatten(2, (height, width))
        places = layer.sr(places if layer.pool is None else layer.pool(places))
        source = layer.norm(places.flatten(2).transpose(1, 2))
        source = source if layer.pool is None else layer.act(source)
    query = layer.q(x).unflatten(-1, (layer.num_heads, -1))
    key = layer.kv(source).unflatten(-1, (2, layer.num_heads, -1))[:, :, 0]
    scene = _scene(query, key, "softmax", (int(height), int(width)) if source is x else None)
    return (Look(replace(scene, scale=float(layer.scale))),)


def _scene(
    query: Tensor, key: Tensor, mechanism: str | Mechanism, grid: tuple[int, int] | None, prefix_tokens: int = 0
) -> Scene:
    query, key = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (query, key))
    return Scene(query, key, mechanism, grid=None if grid is None else (grid[0], grid[1]), prefix_tokens=prefix_tokens)


def _real(windows: Windows, x: Tensor) -> Tensor | None:
    """Which tokens of the windows of x are not padding, (B * windows, h * w)."""
    real = windows.real(x.device)
    return None if real is None else real.repeat(len(x), 1)
