"""RMT: the skeleton of MAViT around softmax that decays with the Manhattan distance.

Paper: RMT: Retentive Networks Meet Vision Transformers, arXiv 2309.11523, CVPR 2024.

Not linear attention: what MAViT and NaLaFormer are compared with. Stages of type f look at all tokens; those of type d
look along rows, then along columns. Decay is added to the logits, as the released code has it; the paper's formula
multiplies after the softmax. Token-labelled variants (the paper's stars) are not here: their released code does not
build the network that was trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import calculate_drop_path_rates
from timm.models import generate_default_cfgs, register_model
from torch import Tensor, nn
from torch.nn import functional as F

from .. import ops
from ..layers import DepthwiseConv
from ..ops.rotary import rotate
from ._config import build, config
from ._names import Rule
from ._pyramid import Pyramid, Stage
from ._weights import draw
from .mavit import SKELETON_NAMES, Block, ConvMlp, ConvStem, Downsample, ProjectionHead

BASE = 10000.0


class ManhattanPositions(nn.Module):
    """What blocks of a stage share of a map's places: rotary tables, and what distance adds to the logits.

    Head h of n has the rate log(1 - 2 ** -(start + span * h / n)), negative. Rotary positions count through the map row
    by row, so that moving one row down turns by as many steps as the map is wide.

    Args:
        head_dim: Width of a head, even.
        num_heads: Heads n.
        start: First exponent, positive.
        span: What the exponent gains over all heads; the last one does not reach it.
        decomposed: Whether distances are along rows and columns, for two passes, and not between all tokens.

    Example:
        >>> import torch
        >>> from affinear.models.rmt import ManhattanPositions
        >>> cos, sin, along_row, along_column = ManhattanPositions(8, 2, 2.0, 4.0, True)(torch.randn(1, 5, 7, 16))
        >>> cos.shape, along_row.shape, along_column.shape
        (torch.Size([35, 8]), torch.Size([2, 7, 7]), torch.Size([2, 5, 5]))
    """

    def __init__(self, head_dim: int, num_heads: int, start: float, span: float, decomposed: bool) -> None:
        super().__init__()
        if min(start, start + span) <= 0:
            raise ValueError(f"decay_init: expected exponents above zero for all heads, got {start} to {start + span}")
        self.head_dim, self.num_heads, self.start, self.span = head_dim, num_heads, start, span
        self.decomposed = decomposed

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Cosines and sines (H * W, D), then (n, W, W) and (n, H, H), or (n, H * W, H * W) if not decomposed."""
        height, width = x.shape[1:3]
        steps = max(self.head_dim // 2 - 1, 1)  # frequencies run from 1 to 1 / BASE, both included
        cos, sin = ops.rotary_1d(
            height * width, self.head_dim, base=BASE ** (self.head_dim / 2 / steps), device=x.device
        )
        head = torch.arange(self.num_heads, device=x.device, dtype=torch.float64)
        rate = torch.log1p(-(2.0 ** -(self.start + self.span * head / self.num_heads))).to(x.dtype)
        rows, columns = (_distances(torch.arange(side, device=x.device)) for side in (height, width))
        if self.decomposed:
            return cos, sin, rate[:, None, None] * columns, rate[:, None, None] * rows
        apart = (rows[:, None, :, None] + columns[None, :, None, :]).flatten(2).flatten(0, 1)
        return cos, sin, rate[:, None, None] * apart

    def extra_repr(self) -> str:
        """What `print` shows."""
        return f"head_dim={self.head_dim}, start={self.start:g}, span={self.span:g}, decomposed={self.decomposed}"


def _distances(place: Tensor) -> Tensor:
    return (place[:, None] - place).abs()


class ManhattanAttention(nn.Module):
    """Softmax over all tokens, or along rows and then along columns, with a decay that `ManhattanPositions` makes.

    Args:
        dim: Channels C.
        num_heads: Heads H, a divisor of C.
        dd: Device and dtype.
    """

    def __init__(self, dim: int, num_heads: int, **dd: Any) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"num_heads: expected a divisor of dim = {dim}, got {num_heads}")
        self.num_heads = num_heads
        self.mechanism = ops.find("softmax")
        self.qkv = nn.Linear(dim, 3 * dim, **dd)
        self.position = DepthwiseConv(dim, 5, **dd)
        self.proj = nn.Linear(dim, dim, **dd)

    def forward(self, x: Tensor, grid: tuple[int, int], *, rotary: tuple[Tensor, ...], key_mask: None = None) -> Tensor:
        """Tokens (B, N, C) that have looked at each other; none of them may be padding."""
        cos, sin, *decay = rotary
        query, key, value = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        local = self.position(value.flatten(2).unflatten(1, grid)).flatten(1, 2)
        query, key = (rotate(tokens, (cos, sin)) for tokens in (query, key))
        if len(decay) == 1:
            out = _softmax(query, key, value, decay[0])
        else:
            query, key, value = (tokens.unflatten(1, grid) for tokens in (query, key, value))
            value = _along(query, key, value, decay[0])
            query, key, value = (tokens.transpose(1, 2) for tokens in (query, key, value))
            out = _along(query, key, value, decay[1]).transpose(1, 2).flatten(1, 2)
        return self.proj(out.flatten(2) + local)

    def extra_repr(self) -> str:
        """What `print` shows."""
        return f"softmax (decay by distance), num_heads={self.num_heads}"


