"""InLine-PVT: the pyramid vision transformer with InLine attention in every stage.

Papers: Bridging the Divide: Reconsidering Softmax and Linear Attention, arXiv 2412.06590, NeurIPS 2024; Pyramid Vision
Transformer, arXiv 2102.12122.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import (
    ClassifierHead,
    PatchEmbed,
    calculate_drop_path_rates,
)
from timm.models import generate_default_cfgs, register_model
from torch import Tensor, nn

from .. import ops
from ..layers import INLINE, Attention, LearnedPosition, blank
from ..ops import Mechanism
from ._config import build, config
from ._names import HEAD_NAMES, INLINE_NAMES, Rule
from ._pyramid import Block, Pyramid, Stage, pair
from ._stages import linear_blocks
from ._weights import draw

NORM_EPS = 1e-6


class Patches(nn.Module):
    """Patches of the image, or of the map before, embedded and normalised, with learned positions."""

    def __init__(self, in_chans: int, dim: int, patch_size: int, grid: tuple[int, int], **dd: Any) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.embed = PatchEmbed(None, patch_size, in_chans, dim, norm_layer=nn.LayerNorm, output_fmt="NHWC", **dd)
        self.position = LearnedPosition(grid, dim, **dd)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """A map of patches (B, H', W', C') of images (B, C, H, W) whose mask is (B, H, W)."""
        last, step = self.patch_size - 1, self.patch_size
        return self.position(self.embed(x), None if mask is None else mask[:, last::step, last::step])


class Downsample(Patches):
    """`Patches` of 2 x 2 of a map that keeps its channels last; of an odd side the last row or column is left out."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The smaller map."""
        return super().forward(x.permute(0, 3, 1, 2), mask)


class ReducedAttention(nn.Module):
    """PVT's softmax attention, whose keys and values come from a map shrunk by a strided convolution.

    Args:
        dim: Channels C.
        num_heads: Heads.
        reduction: How much smaller the map of keys is, along each side; 1 for not at all.
        dd: Device and dtype.
    """

    def __init__(self, dim: int, num_heads: int, reduction: int, **dd: Any) -> None:
        super().__init__()
        self.num_heads, self.reduction = num_heads, reduction
        self.mechanism = ops.find("softmax")
        self.q = nn.Linear(dim, dim, **dd)
        self.kv = nn.Linear(dim, 2 * dim, **dd)
        self.proj = nn.Linear(dim, dim, **dd)
        if reduction > 1:
            self.sr = nn.Conv2d(dim, dim, reduction, reduction, **dd)
            self.norm = nn.LayerNorm(dim, **dd)

    def forward(self, x: Tensor, grid: tuple[int, int], *, key_mask: Tensor | None = None) -> Tensor:
        """Tokens (B, N, C) that have looked at the smaller map; `key_mask` (B, N) is False at padding."""
        heads = (-1, self.num_heads, x.shape[-1] // self.num_heads)
        source = x
        if self.reduction > 1:
            mask = None if key_mask is None else key_mask.unflatten(1, grid)
            # A map smaller than the stride is shrunk to one place.
            missing = (0, max(self.reduction - grid[1], 0), 0, max(self.reduction - grid[0], 0))
            places = nn.functional.pad(blank(x.unflatten(1, grid), mask).permute(0, 3, 1, 2), missing)
            source = self.norm(self.sr(places).flatten(2).transpose(1, 2))
            key_mask = None if mask is None else self._shrink(mask).flatten(1)
        key, value = self.kv(source).unflatten(-1, heads).unbind(2)
        out = ops.attention(self.q(x).unflatten(-1, heads[1:]), key, value, self.mechanism, key_mask=key_mask)
        return self.proj(out.flatten(2))

    def _shrink(self, mask: Tensor) -> Tensor:
        """The mask of the smaller map, where every image has one place at least."""
        rows, columns = (
            torch.cat((side[:, :1], side[:, 2 * self.reduction - 1 :: self.reduction]), dim=1)
            for side in (mask[:, :, 0], mask[:, 0])
        )
        return rows[:, :, None] & columns[:, None, :]

    def extra_repr(self) -> str:
        """What `print` shows."""
        return f"softmax (quadratic in tokens), num_heads={self.num_heads}, reduction={self.reduction}"


class InLinePVT(Pyramid):
    """InLine-PVT for images of any size from 32 pixels a side.

    As in the released code, what is left of a side after whole patches is left out; position tables are resized to what
    comes.

    Args:
        img_size: Side, or height and width, that the position tables are made for.
        in_chans: Channels of the images.
        num_classes: Classes; 0 for no classifier.
        global_pool: timm's pooling; "" for none.
        embed_dims: Channels of each stage.
        depths: Blocks of each stage.
        num_heads: Heads of each stage.
        mlp_ratios: Hidden width of the MLP over channels, of each stage.
        sr_ratios: How much smaller, along each side, softmax stages make the map of their keys.
        stage_types: One letter per stage, I for linear and S for softmax; see `affinear.models`.
        mechanism: Of the linear blocks: a registered name, or a `Mechanism`.
        drop_rate: Dropout before the classifier.
        drop_path_rate: Stochastic depth of the last block.
        device: Where the weights live.
        dtype: Their dtype.
    """

    stem_kept = 3
    released_names: tuple[Rule, ...] = (
        (r"^patch_embed1\.", "stem.embed."),
        (r"^pos_embed1$", "stem.position.table"),
        (r"^patch_embed(\d)\.", lambda found: f"stages.{int(found[1]) - 1}.downsample.embed."),
        (r"^pos_embed(\d)$", lambda found: f"stages.{int(found[1]) - 1}.downsample.position.table"),
        (r"^block(\d)\.", lambda found: f"stages.{int(found[1]) - 1}.blocks."),
        *INLINE_NAMES,
        *HEAD_NAMES,
    )

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        embed_dims: Sequence[int] = (64, 128, 320, 512),
        depths: Sequence[int] = (2, 2, 2, 2),
        num_heads: Sequence[int] = (2, 4, 10, 16),
        mlp_ratios: Sequence[float] = (8, 8, 4, 4),
        sr_ratios: Sequence[int] = (8, 4, 2, 1),
        stage_types: str = "IIII",
        mechanism: str | Mechanism = "inline",
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        height, width = pair(img_size)
        linear = linear_blocks(stage_types, depths)
        rates = calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True)

        def block(i: int, j: int) -> Block:
            dim, heads = embed_dims[i], num_heads[i]
            if linear[i][j]:
                attn = Attention(dim, heads, INLINE.over(mechanism), **dd)
            else:
                attn = ReducedAttention(dim, heads, sr_ratios[i], **dd)
            return Block(dim, attn, mlp_ratios[i], rates[i][j], NORM_EPS, **dd)  # pyright: ignore[reportIndexIssue]

        stages: list[Stage] = []
        for i, dim in enumerate(embed_dims):
            grid = (height // (4 * 2**i), width // (4 * 2**i))
            downsample = Downsample(embed_dims[i - 1], dim, 2, grid, **dd) if i else nn.Identity()
            stages.append(Stage(downsample, [block(i, j) for j in range(depths[i])], kept=1))
        super().__init__(
            stem=Patches(in_chans, embed_dims[0], 4, (height // 4, width // 4), **dd),
            stages=stages,
            norm=nn.Identity(),
            head=ClassifierHead(embed_dims[-1], num_classes, global_pool, drop_rate, **dd),
            dims=embed_dims,
            num_classes=num_classes,
        )
        draw(self, nn.Linear)

    def no_weight_decay(self) -> set[str]:
        """The position tables."""
        return {name for name, _ in self.named_parameters() if name.endswith("position.table")}


SIZES = {"tiny": (2, 2, 2, 2), "small": (3, 4, 6, 3), "medium": (3, 4, 18, 3), "large": (3, 8, 27, 3)}

default_cfgs = generate_default_cfgs(
    {
        f"inline_pvt_{size}": config(first_conv="stem.embed.proj", paper_name="InLine", paper_ids="arXiv:2412.06590")
        for size in SIZES
    }
)


def _build(variant: str, pretrained: bool, given: dict[str, Any]) -> InLinePVT:
    return build(InLinePVT, variant, pretrained, {"depths": SIZES[variant.rsplit("_", 1)[1]]}, given)


@register_model
def inline_pvt_tiny(pretrained: bool = False, **given: Any) -> InLinePVT:
    """InLine-PVT-T, 12 million parameters."""
    return _build("inline_pvt_tiny", pretrained, given)


@register_model
def inline_pvt_small(pretrained: bool = False, **given: Any) -> InLinePVT:
    """InLine-PVT-S, 22 million parameters."""
    return _build("inline_pvt_small", pretrained, given)


@register_model
def inline_pvt_medium(pretrained: bool = False, **given: Any) -> InLinePVT:
    """InLine-PVT-M, 38 million parameters."""
    return _build("inline_pvt_medium", pretrained, given)


@register_model
def inline_pvt_large(pretrained: bool = False, **given: Any) -> InLinePVT:
    """InLine-PVT-L, 51 million parameters."""
    return _build("inline_pvt_large", pretrained, given)
