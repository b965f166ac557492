"""MILA, released as MLLA: four stages of linear attention between a gate and a branch, as Mamba has them.

Paper: Demystify Mamba in Vision: A Linear Attention Perspective, arXiv 2405.16605, NeurIPS 2024.

Every block is linear. The released networks rotate features in the numerator but not in the normaliser, and add 1e-6 to
it; `linear_released` is that arithmetic, and the default, because their weights need it. They take square images of one
size, whose sides 32 divides; here tables are made for the map that comes, and any image will do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import ClassifierHead, Mlp, calculate_drop_path_rates
from timm.models import generate_default_cfgs, register_model
from torch import Tensor, nn

from ..layers import MILA as LAYER
from ..layers import Attention, ChannelRotary, masked_norm
from ..ops import Mechanism
from ._config import build, config
from ._names import HEAD_NAMES, Rule
from ._pyramid import Pyramid, Stage
from ._weights import draw
from .mavit import Block

NORM_EPS = 1e-5


class ConvUnit(nn.Module):
    """A convolution without bias, a batch norm and, unless told otherwise, a ReLU, of maps (B, C, H, W)."""

    def __init__(
        self, dim: int, dim_out: int, kernel_size: int, stride: int = 1, activate: bool = True, **dd: Any
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(dim, dim_out, kernel_size, stride, kernel_size // 2, bias=False, **dd)
        self.norm = nn.BatchNorm2d(dim_out, **dd)
        self.act = nn.ReLU() if activate else nn.Identity()

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """The map; the mask (B, H, W) is that of the map after the convolution, which is blank beyond it."""
        x = masked_norm(self.norm, self.conv(x), mask)
        return _blank(self.act(x), mask)


def _blank(x: Tensor, mask: Tensor | None) -> Tensor:
    """A map (B, C, H, W) with zeros where there is no image."""
    return x if mask is None else x.masked_fill(~mask[:, None], 0)


def _half(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask[:, ::2, ::2]


class ResidualStem(nn.Module):
    """From images (B, 3, H, W) to maps (B, H / 4, W / 4, C): a residual between two strides, then 4 C channels."""

    def __init__(self, in_chans: int, dim: int, **dd: Any) -> None:
        super().__init__()
        half = dim // 2
        self.reduce1 = ConvUnit(in_chans, half, 3, 2, **dd)
        self.residual1 = ConvUnit(half, half, 3, **dd)
        self.residual2 = ConvUnit(half, half, 3, activate=False, **dd)
        self.reduce2 = ConvUnit(half, 4 * dim, 3, 2, **dd)
        self.proj = ConvUnit(4 * dim, dim, 1, activate=False, **dd)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The map, channels last; the mask (B, H, W) is that of the images."""
        half, quarter = _half(mask), _half(_half(mask))
        x = self.reduce1(_blank(x.contiguous(memory_format=torch.channels_last), mask), half)
        x = x + self.residual2(self.residual1(x, half), half)
        return self.proj(self.reduce2(x, quarter), quarter).permute(0, 2, 3, 1)


class WideDownsample(nn.Module):
    """To maps of half the size and twice the channels, through eight times as many; odd sides are rounded up."""

    def __init__(self, dim: int, **dd: Any) -> None:
        super().__init__()
        self.expand = nn.Conv2d(dim, 8 * dim, 1, **dd)
        self.conv = nn.Conv2d(8 * dim, 8 * dim, 3, 2, 1, groups=8 * dim, **dd)
        self.reduce = nn.Conv2d(8 * dim, 2 * dim, 1, **dd)
        self.norm = nn.BatchNorm2d(2 * dim, **dd)
        self.act = nn.ReLU()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The smaller map; the mask is that of the map before."""
        x = _blank(self.act(self.expand(x.permute(0, 3, 1, 2))), mask)
        return masked_norm(self.norm, self.reduce(self.act(self.conv(x))), _half(mask)).permute(0, 2, 3, 1)


class TokenMlp(Mlp):
    """timm's MLP, to which padding makes no difference."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x: Tensor, grid: tuple[int, int], mask: Tensor | None = None
    ) -> Tensor:
        """As many tokens (B, N, C)."""
        return super().forward(x)


