"""A plain twin of the released MAViT, operation by operation, to measure ours beside: what torch makes of it as it is.

Maps are (B, C, H, W) throughout. Every projection is a 1 x 1 convolution, norms turn the map over and back, features
are rotated by stacking, attention is written out as matrix products. Parameters have the released names, so that
released weights load as they are. Nothing in the library uses this.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from affinear.models.mavit import SIZES

EPSILON = 1e-6  # of the norms, and of the reciprocal in the gain
Tables = tuple[Tensor, Tensor]


class Angles(nn.Module):
    """Cosines and sines of a grid, from angles that are kept as a buffer."""

    angle: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("angle", 10000 ** -torch.linspace(0, 1, width // 4).repeat_interleave(2))

    def forward(self, height: int, width: int) -> Tables:
        """Tables (H * W, D): the first half of the channels by row, the second by column."""
        rows, columns = (torch.arange(n, device=self.angle.device)[:, None] * self.angle for n in (height, width))
        sines, cosines = (
            torch.cat((f(rows)[:, None].expand(-1, width, -1), f(columns)[None].expand(height, -1, -1)), -1)
            for f in (torch.sin, torch.cos)
        )
        return cosines.flatten(0, 1), sines.flatten(0, 1)


def rotate(x: Tensor, tables: Tables) -> Tensor:
    """Turn adjacent channels."""
    cosines, sines = tables
    return x * cosines + torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2) * sines


class MapNorm(nn.Module):
    """A layer norm over the channels of (B, C, H, W)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim, eps=EPSILON)

    def forward(self, x: Tensor) -> Tensor:
        """The map, turned over, normalised, and turned back."""
        x = self.norm(x.permute(0, 2, 3, 1).contiguous())
        return x.permute(0, 3, 1, 2).contiguous()


