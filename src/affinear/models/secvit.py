"""SECViT: the skeleton of MAViT around softmax within clusters of tokens that resemble each other.

Paper: Semantic Equitable Clustering, arXiv 2405.13337.

Not linear attention: what MAViT and NaLaFormer are compared with. The number of clusters is fixed, not their size, so
cost grows with the square of the pixels. An image fits if its maps can be cut into equal clusters, as they can if both
sides are multiples of 32; `uneven=True` cuts any map, into clusters that differ by one token at most. The network is
not continuous: a small change of the image may move a token from one cluster to the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, product
from typing import Any

import torch
from timm.layers import calculate_drop_path_rates
from timm.models import generate_default_cfgs, register_model
from torch import Tensor, nn
from torch.nn import functional as F

from .. import ops
from ..layers import AxialRotary, DepthwiseConv
from ..ops.precision import exact, widen
from ..ops.rotary import rotate
from ._config import build, config
from ._names import Rule
from ._pyramid import Pyramid, Stage
from ._weights import draw
from .mavit import SKELETON_NAMES, Block, ConvMlp, ConvStem, Downsample, ProjectionHead

CLUSTERS = (32, 8, 2, -1)  # of every block of the four stages of all published networks
SIDE = 32  # whose multiples fit them


class ClusterAttention(nn.Module):
    """Softmax within runs of tokens, in the order in which their keys resemble the mean key; head by head.

    Args:
        dim: Channels C.
        num_heads: Heads H, a divisor of C into widths that four divides.
        clusters: Number of runs; one or less for all tokens in one.
        uneven: Whether runs may differ by one token where they cannot be equal.
        dd: Device and dtype.
    """

    def __init__(self, dim: int, num_heads: int, clusters: int, uneven: bool = False, **dd: Any) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"num_heads: expected a divisor of dim = {dim}, got {num_heads}")
        self.num_heads, self.clusters, self.uneven = num_heads, clusters, uneven
        self.mechanism = ops.find("softmax")
        self.qkv = nn.Linear(dim, 3 * dim, **dd)
        self.position = DepthwiseConv(dim, 5, **dd)
        self.proj = nn.Linear(dim, dim, **dd)

    def forward(
        self, x: Tensor, grid: tuple[int, int], *, rotary: tuple[Tensor, Tensor], key_mask: None = None
    ) -> Tensor:
        """Tokens (B, N, C) that have looked at those of their cluster; none of them may be padding."""
        query, key, value = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        local = self.position(value.flatten(2).unflatten(1, grid)).flatten(1, 2)
        query, key, value = (t.transpose(1, 2) for t in (rotate(query, rotary), rotate(key, rotary), value))
        if self.clusters <= 1:
            out = F.scaled_dot_product_attention(query, key, value)
        else:
            out = self._within_clusters(query, key, value)
        return self.proj(out.transpose(1, 2).flatten(2) + local)

    def _within_clusters(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Answers (B, H, N, D) to queries that see their own cluster alone."""
        order = resemblance(key).argsort(dim=-1)[..., None]
        width = value.shape[-1]
        query, key, value = (x.gather(2, order.expand(-1, -1, -1, width)) for x in (query, key, value))
        length = query.shape[2]
        if length % self.clusters == 0:
            query, key, value = (x.unflatten(2, (self.clusters, -1)).flatten(1, 2) for x in (query, key, value))
            out = F.scaled_dot_product_attention(query, key, value)
            out = out.unflatten(1, (self.num_heads, -1)).flatten(2, 3)
        elif self.uneven:
            out = _uneven(query, key, value, min(self.clusters, length))
        else:
            raise ValueError(
                f"x: expected a number of tokens that {self.clusters} clusters divide, got {length}; "
                "pass uneven=True for clusters that differ by one token"
            )
        return torch.empty_like(out).scatter(2, order.expand(-1, -1, -1, width), out)

    def extra_repr(self) -> str:
        """What `print` shows."""
        where = f"within {self.clusters} clusters" if self.clusters > 1 else "over all tokens"
        return f"softmax ({where}), num_heads={self.num_heads}"


@torch.no_grad()
def resemblance(key: Tensor) -> Tensor:
    """Cosine of each key (B, H, N, D) with the mean key of its image and head, (B, H, N)."""
    with exact(key):
        key = widen(key)
        direction, mean = F.normalize(key, dim=-1), F.normalize(key.mean(dim=2, keepdim=True), dim=-1)
        return (direction * mean).sum(-1)


