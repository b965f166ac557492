"""InLine-Swin: the Swin transformer with InLine attention in its early stages, in windows as large as the map.

Papers: Bridging the Divide: Reconsidering Softmax and Linear Attention, arXiv 2412.06590, NeurIPS 2024; Swin
Transformer, arXiv 2103.14030.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import ClassifierHead, calculate_drop_path_rates
from timm.layers import PatchEmbed as TimmPatchEmbed
from timm.models import generate_default_cfgs, register_model
from timm.models.swin_transformer import PatchMerging as TimmPatchMerging
from torch import Tensor, nn
from torch.nn import functional as F

from .. import ops
from ..layers import INLINE, Attention, Windows, blank
from ..ops import Mechanism
from ._config import build, config
from ._names import HEAD_NAMES, INLINE_NAMES, Rule
from ._pyramid import Block, Pyramid, Stage, pair
from ._stages import linear_blocks
from ._weights import draw


class PatchEmbed(TimmPatchEmbed):
    """timm's patches, told what of the images is padding."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """A map of patches (B, H', W', C')."""
        return super().forward(blank(x.permute(0, 2, 3, 1), mask).permute(0, 3, 1, 2))


class PatchMerging(TimmPatchMerging):
    """timm's merging of 2 x 2 patches, told what of the map is padding; an odd side is rounded up."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The smaller map."""
        return super().forward(blank(x, mask))


class WindowAttention(nn.Module):
    """Softmax attention within windows, with a learned bias for every displacement.

    Args:
        dim: Channels C.
        num_heads: Heads.
        window: Rows and columns of the largest window; smaller ones use the middle of the same table.
        dd: Device and dtype.
    """

    def __init__(self, dim: int, num_heads: int, window: tuple[int, int], **dd: Any) -> None:
        super().__init__()
        self.num_heads, self.window = num_heads, window
        self.mechanism = ops.find("softmax")
        displacements = (2 * window[0] - 1) * (2 * window[1] - 1)
        self.relative_position_bias_table = nn.Parameter(torch.empty(displacements, num_heads, **dd))
        nn.init.normal_(self.relative_position_bias_table, std=0.02)
        self.qkv = nn.Linear(dim, 3 * dim, **dd)
        self.proj = nn.Linear(dim, dim, **dd)

    def forward(self, x: Tensor, windows: Windows, mask: Tensor | None = None) -> Tensor:
        """Maps (B, H, W, C) whose tokens have looked at those in their window; the mask is False at padding."""
        tokens = windows.split(x)
        query, key, value = self.qkv(tokens).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        bias = self._bias(windows.window)
        visible = windows.visible(x.device, mask)
        if visible is not None:
            bias = bias.masked_fill(~visible[:, None], float("-inf"))
            bias = bias if mask is not None else bias.repeat(x.shape[0], 1, 1, 1)
        out = F.scaled_dot_product_attention(query, key, value, bias.to(query.dtype))
        return windows.join(self.proj(out.transpose(1, 2).flatten(2)))

    def _bias(self, window: tuple[int, int]) -> Tensor:
        """(heads, h * w, h * w) for a window of this size."""
        device = self.relative_position_bias_table.device
        row, column = (torch.arange(side, device=device) for side in window)
        row = row[:, None] - row + self.window[0] - 1
        column = column[:, None] - column + self.window[1] - 1
        index = row[:, None, :, None] * (2 * self.window[1] - 1) + column[None, :, None, :]
        return self.relative_position_bias_table[index.flatten(2).flatten(0, 1)].permute(2, 0, 1)

    def extra_repr(self) -> str:
        """What `print` shows."""
        return f"softmax (quadratic in tokens of a window), num_heads={self.num_heads}, window={self.window}"


