"""MAViT: convolutional stem, four stages of magnitude-aware linear attention and softmax, projection head.

Paper: Rectifying Magnitude Neglect in Linear Attention, arXiv 2507.00698, ICCV 2025.

The released networks are linear in the first two stages only, rotate features in the numerator but not in the
normaliser, and add 1e-6 to it; `mala_released` is that arithmetic, and the default, because their weights need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import ClassifierHead, DropPath, LayerScale, calculate_drop_path_rates
from timm.models import generate_default_cfgs, register_model
from torch import Tensor, nn

from ..layers import MALA, AddNorm, Attention, AxialRotary, DepthwiseConv, blank, masked_norm
from ..ops import Mechanism
from ._config import build, config
from ._names import HEAD_NAMES, Rule
from ._pyramid import Pyramid, Stage
from ._stages import linear_blocks
from ._weights import draw

NORM_EPS = 1e-6


class ConvStem(nn.Sequential):
    """Four 3 x 3 convolutions, of strides 2, 1, 1, 2, from images (B, 3, H, W) to maps (B, H / 4, W / 4, C).

    Args:
        in_chans: Channels of the images.
        dim: Channels C; half of them until the second stride.
        early: Whether that is the third convolution's and not the last one's.
        dd: Device and dtype.
    """

    def __init__(self, in_chans: int, dim: int, early: bool = False, **dd: Any) -> None:
        half = dim // 2
        super().__init__()
        late = ((half, dim, 2), (dim, dim, 1)) if early else ((half, half, 1), (half, dim, 2))
        sizes = ((in_chans, half, 2), (half, half, 1), *late)
        for i, (before, after, stride) in enumerate(sizes):
            self.add_module(f"conv{i}", nn.Conv2d(before, after, 3, stride, 1, **dd))
            self.add_module(f"norm{i}", nn.BatchNorm2d(after, **dd))
            if i < 3:
                self.add_module(f"act{i}", nn.GELU())

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        """The map, channels last; the mask (B, H, W) is that of the images."""
        # From here on channels are last in memory too, whatever the images are: norms and products want them so.
        x = input.contiguous(memory_format=torch.channels_last)
        if mask is None:
            return super().forward(x).permute(0, 2, 3, 1)
        for layer in self:
            if isinstance(layer, nn.Conv2d):
                x = layer(blank(x.permute(0, 2, 3, 1), mask).permute(0, 3, 1, 2))
                mask = mask[:, :: layer.stride[0], :: layer.stride[1]]
            else:
                x = layer(x) if isinstance(layer, nn.GELU) else masked_norm(layer, x, mask)
        return x.permute(0, 2, 3, 1)


class Downsample(nn.Module):
    """A 3 x 3 convolution of stride 2 and a batch norm, from map to map; an odd side is rounded up."""

    def __init__(self, dim: int, dim_out: int, **dd: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(dim, dim_out, 3, 2, 1, **dd)
        self.norm = nn.BatchNorm2d(dim_out, **dd)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The smaller map; the mask is that of the map before."""
        x = self.conv(blank(x, mask).permute(0, 3, 1, 2))
        return masked_norm(self.norm, x, None if mask is None else mask[:, ::2, ::2]).permute(0, 2, 3, 1)


class ConvMlp(nn.Module):
    """Two linear layers with a residual depthwise convolution between them."""

    def __init__(self, dim: int, hidden: int, **dd: Any) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden, **dd)
        self.act = nn.GELU()
        self.conv = DepthwiseConv(hidden, 3, **dd)
        self.fc2 = nn.Linear(hidden, dim, **dd)

    def forward(self, x: Tensor, grid: tuple[int, int], mask: Tensor | None = None) -> Tensor:
        """As many tokens (B, N, C); where the mask (B, H, W) of their grid is False there is no image."""
        places = self.act(self.fc1(x)).unflatten(1, grid)
        return self.fc2(self.conv(places, mask, itself=True).flatten(1, 2))


