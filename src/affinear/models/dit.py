"""DiT: a transformer that denoises images or latents, told the time and a class, around any mechanism.

Paper: Scalable Diffusion Models with Transformers, arXiv 2212.09748. Written from the paper: tokens of patches with
fixed sines, blocks whose norms are shifted, scaled and gated by time and class (adaLN-Zero), and a linear layer back to
patches. Rotary positions, the convolution of the values and the gate of MALA are choices beside it, off as published.
"""

from __future__ import annotations

import math
from typing import Any, Literal, cast

import torch
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model, register_notrace_module
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..layers import Attention, AxialRotary, Parts
from ..ops import Mechanism
from ._config import config
from ._pyramid import describe

NORM_EPS = 1e-6
FREQUENCIES = 256  # numbers that a time becomes before the network sees it
PERIOD = 10_000.0
TRAINED_STEPS = 1000.0  # what one unit of a flow's time is to the network, whose sines are made for a thousand steps


class Times(nn.Module):
    """What the network knows of the time: cosines and sines of it, through two linear layers.

    Args:
        dim: Channels C.
        closed: Whether the slowest frequency is 1 / 10,000 itself, as in diffusers, and not the one before it.
        device: Where the weights live.
        dtype: Their dtype.
    """

    def __init__(self, dim: int, closed: bool = False, **dd: Any) -> None:
        super().__init__()
        self.closed = closed
        self.inner = nn.Linear(FREQUENCIES, dim, **dd)
        self.outer = nn.Linear(dim, dim, **dd)

    def forward(self, times: Tensor) -> Tensor:
        """(B, C) of times (B,), from 0 to 1,000."""
        half = FREQUENCIES // 2
        places = torch.arange(half, device=times.device, dtype=torch.float32)
        # In this order, so that the last bit of a frequency is diffusers' too: times go up to a thousand.
        angles = times[:, None].float() * torch.exp(-math.log(PERIOD) * places / (half - self.closed))
        seen = torch.cat((angles.cos(), angles.sin()), dim=-1).to(self.inner.weight.dtype)
        return self.outer(F.silu(self.inner(seen)))

    def extra_repr(self) -> str:
        """What `print` shows."""
        return f"closed={self.closed}"


