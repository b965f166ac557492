"""An upscaler in SwinIR-light's shape, whose windows can be replaced by attention over the whole image.

Paper: SwinIR: Image Restoration Using Swin Transformer, arXiv 2108.10257. `swinir_light` is the published network:
softmax within windows, every second layer with windows displaced by half. `upscaler_light` keeps the shell and looks at
all pixels in every layer, by any mechanism; widths suit the kernels, and a convolution of the values tells where things
are, the same one for all mechanisms.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Literal

import torch
from timm.layers import DropPath, Mlp, calculate_drop_path_rates
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .. import ops
from ..layers import AddNorm, Attention, DepthwiseConv, Parts, Windows
from ..ops import Mechanism
from ..ops.precision import exact
from . import making
from ._names import Rule, rename
from ._pyramid import describe
from ._weights import draw

WINDOWS = "windows"  # in place of a mechanism: softmax within windows
MEAN = (0.4488, 0.4371, 0.4040)  # of DIV2K, which the published network takes off
SCALES = (2, 3, 4)
MOST_LAYERS = 256
RELEASED: tuple[Rule, ...] = (
    (r"(attn_mask|relative_position_index)$", None),
    (r"\.residual_group\.blocks\.", ".blocks."),
    (r"^patch_embed\.norm\.", "norm_first."),
    (r"^upsample\.0\.", "upsample."),
)


class WindowAttention(nn.Module):
    """Softmax attention within square windows of a map, with a learned bias for every displacement.

    Args:
        dim: Channels C.
        num_heads: Heads.
        window: Side of a window.
        shift: Rows and columns by which windows are displaced; no window reaches around the border.
        position_kernel: Side of the depthwise convolution of all values that is added; 0 for none.
        dd: Device and dtype.
    """

    def __init__(
        self, dim: int, num_heads: int, window: int, shift: int = 0, position_kernel: int = 0, **dd: Any
    ) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"num_heads: expected a divisor of dim = {dim}, got {num_heads}")
        self.num_heads, self.window, self.shift = num_heads, window, shift
        self.mechanism = ops.find("softmax")
        self.relative_position_bias_table = nn.Parameter(torch.empty((2 * window - 1) ** 2, num_heads, **dd))
        nn.init.normal_(self.relative_position_bias_table, std=0.02)
        self.qkv = nn.Linear(dim, 3 * dim, **dd)
        self.position = DepthwiseConv(dim, position_kernel, **dd) if position_kernel else None
        self.proj = nn.Linear(dim, dim, **dd)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (B, H, W, C), sides multiples of the window, whose tokens have looked at those in their window."""
        size = (x.shape[1], x.shape[2])
        qkv = self.qkv(x)
        out = self.look(qkv, Windows(size, (self.window, self.window), (self.shift, self.shift)))
        if self.position is not None:
            out = self.position(qkv[..., 2 * x.shape[3] :], added=out)
        return self.proj(out)

    def look(self, qkv: Tensor, windows: Windows) -> Tensor:
        """Answers (B, H, W, C) to queries, keys and values (B, H, W, 3 C) in windows of at most the layer's size."""
        query, key, value = windows.split(qkv).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        bias, visible = self._bias(windows.window), windows.visible(qkv.device)
        if visible is not None:
            bias = bias.masked_fill(~visible[:, None], float("-inf")).repeat(qkv.shape[0], 1, 1, 1)
        out = F.scaled_dot_product_attention(query, key, value, bias.to(query.dtype))
        return windows.join(out.transpose(1, 2).flatten(2))

    def _bias(self, window: tuple[int, int]) -> Tensor:
        """(heads, h * w, h * w) for a window of at most the layer's size: what counts is the displacement."""
        most = self.window - 1
        device = self.relative_position_bias_table.device
        row, column = (torch.arange(side, device=device) for side in window)
        row, column = row[:, None] - row + most, column[:, None] - column + most
        index = row[:, None, :, None] * (2 * most + 1) + column[None, :, None, :]
        return self.relative_position_bias_table[index.flatten(2).flatten(0, 1)].permute(2, 0, 1)

    def extra_repr(self) -> str:
        """What `print` shows."""
        return f"softmax in windows of {self.window}, displaced by {self.shift}, num_heads={self.num_heads}"