class Block(nn.Module):
    """Position convolution, attention and MLP, each added to the map.

    Between its convolutions a block computes with tokens (B, N, C), which compilers keep for backward as they lie; see
    `ops.depthwise` about maps.

    Args:
        dim: Channels C.
        attn: Takes tokens (B, N, C), their grid, and what the stage knows of places as `rotary`.
        mlp: Takes tokens (B, N, C), their grid, and the mask of the map.
        drop_path: Stochastic depth.
        init_values: Start of the layer scale; None for no scale.
        second_position: Whether a position convolution stands before the MLP too.
        eps: Of the norms.
        dd: Device and dtype.
    """

    def __init__(
        self,
        dim: int,
        attn: nn.Module,
        mlp: nn.Module,
        drop_path: float,
        init_values: float | None = None,
        second_position: bool = False,
        eps: float = NORM_EPS,
        **dd: Any,
    ) -> None:
        super().__init__()
        self.position1 = DepthwiseConv(dim, 3, **dd)
        self.norm1 = nn.LayerNorm(dim, eps=eps, **dd)
        self.attn = attn
        self.scale1 = nn.Identity() if init_values is None else LayerScale(dim, init_values, **dd)
        self.position2 = DepthwiseConv(dim, 3, **dd) if second_position else None
        self.norm2 = (nn.LayerNorm if second_position else AddNorm)(dim, eps=eps, **dd)
        self.mlp = mlp
        self.scale2 = nn.Identity() if init_values is None else LayerScale(dim, init_values, **dd)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor, mask: Tensor | None, rotary: tuple[Tensor, ...]) -> Tensor:
        """A map of the same size."""
        grid = (x.shape[1], x.shape[2])
        tokens = self.position1(x, mask, itself=True).flatten(1, 2)
        key_mask = None if mask is None else mask.flatten(1)
        out = self.drop_path(self.scale1(self.attn(self.norm1(tokens), grid, rotary=rotary, key_mask=key_mask)))
        if self.position2 is None:
            tokens, normed = self.norm2(tokens, out)
        else:
            tokens = self.position2((tokens + out).unflatten(1, grid), mask, itself=True).flatten(1, 2)
            normed = self.norm2(tokens)
        return (tokens + self.drop_path(self.scale2(self.mlp(normed, grid, mask)))).unflatten(1, grid)


