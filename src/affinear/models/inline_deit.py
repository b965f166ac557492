"""InLine-DeiT: the DeiT vision transformer with InLine attention in every block.

Papers: Bridging the Divide: Reconsidering Softmax and Linear Attention, arXiv 2412.06590, NeurIPS 2024; Training
data-efficient image transformers, arXiv 2012.12877. Heads are twice as many as DeiT's, widths of S and B smaller.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import (
    DropPath,
    Mlp,
    PatchEmbed,
    calculate_drop_path_rates,
)
from timm.models import generate_default_cfgs, register_model, register_notrace_module
from timm.models._features import feature_take_indices
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..layers import INLINE, AddNorm, Attention, LearnedPosition, blank
from ..ops import Mechanism
from ._column import Column
from ._config import build, config
from ._names import INLINE_NAMES
from ._pyramid import describe, pair
from ._stages import linear_blocks
from ._weights import draw

NORM_EPS = 1e-6


class Block(nn.Module):
    """Attention and MLP, each added to the tokens."""

    def __init__(
        self, dim: int, num_heads: int, mechanism: str | Mechanism, mlp_ratio: float, drop_path: float, **dd: Any
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=NORM_EPS, **dd)
        self.attn = Attention(dim, num_heads, INLINE.over(mechanism), prefix_tokens=1, **dd)
        self.norm2 = AddNorm(dim, eps=NORM_EPS, **dd)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), **dd)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor, grid: tuple[int, int], key_mask: Tensor | None = None) -> Tensor:
        """Tokens (B, N, C), the class token first; where `key_mask` (B, N) is False there is none."""
        x, normed = self.norm2(x, self.drop_path(self.attn(self.norm1(x), grid, key_mask=key_mask)))
        return x + self.drop_path(self.mlp(normed))


register_notrace_module(Block)  # torch.fx takes a block as one node


class InLineDeiT(Column):
    """InLine-DeiT for images of any size from 32 pixels a side.

    Sides that patches do not divide get zeros below and to the right; the position table is resized to what comes.

    Args:
        img_size: Side, or height and width, that the position table is made for.
        patch_size: Side of a patch.
        in_chans: Channels of the images.
        num_classes: Classes; 0 for no classifier.
        global_pool: "token" for the class token, "avg" for the mean of the patches, "" for all tokens.
        embed_dim: Channels.
        depth: Blocks.
        num_heads: Heads.
        mlp_ratio: Hidden width of the MLP over channels.
        stage_types: "I" for linear, "S" for softmax, "M" and a number for that many linear blocks before softmax.
        mechanism: Of the linear blocks: a registered name, or a `Mechanism`.
        drop_rate: Dropout before the classifier.
        drop_path_rate: Stochastic depth of the last block.
        device: Where the weights live.
        dtype: Their dtype.

    Example:
        >>> import timm, torch
        >>> import affinear.models
        >>> model = timm.create_model("inline_deit_tiny", num_classes=10).eval()
        >>> model(torch.randn(1, 3, 64, 100)).shape
        torch.Size([1, 10])
    """

    released_names = INLINE_NAMES

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "token",
        embed_dim: int = 192,
        depth: int = 12,
        num_heads: int = 6,
        mlp_ratio: float = 4.0,
        stage_types: str = "I",
        mechanism: str | Mechanism = "inline",
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        self.num_classes, self.global_pool = num_classes, self.check_pool(global_pool)
        self.num_features = self.head_hidden_size = self.embed_dim = embed_dim
        self.num_prefix_tokens, self.patch_size = 1, patch_size
        self.grad_checkpointing = False
        self.feature_info = [
            {"num_chs": embed_dim, "reduction": patch_size, "module": f"blocks.{i}"} for i in range(depth)
        ]
        self.patch_embed = PatchEmbed(
            None, patch_size, in_chans, embed_dim, output_fmt="NHWC", dynamic_img_pad=True, **dd
        )
        height, width = pair(img_size)
        self.position = LearnedPosition((-(-height // patch_size), -(-width // patch_size)), embed_dim, **dd)
        self.cls_token = nn.Parameter(torch.empty(1, 1, embed_dim, **dd))
        self.cls_position = nn.Parameter(torch.empty(1, 1, embed_dim, **dd))
        (linear,) = linear_blocks(stage_types, [depth])
        rates = calculate_drop_path_rates(drop_path_rate, depth)
        self.blocks = nn.ModuleList(
            Block(embed_dim, num_heads, mechanism if linear[i] else "softmax", mlp_ratio, rates[i], **dd)  # pyright: ignore[reportArgumentType]
            for i in range(depth)
        )
        self.norm = nn.LayerNorm(embed_dim, eps=NORM_EPS, **dd)
        self.head_drop = nn.Dropout(drop_rate)
        self.head = nn.Linear(embed_dim, num_classes, **dd) if num_classes else nn.Identity()
        draw(self, nn.Linear)
        for token in (self.cls_token, self.cls_position):
            nn.init.normal_(token, std=0.02)

    @staticmethod
    def check_pool(global_pool: str) -> str:
        """The pooling, if it is one that a transformer with a class token has."""
        if global_pool not in ("token", "avg", ""):
            raise ValueError(f"global_pool: expected 'token', 'avg' or '', got {global_pool!r}")
        return global_pool

    def no_weight_decay(self) -> set[str]:
        """Parameters that timm's optimizers leave out of weight decay, beside biases and norms."""
        return {"position.table", "cls_token", "cls_position"}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """How parameters group into layers, for layer-wise learning rates."""
        return {
            "stem": r"^cls_token|^cls_position|^position|^patch_embed",
            "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))],
        }

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        mask: Tensor | None = None,
    ) -> Any:
        """The blocks' outputs, and the final features unless `intermediates_only`.

        Args:
            x: Images (B, 3, H, W).
            indices: Blocks to return; the last so many if a number, all if None.
            return_prefix_tokens: Whether to return the class token beside each.
            norm: Whether the final norm is applied to each.
            stop_early: Whether to skip blocks that are not asked for.
            output_fmt: "NCHW" for maps, "NLC" for tokens.
            intermediates_only: Whether to leave the final features out.
            mask: (B, H, W), boolean, as `affinear.layers.mask_of` makes it: False where the batch is padding. An
                image's tokens then are those it has alone, and zeros beyond.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"output_fmt: expected 'NCHW' or 'NLC', got {output_fmt!r}")
        wanted, last = feature_take_indices(len(self.blocks), indices)  # pyright: ignore[reportArgumentType]
        x, grid, key_mask = self._tokens(x, mask)
        taken: list[Tensor] = []
        for i, block in enumerate(self.blocks):
            if stop_early and i > last:
                break
            x = self._run(block, x, grid, key_mask)
            if i in wanted:
                taken.append(blank(self.norm(x) if norm else x, key_mask))
        outputs: list[Any] = [tokens[:, 1:] for tokens in taken]
        if output_fmt == "NCHW":
            outputs = [tokens.transpose(1, 2).unflatten(2, grid) for tokens in outputs]
        if return_prefix_tokens:
            outputs = [(out, tokens[:, :1]) for out, tokens in zip(outputs, taken, strict=True)]
        return outputs if intermediates_only else (blank(self.norm(x), key_mask), outputs)

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop what the given blocks do not need."""
        wanted, last = feature_take_indices(len(self.blocks), indices)  # pyright: ignore[reportArgumentType]
        self.blocks = self.blocks[: last + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return wanted

    def forward_features(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Tokens (B, 1 + N, C) of images (B, 3, H, W), class token first; of a mask, see `forward_intermediates`."""
        x, grid, key_mask = self._tokens(x, mask)
        for block in self.blocks:
            x = self._run(block, x, grid, key_mask)
        return blank(self.norm(x), key_mask)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Logits (B, num_classes) of tokens, or what the classifier would see."""
        if self.global_pool == "token":
            x = x[:, 0]
        elif self.global_pool == "avg":
            x = x[:, 1:].mean(dim=1)
        x = self.head_drop(x)
        return x if pre_logits else self.head(x)

    def masks_of(self, mask: Tensor) -> list[Tensor]:
        """The masks of the blocks' maps for one (B, H, W) of the images."""
        return [mask[:, :: self.patch_size, :: self.patch_size]] * len(self.blocks)

    def _tokens(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, tuple[int, int], Tensor | None]:
        """Patches with their positions, after the class token, their grid, and which of them are image."""
        x = blank(x.permute(0, 2, 3, 1), mask).permute(0, 3, 1, 2)
        mask = None if mask is None else mask[:, :: self.patch_size, :: self.patch_size]
        x = self.position(self.patch_embed(x), mask)
        grid = (x.shape[1], x.shape[2])
        first = (self.cls_token + self.cls_position).expand(x.shape[0], -1, -1)
        key_mask = None if mask is None else F.pad(mask.flatten(1), (1, 0), value=True)
        return torch.cat((first, x.flatten(1, 2)), dim=1), grid, key_mask

    def _run(self, block: nn.Module, x: Tensor, grid: tuple[int, int], key_mask: Tensor | None) -> Tensor:
        if self.grad_checkpointing:
            return checkpoint(block, x, grid, key_mask, use_reentrant=False)
        return block(x, grid, key_mask)

    def extra_repr(self) -> str:
        """What `print` shows: which blocks are linear."""
        return describe(self)


SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"img_size": 224, "embed_dim": 192, "num_heads": 6},
    "small": {"img_size": 288, "embed_dim": 320, "num_heads": 10},
    "base": {"img_size": 448, "embed_dim": 384, "num_heads": 12},
}

default_cfgs = generate_default_cfgs(
    {
        f"inline_deit_{size}": config(
            settings["img_size"],
            pool_size=None,
            first_conv="patch_embed.proj",
            classifier="head",
            paper_name="InLine",
            paper_ids="arXiv:2412.06590",
        )
        for size, settings in SIZES.items()
    }
)


def _build(variant: str, pretrained: bool, given: dict[str, Any]) -> InLineDeiT:
    return build(InLineDeiT, variant, pretrained, SIZES[variant.rsplit("_", 1)[1]], given, features=4)


@register_model
def inline_deit_tiny(pretrained: bool = False, **given: Any) -> InLineDeiT:
    """InLine-DeiT-T at 224 pixels, 6 million parameters."""
    return _build("inline_deit_tiny", pretrained, given)


@register_model
def inline_deit_small(pretrained: bool = False, **given: Any) -> InLineDeiT:
    """InLine-DeiT-S at 288 pixels, 17 million parameters."""
    return _build("inline_deit_small", pretrained, given)


@register_model
def inline_deit_base(pretrained: bool = False, **given: Any) -> InLineDeiT:
    """InLine-DeiT-B at 448 pixels, 24 million parameters."""
    return _build("inline_deit_base", pretrained, given)