class MILA(Pyramid):
    """MILA for images of any size from 32 pixels a side; sides are rounded up at every stride.

    Args:
        in_chans: Channels of the images.
        num_classes: Classes; 0 for no classifier.
        global_pool: timm's pooling; "" for none.
        embed_dim: Channels of the first stage, a multiple of four; they double from stage to stage.
        depths: Blocks of each stage.
        num_heads: Heads of each stage.
        mlp_ratio: Hidden width of the MLP over channels.
        mechanism: A registered name, or a `Mechanism`.
        drop_rate: Dropout before the classifier.
        drop_path_rate: Stochastic depth of the last block.
        device: Where the weights live.
        dtype: Their dtype.

    Example:
        >>> import timm, torch
        >>> import affinear.models
        >>> model = timm.create_model("mila_tiny", num_classes=10, depths=(1, 1, 1, 1)).eval()
        >>> model(torch.randn(1, 3, 64, 96)).shape
        torch.Size([1, 10])
    """

    released_names: tuple[Rule, ...] = (
        (r"^patch_embed\.conv1\.", "stem.reduce1."),
        (r"^patch_embed\.conv2\.0\.", "stem.residual1."),
        (r"^patch_embed\.conv2\.1\.", "stem.residual2."),
        (r"^patch_embed\.conv3\.0\.", "stem.reduce2."),
        (r"^patch_embed\.conv3\.1\.", "stem.proj."),
        (r"\.rope\.rotations$", None),
        (r"^layers\.(\d+)\.downsample\.", lambda found: f"stages.{int(found[1]) + 1}.downsample."),
        (r"^layers\.(\d+)\.blocks\.", r"stages.\1.blocks."),
        (r"\.downsample\.conv\.0\.conv\.", ".downsample.expand."),
        (r"\.downsample\.conv\.1\.conv\.", ".downsample.conv."),
        (r"\.downsample\.conv\.2\.conv\.", ".downsample.reduce."),
        (r"\.downsample\.conv\.2\.norm\.", ".downsample.norm."),
        (r"\.cpe(\d)\.", r".position\1."),
        (r"\.attn\.qk\.", ".attn.qkv."),
        (r"\.attn\.lepe\.", ".attn.position."),
        (r"\.act_proj\.", ".attn.gate."),
        (r"\.in_proj\.", ".attn.branch.proj."),
        (r"\.dwc\.", ".attn.branch.conv."),
        (r"\.out_proj\.", ".attn.proj."),
        *HEAD_NAMES,
    )

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        embed_dim: int = 64,
        depths: Sequence[int] = (2, 4, 8, 4),
        num_heads: Sequence[int] = (2, 4, 8, 16),
        mlp_ratio: float = 4.0,
        mechanism: str | Mechanism = "linear_released",
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        dims = [embed_dim * 2**i for i in range(len(depths))]
        rates: Any = calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True)
        stages: list[Stage] = []
        for i, (dim, heads) in enumerate(zip(dims, num_heads, strict=True)):
            blocks = [
                Block(
                    dim,
                    Attention(dim, heads, LAYER.over(mechanism), **dd),
                    TokenMlp(dim, int(dim * mlp_ratio), **dd),
                    rate,
                    second_position=True,
                    eps=NORM_EPS,
                    **dd,
                )
                for rate in rates[i]
            ]
            downsample = WideDownsample(dims[i - 1], **dd) if i else nn.Identity()
            stages.append(Stage(downsample, blocks, ChannelRotary(dim, heads)))
        super().__init__(
            stem=ResidualStem(in_chans, embed_dim, **dd),
            stages=stages,
            norm=nn.LayerNorm(dims[-1], eps=NORM_EPS, **dd),
            head=ClassifierHead(dims[-1], num_classes, global_pool, drop_rate, **dd),
            dims=dims,
            num_classes=num_classes,
        )
        draw(self, nn.Linear)  # as released: convolutions keep torch's own start


SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"embed_dim": 64, "depths": (2, 4, 8, 4), "num_heads": (2, 4, 8, 16)},
    "small": {"embed_dim": 64, "depths": (3, 6, 21, 6), "num_heads": (2, 4, 8, 16)},
    "base": {"embed_dim": 96, "depths": (3, 6, 21, 6), "num_heads": (3, 6, 12, 24)},
}

default_cfgs = generate_default_cfgs(
    {
        f"mila_{size}": config(first_conv="stem.reduce1.conv", paper_name="MILA", paper_ids="arXiv:2405.16605")
        for size in SIZES
    }
)


def _build(variant: str, pretrained: bool, given: dict[str, Any]) -> MILA:
    return build(MILA, variant, pretrained, SIZES[variant.rpartition("_")[2]], given)


@register_model
def mila_tiny(pretrained: bool = False, **given: Any) -> MILA:
    """MILA-T, 24 million parameters."""
    return _build("mila_tiny", pretrained, given)


@register_model
def mila_small(pretrained: bool = False, **given: Any) -> MILA:
    """MILA-S, 43 million parameters."""
    return _build("mila_small", pretrained, given)


@register_model
def mila_base(pretrained: bool = False, **given: Any) -> MILA:
    """MILA-B, 96 million parameters."""
    return _build("mila_base", pretrained, given)