def _uneven(query: Tensor, key: Tensor, value: Tensor, clusters: int) -> Tensor:
    """Answers to sorted tokens (B, H, N, D), cut into runs of which the first ones are longer by one token."""
    length, heads = query.shape[2], query.shape[1]
    shorter, longer = divmod(length, clusters)
    run = torch.arange(clusters, device=query.device)
    start = run * shorter + run.clamp(max=longer)
    slot = torch.arange(shorter + 1, device=query.device)
    filled = slot < (shorter + (run < longer))[:, None]
    token = (start[:, None] + slot).clamp(max=length - 1)

    def cut(x: Tensor) -> Tensor:
        return x[:, :, token].flatten(1, 2)

    seen = filled.repeat(heads, 1)[:, None]
    out = F.scaled_dot_product_attention(cut(query), cut(key), cut(value), seen)
    return out.unflatten(1, (heads, clusters))[:, :, filled]


class MeasuringStem(ConvStem):
    """The stem, which refuses images whose maps cannot be cut, before any work.

    Args:
        in_chans: Channels of the images.
        dim: Channels of the maps.
        clusters: Clusters of the blocks of each stage; none where any image fits.
        dd: Device and dtype.
    """

    def __init__(self, in_chans: int, dim: int, clusters: Sequence[Sequence[int]], **dd: Any) -> None:
        super().__init__(in_chans, dim, **dd)
        self.clusters = clusters

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        """The map, channels last; the mask (B, H, W) is that of the images."""
        height, width = input.shape[-2:]
        wrong = next(_uncut(height, width, self.clusters), None)
        if wrong is not None:
            rows, columns, number = wrong
            raise ValueError(
                f"images: {height} x {width} pixels make a map of {rows} x {columns} tokens, which {number} equal "
                f"clusters cannot share; resize to {_nearest(height, width, self.clusters)}, "
                "or build the network with uneven=True"
            )
        return super().forward(input, mask)