class ProjectionHead(ClassifierHead):
    """A wide projection, batch norm and SiLU at every place of the map; then pooling and the classifier."""

    def __init__(self, dim: int, hidden: int, num_classes: int, pool_type: str, drop_rate: float, **dd: Any) -> None:
        super().__init__(hidden, num_classes, pool_type, drop_rate, **dd)
        self.proj = nn.Linear(dim, hidden, **dd)
        self.norm = nn.BatchNorm2d(hidden, **dd)
        self.act = nn.SiLU()

    def forward(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Logits of features (B, C, H, W)."""
        x = self.proj(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return super().forward(self.act(self.norm(x)), pre_logits)


# Of the released networks with this skeleton, whoever wrote them; no two names mean different things.
SKELETON_NAMES: tuple[Rule, ...] = (
    *((rf"^patch_embed\.proj\.{3 * i}\.", f"stem.conv{i}.") for i in range(4)),
    *((rf"^patch_embed\.proj\.{3 * i + 1}\.", f"stem.norm{i}.") for i in range(4)),
    (r"^layers\.\d+\.(RoPE|Relpos)\.\w+$", None),
    (r"^layers\.(\d+)\.downsample\.reduction\.", lambda found: f"stages.{int(found[1]) + 1}.downsample.conv."),
    (r"^layers\.(\d+)\.downsample\.norm\.", lambda found: f"stages.{int(found[1]) + 1}.downsample.norm."),
    (r"^layers\.(\d+)\.blocks\.", r"stages.\1.blocks."),
    (r"\.(pos|lepe|dwconv)\.conv\.", r".\1."),
    (r"\.pos\.", ".position1."),
    (r"\.cpe(\d)\.", r".position\1."),
    (r"\.gamma_(\d)$", r".scale\1.gamma"),
    (r"\.norm(\d)\.norm\.", r".norm\1."),
    (r"\.retention_layer_norm\.", ".norm1."),
    (r"\.final_layer_norm\.", ".norm2."),
    (r"\.retention\.", ".attn."),
    (r"\.attn\.lepe\.", ".attn.position."),
    (r"\.attn\.qkv[go]\.", ".attn.qkv."),
    (r"\.attn\.([qkv])_proj\.", r".attn.\1."),
    (r"\.attn\.ln\.", ".attn.norm."),
    (r"\.attn\.out_proj\.", ".attn.proj."),
    (r"\.ffn\.dwconv\.", ".mlp.conv."),
    (r"\.ffn\.", ".mlp."),
    *HEAD_NAMES,
    (r"^(proj|norm)\.", r"head.\1."),
)


class MAViT(Pyramid):
    """MAViT for images of any size from 32 pixels a side; sides are rounded up at every stride.

    Args:
        in_chans: Channels of the images.
        num_classes: Classes; 0 for no classifier.
        global_pool: timm's pooling; "" for none.
        embed_dims: Channels of each stage.
        depths: Blocks of each stage.
        num_heads: Heads of each stage.
        mlp_ratios: Hidden width of the MLP over channels, of each stage.
        projection: Width of the head's projection.
        stage_types: One letter per stage, l for linear and v for softmax; see `affinear.models`.
        mechanism: Of the linear blocks: a registered name, or a `Mechanism`.
        init_values: Start of the layer scale, of each stage.
        drop_rate: Dropout before the classifier.
        drop_path_rate: Stochastic depth of the last block.
        device: Where the weights live.
        dtype: Their dtype.

    Example:
        >>> import timm, torch
        >>> import affinear.models
        >>> model = timm.create_model("mavit_tiny", num_classes=10, drop_path_rate=0.2).eval()
        >>> model(torch.randn(1, 3, 64, 96)).shape
        torch.Size([1, 10])
    """

    parts = MALA
    second_position = False
    drawn: tuple[type[nn.Linear | nn.Conv2d], ...] = (nn.Linear, nn.Conv2d)
    released_names: tuple[Rule, ...] = SKELETON_NAMES

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        embed_dims: Sequence[int] = (64, 128, 256, 512),
        depths: Sequence[int] = (2, 2, 6, 2),
        num_heads: Sequence[int] = (1, 2, 4, 8),
        mlp_ratios: Sequence[float] = (3.5, 3.5, 3.5, 3.5),
        projection: int = 2048,
        stage_types: str = "llvv",
        mechanism: str | Mechanism = "mala_released",
        init_values: Sequence[float] = (1.0, 1.0, 1.0, 1.0),
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        linear = linear_blocks(stage_types, depths)
        rates = calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True)
        stages: list[Stage] = []
        for i, (dim, heads) in enumerate(zip(embed_dims, num_heads, strict=True)):
            blocks = [
                Block(
                    dim,
                    Attention(dim, heads, self.parts.over(mechanism if linear[i][j] else "softmax"), **dd),
                    ConvMlp(dim, int(dim * mlp_ratios[i]), **dd),
                    rates[i][j],  # pyright: ignore[reportIndexIssue]
                    init_values[i],
                    self.second_position,
                    **dd,
                )
                for j in range(depths[i])
            ]
            downsample = Downsample(embed_dims[i - 1], dim, **dd) if i else nn.Identity()
            stages.append(Stage(downsample, blocks, AxialRotary(dim // heads)))
        super().__init__(
            stem=ConvStem(in_chans, embed_dims[0], **dd),
            stages=stages,
            norm=nn.Identity(),
            head=ProjectionHead(embed_dims[-1], projection, num_classes, global_pool, drop_rate, **dd),
            dims=embed_dims,
            num_classes=num_classes,
            head_hidden_size=projection,
        )
        draw(self, *self.drawn)


SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"embed_dims": (64, 128, 256, 512), "depths": (2, 2, 6, 2), "num_heads": (1, 2, 4, 8)},
    "small": {"embed_dims": (64, 128, 320, 512), "depths": (3, 5, 9, 3), "num_heads": (1, 2, 5, 8)},
    "base": {
        "embed_dims": (96, 192, 384, 512),
        "depths": (4, 6, 12, 6),
        "num_heads": (1, 2, 6, 8),
        "init_values": (1.0, 1.0, 1e-6, 1e-6),
    },
    "large": {
        "embed_dims": (96, 192, 448, 640),
        "depths": (4, 7, 19, 8),
        "num_heads": (1, 2, 7, 10),
        "init_values": (1e-6, 1e-6, 1e-6, 1e-6),
        "projection": 2560,
    },
}

default_cfgs = generate_default_cfgs(
    {
        f"mavit_{size}{twin}": config(first_conv="stem.conv0", paper_name="MALA", paper_ids="arXiv:2507.00698")
        for size in SIZES
        for twin in ("", "_linear")
    }
)


def _build(variant: str, pretrained: bool, given: dict[str, Any]) -> MAViT:
    _, size, *twin = variant.split("_")
    own = {**SIZES[size], "stage_types": "llll" if twin else "llvv"}
    return build(MAViT, variant, pretrained, own, given)


@register_model
def mavit_tiny(pretrained: bool = False, **given: Any) -> MAViT:
    """MAViT-T, 16 million parameters."""
    return _build("mavit_tiny", pretrained, given)


@register_model
def mavit_small(pretrained: bool = False, **given: Any) -> MAViT:
    """MAViT-S, 27 million parameters."""
    return _build("mavit_small", pretrained, given)


@register_model
def mavit_base(pretrained: bool = False, **given: Any) -> MAViT:
    """MAViT-B, 50 million parameters."""
    return _build("mavit_base", pretrained, given)


@register_model
def mavit_large(pretrained: bool = False, **given: Any) -> MAViT:
    """MAViT-L, 98 million parameters."""
    return _build("mavit_large", pretrained, given)


@register_model
def mavit_tiny_linear(pretrained: bool = False, **given: Any) -> MAViT:
    """MAViT-T with every stage linear."""
    return _build("mavit_tiny_linear", pretrained, given)


@register_model
def mavit_small_linear(pretrained: bool = False, **given: Any) -> MAViT:
    """MAViT-S with every stage linear."""
    return _build("mavit_small_linear", pretrained, given)


@register_model
def mavit_base_linear(pretrained: bool = False, **given: Any) -> MAViT:
    """MAViT-B with every stage linear."""
    return _build("mavit_base_linear", pretrained, given)


@register_model
def mavit_large_linear(pretrained: bool = False, **given: Any) -> MAViT:
    """MAViT-L with every stage linear."""
    return _build("mavit_large_linear", pretrained, given)