class GatedAttention(nn.Module):
    """Linear or softmax attention, with a convolution of the values added and a gate."""

    def __init__(self, dim: int, heads: int, linear: bool) -> None:
        super().__init__()
        self.heads, self.linear, self.scale = heads, linear, (dim // heads) ** -0.5
        self.qkvo = nn.Conv2d(dim, 4 * dim, 1)
        self.lepe = nn.Conv2d(dim, dim, 5, 1, 2, groups=dim)
        self.proj = nn.Conv2d(dim, dim, 1)

    def forward(self, x: Tensor, tables: Tables) -> Tensor:
        """A map of the same size."""
        dim, size = x.shape[1], x.shape[2:]
        qkvo = self.qkvo(x)
        qkv, gate = qkvo[:, : 3 * dim], qkvo[:, 3 * dim :]
        local = self.lepe(qkv[:, 2 * dim :])
        q, k, v = qkv.unflatten(1, (3, self.heads, -1)).flatten(4).permute(1, 0, 2, 4, 3)
        out = self._linear(q, k, v, tables) if self.linear else self._softmax(q, k, v, tables)
        out = out.transpose(2, 3).flatten(1, 2).unflatten(2, size)
        return self.proj((out + local) * gate)

    def _linear(self, q: Tensor, k: Tensor, v: Tensor, tables: Tables) -> Tensor:
        q, k = F.elu(q) + 1, F.elu(k) + 1
        z = q @ k.mean(dim=-2, keepdim=True).transpose(-2, -1) * self.scale
        q, k = rotate(q, tables), rotate(k, tables)
        root = (self.scale / k.shape[-2]) ** 0.5
        kv = (k.transpose(-2, -1) * root) @ (v * root)
        return q @ kv * (1 + 1 / (z + EPSILON)) - z * v.mean(dim=-2, keepdim=True)

    def _softmax(self, q: Tensor, k: Tensor, v: Tensor, tables: Tables) -> Tensor:
        q, k = rotate(q, tables), rotate(k, tables)
        return torch.softmax(self.scale * q @ k.transpose(-2, -1), dim=-1) @ v


class Feedforward(nn.Module):
    """Two projections with a residual depthwise convolution between them."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Conv2d(dim, hidden, 1)
        self.dwconv = nn.Conv2d(hidden, hidden, 3, 1, 1, groups=hidden)
        self.fc2 = nn.Conv2d(hidden, dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        """A map of the same size."""
        x = F.gelu(self.fc1(x))
        return self.fc2(x + self.dwconv(x))


class Block(nn.Module):
    """Position convolution, attention and feedforward, each added."""

    def __init__(self, dim: int, heads: int, ratio: float, linear: bool, scale: float) -> None:
        super().__init__()
        self.pos = nn.Conv2d(dim, dim, 3, 1, 1, groups=dim)
        self.norm1, self.norm2 = MapNorm(dim), MapNorm(dim)
        self.attn = GatedAttention(dim, heads, linear)
        self.ffn = Feedforward(dim, int(ratio * dim))
        self.gamma_1, self.gamma_2 = (nn.Parameter(torch.full((1, dim, 1, 1), scale)) for _ in range(2))

    def forward(self, x: Tensor, tables: Tables) -> Tensor:
        """A map of the same size."""
        x = x + self.pos(x)
        x = x + self.gamma_1 * self.attn(self.norm1(x), tables)
        return x + self.gamma_2 * self.ffn(self.norm2(x))


class Halve(nn.Module):
    """A convolution of stride 2 and a batch norm."""

    def __init__(self, dim: int, out: int) -> None:
        super().__init__()
        self.reduction = nn.Conv2d(dim, out, 3, 2, 1)
        self.norm = nn.BatchNorm2d(out)

    def forward(self, x: Tensor) -> Tensor:
        """The smaller map."""
        return self.norm(self.reduction(x))


class Layer(nn.Module):
    """One stage, and what halves the map after it."""

    def __init__(self, blocks: Sequence[Block], width: int, downsample: nn.Module) -> None:
        super().__init__()
        self.RoPE = Angles(width)
        self.blocks = nn.ModuleList(blocks)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        """The map for the next stage."""
        tables = self.RoPE(x.shape[2], x.shape[3])
        for block in self.blocks:
            x = block(x, tables)
        return self.downsample(x)


class Stem(nn.Module):
    """Four convolutions to a quarter of the sides."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        half, parts = dim // 2, list[nn.Module]()
        for before, after, stride in ((3, half, 2), (half, half, 1), (half, half, 1), (half, dim, 2)):
            parts += [nn.Conv2d(before, after, 3, stride, 1), nn.BatchNorm2d(after), nn.GELU()]
        self.proj = nn.Sequential(*parts[:-1])

    def forward(self, x: Tensor) -> Tensor:
        """The map."""
        return self.proj(x)


class ReleasedTwin(nn.Module):
    """The released network; arguments as of `affinear.models.mavit.MAViT`, as far as they change what is computed.

    Example:
        >>> import torch
        >>> from released_twin import ReleasedTwin
        >>> net = ReleasedTwin(embed_dims=(8, 16, 24, 32), depths=(1, 1, 1, 1), num_heads=(1, 2, 3, 4), projection=24)
        >>> net(torch.randn(1, 3, 64, 96)).shape
        torch.Size([1, 1000])
    """

    def __init__(
        self,
        embed_dims: Sequence[int] = (64, 128, 256, 512),
        depths: Sequence[int] = (2, 2, 6, 2),
        num_heads: Sequence[int] = (1, 2, 4, 8),
        mlp_ratios: Sequence[float] = (3.5, 3.5, 3.5, 3.5),
        projection: int = 2048,
        num_classes: int = 1000,
        stage_types: str = "llvv",
        init_values: Sequence[float] = (1.0, 1.0, 1.0, 1.0),
    ) -> None:
        super().__init__()
        self.patch_embed = Stem(embed_dims[0])
        layers = list[Layer]()
        for i, (dim, heads) in enumerate(zip(embed_dims, num_heads, strict=True)):
            linear = stage_types[i] == "l"
            blocks = [Block(dim, heads, mlp_ratios[i], linear, init_values[i]) for _ in range(depths[i])]
            last = i + 1 == len(embed_dims)
            layers.append(Layer(blocks, dim // heads, nn.Identity() if last else Halve(dim, embed_dims[i + 1])))
        self.layers = nn.ModuleList(layers)
        self.proj = nn.Conv2d(embed_dims[-1], projection, 1)
        self.norm = nn.BatchNorm2d(projection)
        self.head = nn.Conv2d(projection, num_classes, 1)
        self.apply(_draw)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, classes) of images (B, 3, H, W)."""
        x = self.patch_embed(x)
        for layer in self.layers:
            x = layer(x)
        x = F.silu(self.norm(self.proj(x)))
        return self.head(F.adaptive_avg_pool2d(x, 1)).flatten(1)


def _draw(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.trunc_normal_(module.weight, std=0.02)
        assert module.bias is not None
        nn.init.zeros_(module.bias)


def twin(size: str) -> ReleasedTwin:
    """The released network of a size: "tiny", "small", "base" or "large"."""
    return ReleasedTwin(**SIZES[size])