def _softmax(query: Tensor, key: Tensor, value: Tensor, decay: Tensor) -> Tensor:
    """Of tokens (B, N, H, D), with (H, N, N) added to the logits."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, decay.to(query.dtype)).transpose(1, 2)


def _along(query: Tensor, key: Tensor, value: Tensor, decay: Tensor) -> Tensor:
    """Within each line of maps (B, lines, N, H, D)."""
    images, lines = query.shape[:2]
    query, key, value = (x.flatten(0, 1) for x in (query, key, value))
    out = _softmax(query, key, value, decay)
    return out.unflatten(0, (images, lines))


class RMT(Pyramid):
    """RMT for images of any size from 32 pixels a side; sides are rounded up at every stride.

    Args:
        in_chans: Channels of the images.
        num_classes: Classes; 0 for no classifier.
        global_pool: timm's pooling; "" for none.
        embed_dims: Channels of each stage.
        depths: Blocks of each stage.
        num_heads: Heads of each stage, of even width.
        mlp_ratios: Hidden width of the MLP over channels, of each stage.
        projection: Width of the head's projection.
        stage_types: One letter per stage, d for decomposed (rows, then columns) and f for full.
        decay_init: First exponent of the decay, of each stage.
        decay_range: What the exponent gains over the heads, of each stage.
        layer_scale: Whether blocks have layer scales, of each stage.
        init_values: Where those start.
        drop_rate: Dropout before the classifier.
        drop_path_rate: Stochastic depth of the last block.
        device: Where the weights live.
        dtype: Their dtype.

    Example:
        >>> import timm, torch
        >>> import affinear.models
        >>> model = timm.create_model("rmt_tiny", num_classes=10).eval()
        >>> model(torch.randn(1, 3, 64, 96)).shape
        torch.Size([1, 10])
    """

    released_names: tuple[Rule, ...] = SKELETON_NAMES
    knows_padding = False  # its rotary positions turn with the width of the batch, not of the image

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        embed_dims: Sequence[int] = (64, 128, 256, 512),
        depths: Sequence[int] = (2, 2, 8, 2),
        num_heads: Sequence[int] = (4, 4, 8, 16),
        mlp_ratios: Sequence[float] = (3, 3, 3, 3),
        projection: int = 1024,
        stage_types: str = "ddff",
        decay_init: Sequence[float] = (2, 2, 2, 2),
        decay_range: Sequence[float] = (4, 4, 6, 6),
        layer_scale: Sequence[bool] = (False, False, False, False),
        init_values: float = 1e-6,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if len(stage_types) != len(depths) or set(stage_types) - set("df"):
            raise ValueError(
                f"stage_types: expected {len(depths)} letters, d for decomposed or f for full, such as 'ddff', got "
                f"{stage_types!r}"
            )
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        rates: Any = calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True)
        stages: list[Stage] = []
        for i, (dim, heads) in enumerate(zip(embed_dims, num_heads, strict=True)):
            blocks = [
                Block(
                    dim,
                    ManhattanAttention(dim, heads, **dd),
                    ConvMlp(dim, int(dim * mlp_ratios[i]), **dd),
                    rate,
                    init_values if layer_scale[i] else None,
                    **dd,
                )
                for rate in rates[i]
            ]
            downsample = Downsample(embed_dims[i - 1], dim, **dd) if i else nn.Identity()
            places = ManhattanPositions(dim // heads, heads, decay_init[i], decay_range[i], stage_types[i] == "d")
            stages.append(Stage(downsample, blocks, places))
        super().__init__(
            stem=ConvStem(in_chans, embed_dims[0], early=True, **dd),
            stages=stages,
            norm=nn.Identity(),
            head=ProjectionHead(embed_dims[-1], projection, num_classes, global_pool, drop_rate, **dd),
            dims=embed_dims,
            num_classes=num_classes,
            head_hidden_size=projection,
        )
        draw(self, nn.Linear)  # as released: convolutions keep torch's own start


SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"depths": (2, 2, 8, 2), "stage_types": "ddff"},
    "small": {"depths": (3, 4, 18, 4), "mlp_ratios": (4, 4, 3, 3), "stage_types": "dddf"},
    "base": {
        "embed_dims": (80, 160, 320, 512),
        "depths": (4, 8, 25, 8),
        "num_heads": (5, 5, 10, 16),
        "mlp_ratios": (4, 4, 3, 3),
        "stage_types": "dddf",
        "decay_range": (5, 5, 6, 6),
        "layer_scale": (False, False, True, True),
    },
    "large": {
        "embed_dims": (112, 224, 448, 640),
        "depths": (4, 8, 25, 8),
        "num_heads": (7, 7, 14, 20),
        "mlp_ratios": (4, 4, 3, 3),
        "stage_types": "dddf",
        "decay_range": (6, 6, 6, 6),
        "layer_scale": (False, False, True, True),
    },
}

default_cfgs = generate_default_cfgs(
    {f"rmt_{size}": config(first_conv="stem.conv0", paper_name="RMT", paper_ids="arXiv:2309.11523") for size in SIZES}
)


def _build(variant: str, pretrained: bool, given: dict[str, Any]) -> RMT:
    return build(RMT, variant, pretrained, SIZES[variant.rpartition("_")[2]], given)


@register_model
def rmt_tiny(pretrained: bool = False, **given: Any) -> RMT:
    """RMT-T, 14 million parameters."""
    return _build("rmt_tiny", pretrained, given)


@register_model
def rmt_small(pretrained: bool = False, **given: Any) -> RMT:
    """RMT-S, 27 million parameters."""
    return _build("rmt_small", pretrained, given)


@register_model
def rmt_base(pretrained: bool = False, **given: Any) -> RMT:
    """RMT-B, 54 million parameters."""
    return _build("rmt_base", pretrained, given)


@register_model
def rmt_large(pretrained: bool = False, **given: Any) -> RMT:
    """RMT-L, 95 million parameters."""
    return _build("rmt_large", pretrained, given)