class Block(nn.Module):
    """Attention and MLP; time and class shift and scale what each gets, and gate what it gives."""

    def __init__(self, dim: int, num_heads: int, parts: Parts, mlp_ratio: float, **dd: Any) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=NORM_EPS, elementwise_affine=False, **dd)
        self.attn = Attention(dim, num_heads, parts, **dd)
        self.norm2 = nn.LayerNorm(dim, eps=NORM_EPS, elementwise_affine=False, **dd)
        self.fc1 = nn.Linear(dim, int(dim * mlp_ratio), **dd)
        self.fc2 = nn.Linear(int(dim * mlp_ratio), dim, **dd)
        self.modulation = nn.Linear(dim, 6 * dim, **dd)

    def forward(
        self, x: Tensor, told: Tensor, grid: tuple[int, int], rotary: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """Tokens (B, N, C), with what is told of time and class (B, C), after its SiLU."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(told)[:, None].chunk(6, dim=-1)
        x = x + gate1 * self.attn(torch.addcmul(shift1, self.norm1(x), 1 + scale1), grid, rotary=rotary)
        inner = F.gelu(self.fc1(torch.addcmul(shift2, self.norm2(x), 1 + scale2)), approximate="tanh")
        return x + gate2 * self.fc2(inner)


register_notrace_module(Block)  # torch.fx takes a block as one node


class DiT(nn.Module):
    """A diffusion transformer for images or latents whose sides are multiples of the patch.

    Args:
        patch_size: Side of a patch.
        in_chans: Channels of images or latents.
        num_classes: Classes; one more stands for "any", which is what guidance compares with.
        embed_dim: Channels of a token, a multiple of four.
        depth: Blocks.
        num_heads: Heads.
        mlp_ratio: Hidden width of the MLP over channels.
        mechanism: A registered name, a `Mechanism`, or "none": no attention, which takes a `position_kernel`.
        rotary: Whether queries and keys turn with their place as well.
        position_kernel: Side of the depthwise convolution of the values that is added; 0 for none.
        gate: What multiplies what attention gives: "none", or a "linear" or "silu" function of the input.
        learn_sigma: Whether twice as many channels come out, the second half for the variance.
        closed_frequencies: Whether times are seen as diffusers shows them, whose slowest frequency is another.
        device: Where the weights live.
        dtype: Their dtype.

    Example:
        >>> import timm, torch
        >>> import affinear.models
        >>> model = timm.create_model("dit_s_2", in_chans=3, num_classes=10, depth=1, mechanism="mala").eval()
        >>> model(torch.randn(2, 3, 32, 32), torch.tensor([999, 0]), torch.tensor([7, 10])).shape
        torch.Size([2, 6, 32, 32])
    """

    def __init__(
        self,
        patch_size: int = 2,
        in_chans: int = 4,
        num_classes: int = 1000,
        embed_dim: int = 384,
        depth: int = 12,
        num_heads: int = 6,
        mlp_ratio: float = 4.0,
        mechanism: str | Mechanism = "softmax",
        rotary: bool = False,
        position_kernel: int = 0,
        gate: str = "none",
        learn_sigma: bool = True,
        closed_frequencies: bool = False,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check(patch_size, embed_dim, num_classes, gate)
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        self.patch_size, self.in_chans, self.num_classes = patch_size, in_chans, num_classes
        self.embed_dim, self.out_chans = embed_dim, in_chans * (1 + learn_sigma)
        self.grad_checkpointing = False
        parts = Parts(
            mechanism,
            rotary=rotary,
            position_kernel=position_kernel,
            gate=cast('Literal["none", "linear", "silu"]', gate),
        )
        self.patch_embed = nn.Conv2d(in_chans, embed_dim, patch_size, patch_size, **dd)
        self.times = Times(embed_dim, closed_frequencies, **dd)
        self.labels = nn.Embedding(num_classes + 1, embed_dim, **dd)
        self.rotary = AxialRotary(embed_dim // num_heads) if rotary else None
        self.blocks = nn.ModuleList(Block(embed_dim, num_heads, parts, mlp_ratio, **dd) for _ in range(depth))
        self.norm = nn.LayerNorm(embed_dim, eps=NORM_EPS, elementwise_affine=False, **dd)
        self.modulation = nn.Linear(embed_dim, 2 * embed_dim, **dd)
        self.head = nn.Linear(embed_dim, patch_size**2 * self.out_chans, **dd)
        self._draw()

    def _draw(self) -> None:
        """Xavier's weights; time and class from a normal of 0.02; what gates and what ends begins as nothing."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.xavier_uniform_(self.patch_embed.weight.view(self.embed_dim, -1))
        assert self.patch_embed.bias is not None
        nn.init.zeros_(self.patch_embed.bias)
        for weight in (self.labels.weight, self.times.inner.weight, self.times.outer.weight):
            nn.init.normal_(weight, std=0.02)
        modulations = [cast(Block, block).modulation for block in self.blocks]
        for last in (*modulations, self.modulation, self.head):
            nn.init.zeros_(last.weight)

    def forward(self, x: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        """What the network says of noisy images: the noise, or the velocity; then, if learnt, of the variance.

        Args:
            x: (B, in_chans, H, W).
            times: (B,), from 0 to 1,000.
            labels: (B,), int64, `num_classes` for any.

        Returns:
            (B, in_chans, H, W), or twice the channels with `learn_sigma`.
        """
        rows, columns = self._grid(x)
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        # In the weights' dtype, so that under autocast tokens are summed up in float32 from block to block.
        x = x + sines(rows, columns, self.embed_dim, x.device).to(self.patch_embed.weight.dtype)
        told = F.silu(self.times(times) + self.labels(labels))
        tables = None
        if self.rotary is not None:
            tables = self.rotary(x.unflatten(1, (rows, columns)))
        for block in self.blocks:
            given = (x, told, (rows, columns), tables)
            x = checkpoint(block, *given, use_reentrant=False) if self.grad_checkpointing else block(*given)
        shift, scale = self.modulation(told)[:, None].chunk(2, dim=-1)
        x = self.head(torch.addcmul(shift, self.norm(x), 1 + scale))
        # Tokens to images: patches lie row by row, channels last within a patch.
        x = x.unflatten(2, (self.patch_size, self.patch_size, self.out_chans)).unflatten(1, (rows, columns))
        return x.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)

    def _grid(self, x: Tensor) -> tuple[int, int]:
        channels, height, width = x.shape[1:]
        if channels != self.in_chans or height % self.patch_size or width % self.patch_size or not height * width:
            raise ValueError(
                f"x: expected {self.in_chans} channels and sides that are multiples of the patch, {self.patch_size}, "
                f"got {channels} x {height} x {width}"
            )
        return height // self.patch_size, width // self.patch_size

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Whether training recomputes activations instead of keeping them."""
        self.grad_checkpointing = enable

    def no_weight_decay(self) -> set[str]:
        """Parameters that timm's optimizers leave out of weight decay, beside biases."""
        return {"labels.weight"}

    def extra_repr(self) -> str:
        """What `print` shows: the attention of the blocks."""
        return describe(self)


def sines(rows: int, columns: int, dim: int, device: torch.device | None = None) -> Tensor:
    """Fixed positions of a grid, (rows * columns, dim): half of the channels for the column, half for the row.

    Examples:
        >>> sines(2, 3, 8).shape
        torch.Size([6, 8])
    """
    speeds = PERIOD ** (-torch.arange(dim // 4, dtype=torch.float64, device=device) / (dim // 4))
    down, right = (torch.arange(side, dtype=torch.float64, device=device)[:, None] * speeds for side in (rows, columns))
    row, column = (torch.cat((angles.sin(), angles.cos()), dim=-1).float() for angles in (down, right))
    halves = column[None].expand(rows, -1, -1), row[:, None].expand(-1, columns, -1)
    return torch.cat(halves, dim=-1).flatten(0, 1)


def _check(patch_size: int, embed_dim: int, num_classes: int, gate: str) -> None:
    if patch_size < 1 or num_classes < 1:
        raise ValueError(f"patch_size, num_classes: expected 1 or more, got {patch_size} and {num_classes}")
    if embed_dim % 4:
        raise ValueError(f"embed_dim: expected a multiple of 4, for sines of rows and columns, got {embed_dim}")
    if gate not in ("none", "linear", "silu"):
        raise ValueError(f"gate: expected none, linear or silu, got {gate!r}")


SIZES: dict[str, dict[str, Any]] = {
    "dit_s_2": {"embed_dim": 384, "depth": 12, "num_heads": 6},
    "dit_b_2": {"embed_dim": 768, "depth": 12, "num_heads": 12},
    "dit_l_2": {"embed_dim": 1024, "depth": 24, "num_heads": 16},
    "dit_xl_2": {"embed_dim": 1152, "depth": 28, "num_heads": 16},
}

default_cfgs = generate_default_cfgs(
    {
        name: config(
            32,
            input_size=(4, 32, 32),
            pool_size=None,
            mean=(0.5,) * 3,
            std=(0.5,) * 3,
            crop_pct=1.0,
            first_conv="patch_embed",
            classifier="labels",
            paper_name="DiT",
            paper_ids="arXiv:2212.09748",
        )
        for name in SIZES
    }
)


def _build(name: str, pretrained: bool, given: dict[str, Any]) -> DiT:
    return build_model_with_cfg(DiT, name, pretrained, **{**SIZES[name], **given})


@register_model
def dit_s_2(pretrained: bool = False, **given: Any) -> DiT:
    """DiT-S/2: 12 blocks, width 384, 33 million parameters."""
    return _build("dit_s_2", pretrained, given)


@register_model
def dit_b_2(pretrained: bool = False, **given: Any) -> DiT:
    """DiT-B/2: 12 blocks, width 768, 130 million parameters."""
    return _build("dit_b_2", pretrained, given)


@register_model
def dit_l_2(pretrained: bool = False, **given: Any) -> DiT:
    """DiT-L/2: 24 blocks, width 1024, 458 million parameters."""
    return _build("dit_l_2", pretrained, given)


@register_model
def dit_xl_2(pretrained: bool = False, **given: Any) -> DiT:
    """DiT-XL/2: 28 blocks, width 1152, 675 million parameters."""
    return _build("dit_xl_2", pretrained, given)