class Layer(nn.Module):
    """Attention and MLP, each added to the map after a norm.

    Args:
        dim: Channels C.
        attn: `WindowAttention`, or `Attention` over the whole map.
        mlp_ratio: Hidden width of the MLP over C.
        drop_path: Stochastic depth.
        dd: Device and dtype.
    """

    def __init__(
        self, dim: int, attn: WindowAttention | Attention, mlp_ratio: float, drop_path: float, **dd: Any
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, **dd)
        self.attn = attn
        self.norm2 = AddNorm(dim, **dd)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), **dd)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """A map (B, H, W, C) of the same size."""
        # Tokens (B, N, C), which compilers keep for backward as they lie; see `ops.depthwise` about maps.
        tokens, grid = x.flatten(1, 2), (x.shape[1], x.shape[2])
        tokens, normed = self.norm2(tokens, self.drop_path(self._attend(self.norm1(tokens), grid)))
        return (tokens + self.drop_path(self.mlp(normed))).unflatten(1, grid)

    def _attend(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        if isinstance(self.attn, WindowAttention):
            return self.attn(x.unflatten(1, grid)).flatten(1, 2)
        return self.attn(x, grid)


class Group(nn.Module):
    """Layers and a 3 x 3 convolution, added to what came in.

    Args:
        dim: Channels C.
        blocks: The layers.
        dd: Device and dtype.
    """

    def __init__(self, dim: int, blocks: Sequence[Layer], **dd: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.conv = nn.Conv2d(dim, dim, 3, padding=1, **dd)
        self.grad_checkpointing = False

    def forward(self, x: Tensor) -> Tensor:
        """A map (B, H, W, C) of the same size."""
        out = x
        for block in self.blocks:
            anew = self.grad_checkpointing and self.training
            out = checkpoint(block, out, use_reentrant=False) if anew else block(out)
        return x + self.conv(out.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


class Upscaler(nn.Module):
    """Images (B, 3, H, W) of any size, white being 1, made so many times larger on each side.

    Where there are windows, sides that they do not divide are mirrored below and to the right, and cut off again.

    Args:
        scale: How many times larger: 2, 3 or 4.
        dim: Channels C.
        depths: Layers of each group; one number for one group.
        num_heads: Heads of every layer.
        mlp_ratio: Hidden width of the MLP over C.
        mechanism: "windows" for softmax within windows; a registered name for attention over the whole image in every
            layer; or "none" for no attention, which needs a `position_kernel`.
        alternate: Whether every second layer keeps its windows, beside attention over the whole image.
        window: Side of a window; windows of every second layer that has some are displaced by half of it.
        position_kernel: Side of the depthwise convolution of the values that every attention adds; 0 for none.
        gate: What multiplies the answers of attention over the whole image: "none", "linear" or "silu".
        drop_path_rate: Stochastic depth of the last layer.
        device: Where the weights live.
        dtype: Their dtype.

    Raises:
        ValueError: If an argument will not do.

    Example:
        >>> import torch
        >>> from affinear.models.upscaler import Upscaler
        >>> network = Upscaler(scale=3, dim=16, depths=(2,), num_heads=2, mechanism="mala", position_kernel=5)
        >>> network(torch.rand(1, 3, 5, 7)).shape
        torch.Size([1, 3, 15, 21])
        >>> sum(parameter.numel() for parameter in Upscaler(scale=4).parameters())  # SwinIR-light
        929628
    """

    mean: Tensor  # of what comes in, (3, 1, 1)

    def __init__(
        self,
        scale: int = 2,
        dim: int = 60,
        depths: Sequence[int] | int = (6, 6, 6, 6),
        num_heads: int = 6,
        mlp_ratio: float = 2.0,
        mechanism: str | Mechanism = WINDOWS,
        alternate: bool = False,
        window: int = 8,
        position_kernel: int = 0,
        gate: Literal["none", "linear", "silu"] = "none",
        drop_path_rate: float = 0.1,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        depths = (depths,) if isinstance(depths, int) else depths
        _check(scale, depths, window, position_kernel, mechanism, alternate, gate)
        self.scale = scale
        self.multiple = window if mechanism == WINDOWS or alternate else 1  # what sides are padded to
        rates: Iterator[float] = iter(calculate_drop_path_rates(drop_path_rate, sum(depths)))  # pyright: ignore

        def attention(place: int) -> WindowAttention | Attention:
            if mechanism == WINDOWS or (alternate and place % 2 == 0):
                # Of the layers that have windows, every second one has them displaced.
                displaced = place % 2 if mechanism == WINDOWS else place // 2 % 2
                return WindowAttention(dim, num_heads, window, displaced * (window // 2), position_kernel, **dd)
            return Attention(dim, num_heads, Parts(mechanism, position_kernel=position_kernel, gate=gate), **dd)

        self.conv_first = nn.Conv2d(3, dim, 3, padding=1, **dd)
        self.norm_first = nn.LayerNorm(dim, **dd)
        self.layers = nn.ModuleList(
            Group(dim, [Layer(dim, attention(j), mlp_ratio, next(rates), **dd) for j in range(depth)], **dd)
            for depth in depths
        )
        self.norm = nn.LayerNorm(dim, **dd)
        self.conv_after_body = nn.Conv2d(dim, dim, 3, padding=1, **dd)
        self.upsample = nn.Conv2d(dim, 3 * scale**2, 3, padding=1, **dd)
        self.register_buffer("mean", torch.tensor(MEAN, **dd)[:, None, None], persistent=False)
        draw(self, nn.Linear)

    def forward(self, images: Tensor) -> Tensor:
        """Larger images (B, 3, scale H, scale W)."""
        first = self.begin(self.padded(images))
        height, width = images.shape[2:]
        x = self.norm_first(first.permute(0, 2, 3, 1))
        for group in self.layers:
            x = group(x)
        x = self.conv_after_body(self.norm(x).permute(0, 3, 1, 2)) + first
        return self.finish(x)[..., : self.scale * height, : self.scale * width]

    def padded(self, images: Tensor) -> Tensor:
        """Images whose sides windows divide, mirrored where they did not.

        Raises:
            ValueError: If they are no colour images in numbers.
        """
        if images.ndim != 4 or images.shape[1] != 3 or not images.is_floating_point() or 0 in images.shape:
            raise ValueError(
                "images: expected (B, 3, H, W) in floating point, white being 1, got "
                f"{tuple(images.shape)} of {images.dtype}; divide bytes by 255"
            )
        height, width = images.shape[2:]
        below, right = -height % self.multiple, -width % self.multiple
        if not below and not right:
            return images
        # A side of one pixel, or nearly so, has not enough to mirror.
        mode = "reflect" if below < height and right < width else "replicate"
        return F.pad(images, (0, right, 0, below), mode=mode)

    def begin(self, images: Tensor) -> Tensor:
        """The first map (B, C, H, W), in no less than float32, as it is added to the last one."""
        with exact(images):
            # From here on channels are last in memory: norms and products want them so.
            centred = (images.to(self.mean.dtype) - self.mean).contiguous(memory_format=torch.channels_last)
            return self.conv_first(centred)

    def finish(self, x: Tensor) -> Tensor:
        """Images of a last map (B, C, H, W), never in less than float32: half a level of grey would be lost."""
        with exact(x):
            out = self.upsample(x.to(self.upsample.weight.dtype))
            return F.pixel_shuffle(out, self.scale) + self.mean

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Whether training recomputes the layers' activations instead of keeping them."""
        for group in self.layers:
            assert isinstance(group, Group)
            group.grad_checkpointing = enable

    def no_weight_decay(self) -> set[str]:
        """The tables of relative positions."""
        return {name for name, _ in self.named_parameters() if name.endswith("relative_position_bias_table")}

    def extra_repr(self) -> str:
        """What `print` shows: the attention of the layers."""
        return f"scale={self.scale}, {describe(self)}"


def _check(
    scale: int,
    depths: Sequence[int],
    window: int,
    position_kernel: int,
    mechanism: str | Mechanism,
    alternate: bool,
    gate: str,
) -> None:
    if scale not in SCALES:
        raise ValueError(f"scale: expected one of {', '.join(map(str, SCALES))}, got {scale}")
    if not depths or min(depths) < 1 or sum(depths) > MOST_LAYERS:
        raise ValueError(
            f"depths: expected a layer or more in each group, at most {MOST_LAYERS}, got {making.short(depths)}"
        )
    if window < 2 or window % 2:
        raise ValueError(f"window: expected an even number of pixels, as windows are displaced by half, got {window}")
    if position_kernel and (position_kernel < 0 or position_kernel % 2 == 0):
        raise ValueError(f"position_kernel: expected an odd number of pixels, or 0 for none, got {position_kernel}")
    if alternate and mechanism == WINDOWS:
        raise ValueError('alternate: expected False where the mechanism is "windows", as every layer has them')
    if gate not in ("none", "linear", "silu"):
        raise ValueError(f"gate: expected none, linear or silu, got {gate!r}")


NETWORKS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "swinir_light": {},
        # 64 in place of 60: heads of 32 are what the kernels serve, and a covariance of rank 10 can say little.
        "upscaler_light": {"dim": 64, "num_heads": 2, "mechanism": "mala", "position_kernel": 5},
    }
)


def make_upscaler(name: str, given: Mapping[str, Any], *, room: int = making.MOST_NUMBERS) -> Upscaler:
    """An upscaler by its name, with fresh weights, made with plain arguments that a file or a command line gave.

    Args:
        name: One of `NETWORKS`.
        given: Truths, numbers, names and lists of these, in place of the network's own.
        room: How many numbers its weights may have together.

    Raises:
        ValueError: If there is no such network, it does not take an argument, or it cannot be made with what it got.

    Example:
        >>> from affinear.models.upscaler import make_upscaler
        >>> make_upscaler("swinir_light", {"scale": 4}).scale
        4
        >>> make_upscaler("swinir_light", {"scales": 4})
        Traceback (most recent call last):
        ValueError: model_args: swinir_light takes no 'scales'; did you mean 'scale'?
    """
    if name not in NETWORKS:
        near = get_close_matches(name[:100], NETWORKS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"model: expected one of {', '.join(NETWORKS)}, got {making.short(name)}{hint}")
    making.check_given(name, takes(name), given)
    wanted: dict[str, Any] = {**NETWORKS[name], **given}
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            outline = Upscaler(**wanted)
        numbers = sum(tensor.numel() for tensor in (*outline.parameters(), *outline.buffers()))
    except (TypeError, ValueError, RuntimeError, ZeroDivisionError, OverflowError) as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"model_args: {name} cannot be made so: {said}") from None
    if numbers > room:
        raise ValueError(f"model_args: {name} would have {numbers:,} numbers, and there is room for {room:,}")
    return Upscaler(**wanted)


def takes(name: str) -> dict[str, Any]:
    """What an upscaler can be made with, and what it is made with unless told.

    Example:
        >>> from affinear.models.upscaler import takes
        >>> takes("upscaler_light")["mechanism"]
        'mala'
    """
    parameters = inspect.signature(Upscaler.__init__).parameters.values()
    own = {p.name: p.default for p in parameters if p.name not in ("self", "device", "dtype")}
    return {**own, **NETWORKS[name]}


def from_released(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """SwinIR's released weights under our names; ours stay as they are. Tables that follow from sizes are left out.

    Example:
        >>> import torch
        >>> from affinear.models.upscaler import from_released
        >>> list(from_released({"patch_embed.norm.bias": torch.zeros(60), "layers.0.attn_mask": torch.zeros(1)}))
        ['norm_first.bias']
    """
    return {ours: tensor for name, tensor in tensors.items() if (ours := rename(name, RELEASED)) is not None}
