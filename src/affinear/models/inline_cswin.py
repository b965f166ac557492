"""InLine-CSwin: the CSWin transformer with InLine attention over the whole map in its first two stages.

Papers: Bridging the Divide: Reconsidering Softmax and Linear Attention, arXiv 2412.06590, NeurIPS 2024; CSWin
Transformer, arXiv 2107.00652.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from timm.layers import ClassifierHead, calculate_drop_path_rates
from timm.models import generate_default_cfgs, register_model
from torch import Tensor, nn

from .. import ops
from ..layers import INLINE, PLAIN, Attention, DepthwiseConv, Windows, blank, masked_mean
from ..ops import Mechanism
from ._config import build, config
from ._names import HEAD_NAMES, INLINE_NAMES, Rule
from ._pyramid import Block, Pyramid, Stage, pair
from ._stages import linear_blocks
from ._weights import draw

# CSWin adds a position convolution to whatever attention it uses.
LINEAR, SOFTMAX = replace(INLINE, position_kernel=3), replace(PLAIN, position_kernel=3)


class Embed(nn.Module):
    """A strided convolution and a norm, from (B, C, H, W) to a map (B, H', W', C')."""

    def __init__(self, dim: int, dim_out: int, kernel: int, stride: int, padding: int, **dd: Any) -> None:
        super().__init__()
        self.proj = nn.Conv2d(dim, dim_out, kernel, stride, padding, **dd)
        self.norm = nn.LayerNorm(dim_out, **dd)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The map; the mask (B, H, W) is False where the input is padding."""
        return self.norm(self.proj(blank(x.permute(0, 2, 3, 1), mask).permute(0, 3, 1, 2)).permute(0, 2, 3, 1))


class Downsample(Embed):
    """Halves a map that keeps its channels last; an odd side is rounded up."""

    def __init__(self, dim: int, dim_out: int, **dd: Any) -> None:
        super().__init__(dim, dim_out, 3, 2, 1, **dd)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The smaller map."""
        return super().forward(x.permute(0, 3, 1, 2), mask)


class StripeAttention(nn.Module):
    """Softmax attention in stripes: half of the heads in columns of the map, half in rows.

    Args:
        dim: Channels C.
        num_heads: Heads, an even number.
        stripe: Width of a stripe.
        dd: Device and dtype.
    """

    def __init__(self, dim: int, num_heads: int, stripe: int, **dd: Any) -> None:
        super().__init__()
        if num_heads % 2:
            raise ValueError(f"num_heads: expected an even number for attention in stripes, got {num_heads}")
        self.num_heads, self.stripe = num_heads, stripe
        self.mechanism = ops.find("softmax")
        self.qkv = nn.Linear(dim, 3 * dim, **dd)
        self.position = nn.ModuleList(DepthwiseConv(dim // 2, 3, **dd) for _ in range(2))
        self.proj = nn.Linear(dim, dim, **dd)

    def forward(
        self, x: Tensor, grid: tuple[int, int], *, key_mask: Tensor | None = None, mean: Tensor | None = None
    ) -> Tensor:
        """Tokens (B, N, C) that have looked at those in their stripes; the mean is for other kinds of attention."""
        height, width = (min(self.stripe, side) for side in grid)
        windows = Windows(grid, (grid[0], width)), Windows(grid, (height, grid[1]))
        halves = self.qkv(x).unflatten(1, grid).unflatten(-1, (3, 2, -1)).unbind(-2)
        mask = None if key_mask is None else key_mask.unflatten(1, grid)
        branches = zip(halves, windows, self.position, strict=True)
        out = [self._branch(half, cut, conv, mask) for half, cut, conv in branches]
        return self.proj(torch.cat(out, dim=-1).flatten(1, 2))

    def _branch(self, qkv: Tensor, windows: Windows, position: nn.Module, mask: Tensor | None = None) -> Tensor:
        """Maps (B, H, W, C / 2) of queries, keys and values (B, H, W, 3, C / 2)."""
        query, key, value = windows.split(blank(qkv.flatten(-2), mask)).chunk(3, dim=-1)
        heads = (self.num_heads // 2, -1)
        key_mask = windows.real_of(qkv, mask)
        lepe = position(value.unflatten(1, windows.window)).flatten(1, 2)
        query, key, value = (x.unflatten(-1, heads) for x in (query, key, value))
        return windows.join(ops.attention(query, key, value, self.mechanism, key_mask=key_mask).flatten(2) + lepe)

    def extra_repr(self) -> str:
        """What `print` shows."""
        return f"softmax (quadratic in tokens of a stripe), num_heads={self.num_heads}, stripe={self.stripe}"


class CSwinBlock(Block):
    """As released, the local residual of a linear block looks at the mean of the map before the norm."""

    def attend(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """What attention adds to the map."""
        grid = (x.shape[1], x.shape[2])
        key_mask = None if mask is None else mask.flatten(1)
        tokens = x.flatten(1, 2)
        mean = masked_mean(tokens, key_mask)
        return self.attn(self.norm1(tokens), grid, key_mask=key_mask, mean=mean).unflatten(1, grid)


class InLineCSwin(Pyramid):
    """InLine-CSwin for images of any size from 32 pixels a side.

    Sides are rounded as the convolutions do it, up but for the stem, whose 7 x 7 patches may overlap the border by two
    pixels. Linear blocks look at the whole map at every size, stripes keep their width. A stage whose stripe is as wide
    as its map at `img_size` uses no stripes at any size, nor does the last stage.

    Args:
        img_size: Side that the stripes are made for.
        in_chans: Channels of the images.
        num_classes: Classes; 0 for no classifier.
        global_pool: timm's pooling; "" for none.
        embed_dim: Channels of the first stage; each next stage has twice as many.
        depths: Blocks of each stage.
        num_heads: Heads of each stage.
        split_size: Width of the stripes of softmax blocks, of each stage.
        mlp_ratio: Hidden width of the MLP over channels.
        stage_types: One letter per stage, I for linear, S for softmax, M for mixed; see `affinear.models`.
        mechanism: Of the linear blocks: a registered name, or a `Mechanism`.
        drop_rate: Dropout before the classifier.
        drop_path_rate: Stochastic depth of the last block.
        device: Where the weights live.
        dtype: Their dtype.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        embed_dim: int = 64,
        depths: Sequence[int] = (2, 4, 18, 1),
        num_heads: Sequence[int] = (2, 4, 8, 16),
        split_size: Sequence[int] = (1, 2, 7, 7),
        mlp_ratio: float = 4.0,
        stage_types: str = "IISS",
        mechanism: str | Mechanism = "inline",
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        side = min(pair(img_size))
        linear = linear_blocks(stage_types, depths)
        rates = calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True)
        dims = [embed_dim * 2**i for i in range(len(depths))]

        def block(i: int, j: int) -> CSwinBlock:
            whole = i == len(depths) - 1 or split_size[i] == side // (4 * 2**i)
            if linear[i][j]:
                attn = Attention(dims[i], num_heads[i], LINEAR.over(mechanism), **dd)
            elif whole:
                attn = Attention(dims[i], num_heads[i], SOFTMAX, **dd)
            else:
                attn = StripeAttention(dims[i], num_heads[i], split_size[i], **dd)
            return CSwinBlock(dims[i], attn, mlp_ratio, rates[i][j], **dd)  # pyright: ignore[reportIndexIssue]

        stages = [
            Stage(Downsample(dims[i - 1], dims[i], **dd) if i else nn.Identity(), [block(i, j) for j in range(depth)])
            for i, depth in enumerate(depths)
        ]
        super().__init__(
            stem=Embed(in_chans, embed_dim, 7, 4, 2, **dd),
            stages=stages,
            norm=nn.LayerNorm(dims[-1], **dd),
            head=ClassifierHead(dims[-1], num_classes, global_pool, drop_rate, **dd),
            dims=dims,
            num_classes=num_classes,
        )
        draw(self, nn.Linear)

    stem_kept = 2

    @property
    def released_names(self) -> tuple[Rule, ...]:
        """Rules for the names of the released code, which counts branches even where there is but one."""
        single = [name for name, module in self.named_modules() if isinstance(module, Attention)]
        return (
            (r"^stage1_conv_embed\.0\.", "stem.proj."),
            (r"^stage1_conv_embed\.2\.", "stem.norm."),
            (r"^merge(\d)\.conv\.", r"stages.\1.downsample.proj."),
            (r"^merge(\d)\.norm\.", r"stages.\1.downsample.norm."),
            (r"^stage(\d)\.", lambda found: f"stages.{int(found[1]) - 1}.blocks."),
            (r"\.(qkv|proj)\.(weight|bias)$", r".attn.\1.\2"),
            (r"^(stem|.*\.downsample)\.attn\.", r"\1."),
            (r"\.attns\.(\d)\.get_v\.", r".attn.position.\1."),
            (r"\.attns\.0\.residual\.", ".attn.residual."),
            *INLINE_NAMES,
            *((re.escape(f"{name}.position.0."), f"{name}.position.") for name in single),
            *HEAD_NAMES,
        )


SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"depths": (2, 4, 18, 1)},
    "small": {"depths": (3, 6, 29, 2)},
    "base": {"depths": (3, 6, 29, 2), "embed_dim": 96, "num_heads": (4, 8, 16, 32)},
}

default_cfgs = generate_default_cfgs(
    {
        f"inline_cswin_{size}{twin}": config(paper_name="InLine", paper_ids="arXiv:2412.06590")
        for size in SIZES
        for twin in ("", "_linear")
    }
)


def _build(variant: str, pretrained: bool, given: dict[str, Any]) -> InLineCSwin:
    _, _, size, *twin = variant.split("_")
    own = {**SIZES[size], "stage_types": "IIII" if twin else "IISS"}
    return build(InLineCSwin, variant, pretrained, own, given)


@register_model
def inline_cswin_tiny(pretrained: bool = False, **given: Any) -> InLineCSwin:
    """InLine-CSwin-T, 21 million parameters."""
    return _build("inline_cswin_tiny", pretrained, given)


@register_model
def inline_cswin_small(pretrained: bool = False, **given: Any) -> InLineCSwin:
    """InLine-CSwin-S, 33 million parameters."""
    return _build("inline_cswin_small", pretrained, given)


@register_model
def inline_cswin_base(pretrained: bool = False, **given: Any) -> InLineCSwin:
    """InLine-CSwin-B, 73 million parameters."""
    return _build("inline_cswin_base", pretrained, given)


@register_model
def inline_cswin_tiny_linear(pretrained: bool = False, **given: Any) -> InLineCSwin:
    """InLine-CSwin-T with every stage linear."""
    return _build("inline_cswin_tiny_linear", pretrained, given)


@register_model
def inline_cswin_small_linear(pretrained: bool = False, **given: Any) -> InLineCSwin:
    """InLine-CSwin-S with every stage linear."""
    return _build("inline_cswin_small_linear", pretrained, given)


@register_model
def inline_cswin_base_linear(pretrained: bool = False, **given: Any) -> InLineCSwin:
    """InLine-CSwin-B with every stage linear."""
    return _build("inline_cswin_base_linear", pretrained, given)