def _uncut(height: int, width: int, clusters: Sequence[Sequence[int]]) -> Iterator[tuple[int, int, int]]:
    """Rows, columns and clusters of the maps of an image that are not cut into equal parts."""
    for i, numbers in enumerate(clusters):
        rows, columns = (-(-side // (4 * 2**i)) for side in (height, width))
        yield from ((rows, columns, number) for number in numbers if number > 1 and rows * columns % number)


def _nearest(height: int, width: int, clusters: Sequence[Sequence[int]]) -> str:
    """The nearest sides that fit, among multiples of the whole stride."""
    near = [max(round(side / SIDE), 1) for side in (height, width)]
    for reach in count():
        around = [range(max(side - reach, 1), side + reach + 1) for side in near]
        fitting = [
            (SIDE * rows, SIDE * columns)
            for rows, columns in product(*around)
            if next(_uncut(SIDE * rows, SIDE * columns, clusters), None) is None
        ]
        if fitting:
            best = min(fitting, key=lambda sides: abs(sides[0] - height) + abs(sides[1] - width))
            return f"{best[0]} x {best[1]}"
    raise AssertionError


class SECViT(Pyramid):
    """SECViT for images whose maps can be cut into equal clusters, such as those with sides that 32 divides.

    Args:
        in_chans: Channels of the images.
        num_classes: Classes; 0 for no classifier.
        global_pool: timm's pooling; "" for none.
        embed_dims: Channels of each stage.
        depths: Blocks of each stage.
        num_heads: Heads of each stage, of widths that four divides.
        num_clusters: Clusters of each stage, one number or one for each of its blocks; 1 or less for no clusters.
        mlp_ratios: Hidden width of the MLP over channels, of each stage.
        projection: Width of the head's projection.
        layer_scale: Whether blocks have layer scales, of each stage.
        init_values: Where those start.
        uneven: Whether clusters may differ by one token, so that any image from 32 pixels a side will do.
        drop_rate: Dropout before the classifier.
        drop_path_rate: Stochastic depth of the last block.
        device: Where the weights live.
        dtype: Their dtype.

    Example:
        >>> import timm, torch
        >>> import affinear.models
        >>> model = timm.create_model("secvit_tiny", num_classes=10).eval()
        >>> model(torch.randn(1, 3, 64, 96)).shape
        torch.Size([1, 10])
        >>> model(torch.randn(1, 3, 80, 80))
        Traceback (most recent call last):
            ...
        ValueError: images: 80 x 80 pixels make a map of 20 x 20 tokens, which 32 equal clusters cannot share; ...
    """

    released_names: tuple[Rule, ...] = SKELETON_NAMES
    knows_padding = False  # images of several sizes would have clusters of several lengths
    divisor = SIDE

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        embed_dims: Sequence[int] = (64, 128, 256, 512),
        depths: Sequence[int] = (2, 2, 9, 2),
        num_heads: Sequence[int] = (2, 4, 8, 16),
        num_clusters: Sequence[int | Sequence[int]] = CLUSTERS,
        mlp_ratios: Sequence[float] = (3, 3, 3, 3),
        projection: int = 1024,
        layer_scale: Sequence[bool] = (False, False, False, False),
        init_values: float = 1e-6,
        uneven: bool = False,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        clusters = _clusters_of_blocks(num_clusters, depths)
        rates: Any = calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True)
        stages: list[Stage] = []
        for i, (dim, heads) in enumerate(zip(embed_dims, num_heads, strict=True)):
            blocks = [
                Block(
                    dim,
                    ClusterAttention(dim, heads, number, uneven, **dd),
                    ConvMlp(dim, int(dim * mlp_ratios[i]), **dd),
                    rate,
                    init_values if layer_scale[i] else None,
                    **dd,
                )
                for number, rate in zip(clusters[i], rates[i], strict=True)
            ]
            downsample = Downsample(embed_dims[i - 1], dim, **dd) if i else nn.Identity()
            stages.append(Stage(downsample, blocks, AxialRotary(dim // heads)))
        super().__init__(
            stem=MeasuringStem(in_chans, embed_dims[0], () if uneven else clusters, **dd),
            stages=stages,
            norm=nn.Identity(),
            head=ProjectionHead(embed_dims[-1], projection, num_classes, global_pool, drop_rate, **dd),
            dims=embed_dims,
            num_classes=num_classes,
            head_hidden_size=projection,
        )
        draw(self, nn.Linear, nn.Conv2d)


def _clusters_of_blocks(num_clusters: Sequence[int | Sequence[int]], depths: Sequence[int]) -> list[list[int]]:
    """A number for each block of each stage."""
    given = [
        [one] * depth if isinstance(one, int) else list(one) for one, depth in zip(num_clusters, depths, strict=False)
    ]
    if [len(stage) for stage in given] != list(depths) or len(num_clusters) != len(depths):
        raise ValueError(
            f"num_clusters: expected one number, or one for each block, of {len(depths)} stages of "
            f"{', '.join(map(str, depths))} blocks, got {list(num_clusters)}"
        )
    return given


SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"depths": (2, 2, 9, 2)},
    "small": {"depths": (3, 4, 18, 4)},
    "base": {
        "embed_dims": (80, 160, 320, 512),
        "depths": (4, 8, 26, 8),
        "num_heads": (5, 5, 10, 16),
        "layer_scale": (False, False, True, True),
    },
    "large": {
        "embed_dims": (112, 224, 448, 640),
        "depths": (4, 8, 26, 8),
        "num_heads": (7, 7, 14, 20),
        "layer_scale": (False, False, True, True),
    },
}

default_cfgs = generate_default_cfgs(
    {
        f"secvit_{size}": config(first_conv="stem.conv0", paper_name="SEC", paper_ids="arXiv:2405.13337")
        for size in SIZES
    }
)


def _build(variant: str, pretrained: bool, given: dict[str, Any]) -> SECViT:
    return build(SECViT, variant, pretrained, SIZES[variant.rpartition("_")[2]], given)


@register_model
def secvit_tiny(pretrained: bool = False, **given: Any) -> SECViT:
    """SECViT-T, 15 million parameters."""
    return _build("secvit_tiny", pretrained, given)


@register_model
def secvit_small(pretrained: bool = False, **given: Any) -> SECViT:
    """SECViT-S, 27 million parameters."""
    return _build("secvit_small", pretrained, given)


@register_model
def secvit_base(pretrained: bool = False, **given: Any) -> SECViT:
    """SECViT-B, 55 million parameters."""
    return _build("secvit_base", pretrained, given)


@register_model
def secvit_large(pretrained: bool = False, **given: Any) -> SECViT:
    """SECViT-L, 96 million parameters."""
    return _build("secvit_large", pretrained, given)