class SwinBlock(Block):
    """Attention in windows, and MLP.

    Args:
        dim: Channels C.
        attn: `Attention` for a linear block, `WindowAttention` for a softmax block.
        window: Rows and columns of a window; None for the whole map, whatever its size.
        shifted: Whether windows are displaced by half where the map has more than one.
        mlp_ratio: Hidden width of the MLP over C.
        drop_path: Stochastic depth.
        dd: Device and dtype.
    """

    def __init__(
        self,
        dim: int,
        attn: nn.Module,
        window: tuple[int, int] | None,
        shifted: bool,
        mlp_ratio: float,
        drop_path: float,
        **dd: Any,
    ) -> None:
        super().__init__(dim, attn, mlp_ratio, drop_path, **dd)
        self.window, self.shifted = window, shifted

    def attend(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """What attention adds to the map."""
        grid = (x.shape[1], x.shape[2])
        windows = self._windows(grid)
        x = self.norm1(x.flatten(1, 2)).unflatten(1, grid)
        if isinstance(self.attn, WindowAttention):
            return self.attn(x, windows, mask)
        # As released: linear windows that wrap around the border are attended as if they did not.
        key_mask = windows.real_of(x, mask)
        return windows.join(self.attn(windows.split(x), windows.window, key_mask=key_mask))

    def _windows(self, size: tuple[int, int]) -> Windows:
        if self.window is None:
            return Windows(size, size)
        height, width = (min(side, most) for side, most in zip(size, self.window, strict=True))
        # One window along a side leaves nothing to be displaced.
        down, right = (
            w // 2 if self.shifted and side > w else 0 for side, w in zip(size, (height, width), strict=True)
        )
        return Windows(size, (height, width), (down, right))


class InLineSwin(Pyramid):
    """InLine-Swin for images of any size from 32 pixels a side.

    Sides that patches or windows do not divide get zeros below and to the right; no token sees those of windows. Linear
    blocks whose window covers the map at `img_size` cover it at every size. Softmax windows keep their size, or shrink
    to the map.

    Args:
        img_size: Side, or height and width, that the windows are made for.
        in_chans: Channels of the images.
        num_classes: Classes; 0 for no classifier.
        global_pool: timm's pooling; "" for none.
        embed_dim: Channels of the first stage; each next stage has twice as many.
        depths: Blocks of each stage.
        num_heads: Heads of each stage.
        window_size: Side of the windows of linear blocks; those of softmax blocks are max(7, window_size // 8).
        mlp_ratio: Hidden width of the MLP over channels.
        stage_types: One letter per stage, I for linear, S for softmax, M for mixed; see `affinear.models`.
        mechanism: Of the linear blocks: a registered name, or a `Mechanism`.
        drop_rate: Dropout before the classifier.
        drop_path_rate: Stochastic depth of the last block.
        device: Where the weights live.
        dtype: Their dtype.
    """

    released_names: tuple[Rule, ...] = (
        (r"\.(attn_mask|relative_position_index)$", None),
        (r"^patch_embed\.", "stem."),
        (r"^layers\.(\d+)\.downsample\.", lambda found: f"stages.{int(found[1]) + 1}.downsample."),
        (r"^layers\.", "stages."),
        *INLINE_NAMES,
        *HEAD_NAMES,
    )

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        embed_dim: int = 96,
        depths: Sequence[int] = (2, 2, 6, 2),
        num_heads: Sequence[int] = (3, 6, 12, 24),
        window_size: int = 56,
        mlp_ratio: float = 4.0,
        stage_types: str = "IIIS",
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
        dims = [embed_dim * 2**i for i in range(len(depths))]

        def block(i: int, j: int) -> SwinBlock:
            shortest = min(-(-height // (4 * 2**i)), -(-width // (4 * 2**i)))
            side = window_size if linear[i][j] else min(max(7, window_size // 8), shortest)
            window = (side, side)
            if linear[i][j]:
                attn = Attention(dims[i], num_heads[i], INLINE.over(mechanism), **dd)
            else:
                attn = WindowAttention(dims[i], num_heads[i], window, **dd)
            whole = linear[i][j] and side >= shortest
            rate: float = rates[i][j]  # pyright: ignore[reportIndexIssue, reportAssignmentType]
            return SwinBlock(dims[i], attn, None if whole else window, j % 2 == 1, mlp_ratio, rate, **dd)

        stages = [
            Stage(PatchMerging(dims[i - 1], **dd) if i else nn.Identity(), [block(i, j) for j in range(depth)])
            for i, depth in enumerate(depths)
        ]
        super().__init__(
            stem=PatchEmbed(
                None, 4, in_chans, embed_dim, norm_layer=nn.LayerNorm, output_fmt="NHWC", dynamic_img_pad=True, **dd
            ),
            stages=stages,
            norm=nn.LayerNorm(dims[-1], **dd),
            head=ClassifierHead(dims[-1], num_classes, global_pool, drop_rate, **dd),
            dims=dims,
            num_classes=num_classes,
        )
        draw(self, nn.Linear)

    def no_weight_decay(self) -> set[str]:
        """The tables of relative positions."""
        return {name for name, _ in self.named_parameters() if name.endswith("relative_position_bias_table")}


SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"depths": (2, 2, 6, 2), "stage_types": "IIIS"},
    "small": {"depths": (2, 2, 18, 2), "stage_types": "IISS"},
    "base": {"depths": (2, 2, 18, 2), "stage_types": "IIMS2", "embed_dim": 128, "num_heads": (4, 8, 16, 32)},
}

default_cfgs = generate_default_cfgs(
    {
        f"inline_swin_{size}{twin}": config(paper_name="InLine", paper_ids="arXiv:2412.06590")
        for size in SIZES
        for twin in ("", "_linear")
    }
)


def _build(variant: str, pretrained: bool, given: dict[str, Any]) -> InLineSwin:
    _, _, size, *twin = variant.split("_")
    own = {**SIZES[size], "stage_types": "IIII"} if twin else SIZES[size]
    return build(InLineSwin, variant, pretrained, own, given)


@register_model
def inline_swin_tiny(pretrained: bool = False, **given: Any) -> InLineSwin:
    """InLine-Swin-T, 29 million parameters."""
    return _build("inline_swin_tiny", pretrained, given)


@register_model
def inline_swin_small(pretrained: bool = False, **given: Any) -> InLineSwin:
    """InLine-Swin-S, 50 million parameters."""
    return _build("inline_swin_small", pretrained, given)


@register_model
def inline_swin_base(pretrained: bool = False, **given: Any) -> InLineSwin:
    """InLine-Swin-B, 88 million parameters."""
    return _build("inline_swin_base", pretrained, given)


@register_model
def inline_swin_tiny_linear(pretrained: bool = False, **given: Any) -> InLineSwin:
    """InLine-Swin-T with every stage linear."""
    return _build("inline_swin_tiny_linear", pretrained, given)


@register_model
def inline_swin_small_linear(pretrained: bool = False, **given: Any) -> InLineSwin:
    """InLine-Swin-S with every stage linear."""
    return _build("inline_swin_small_linear", pretrained, given)


@register_model
def inline_swin_base_linear(pretrained: bool = False, **given: Any) -> InLineSwin:
    """InLine-Swin-B with every stage linear."""
    return _build("inline_swin_base_linear", pretrained, given)
