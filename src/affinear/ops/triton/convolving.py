"""From maps to launches of the kernels in `depthwise`: strips, grids and room for results. No autograd here."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from . import depthwise as kernels
from .sizes import cdiv, next_power_of_2
from .starting import launch

SHARES = 256  # of the strips, over which gradients of a kernel are summed before they are added up


class Strip(NamedTuple):
    """What a program makes at a time.

    Attributes:
        R: Rows.
        BW: Columns.
        BC: Channels.
        warps: Warps of a program.
    """

    R: int
    BW: int
    BC: int
    warps: int


@cache
def strip_for(side: int, height: int, width: int, channels: int, itemsize: int) -> Strip:
    """The strip of a convolution with a square kernel of this side."""
    bc = min(64, next_power_of_2(channels))
    bw = min(8, next_power_of_2(width))
    return Strip(8 if height > 8 else next_power_of_2(height), bw, bc, max(1, bw * bc // (256 if side == 3 else 128)))


@cache
def gradient_strip_for(side: int, height: int, width: int, channels: int, itemsize: int) -> Strip:
    """The strip over which gradients of the kernel are summed."""
    bc = min(64, next_power_of_2(channels))
    bw = min(4, next_power_of_2(width))
    return Strip(4 if side == 3 else 2, bw, bc, max(1, bw * bc // (128 if side == 3 else 64)))


def strides(x: Tensor) -> tuple[int, int, int]:
    """Of images, rows and columns; channels lie side by side."""
    return x.stride(0), x.stride(1), x.stride(2)


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    itself: bool = False,
    added: Tensor | None = None,
    gate: Tensor | None = None,
    flip: bool = False,
    strip: Strip | None = None,
) -> Tensor:
    """(added + convolution of x) * gate, all (B, H, W, C); `itself` adds x, `flip` turns the kernel around."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _start(x, weight, bias, added, gate, None, out, out, itself, flip, strip)
    return out


def gate_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, added: Tensor | None, gate: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the gate, and of what it gates."""
    grad_gate, grad_sum = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _start(x, weight, bias, added, gate, grad, grad_gate, grad_sum, False, False, None)
    return grad_gate, grad_sum


def _start(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    added: Tensor | None,
    gate: Tensor | None,
    grad: Tensor | None,
    out: Tensor,
    out_sum: Tensor,
    itself: bool,
    flip: bool,
    strip: Strip | None,
) -> None:
    (batch, height, width, channels), side = x.shape, weight.shape[-1]
    s = strip or strip_for(side, height, width, channels, x.element_size())
    # For what is not there stands something that is: another map a compiler might make for the purpose.
    others = [weight if other is None else other for other in (added, gate, grad)]
    steps = [(0, 0, 0) if other is None else strides(other) for other in (added, gate, grad)]
    launch(
        kernels.depthwise_kernel,
        (cdiv(width, s.BW) * cdiv(channels, s.BC), cdiv(height, s.R), batch),
        (x, weight, weight if bias is None else bias, *others, out, out_sum),
        (*strides(x), *steps[0], *steps[1], *steps[2], height, width, channels),
        K=side, FLIP=flip, BIAS=bias is not None, SELF=itself, ADD=added is not None, GATE=gate is not None,
        GRAD=grad is not None, R=s.R, BW=s.BW, BC=s.BC, num_warps=s.warps,
    )  # fmt: skip


def taps_gradient(
    grad: Tensor, x: Tensor, weight: Tensor, *, strip: Strip | None = None, shares: int = SHARES
) -> tuple[Tensor, Tensor]:
    """Gradients of a kernel (C, 1, K, K) and of its bias (C,), both in the dtype of the kernel."""
    (batch, height, width, channels), side = x.shape, weight.shape[-1]
    s = strip or gradient_strip_for(side, height, width, channels, x.element_size())
    strips = batch * cdiv(height, s.R) * cdiv(width, s.BW)
    shares = min(strips, max(1, shares // cdiv(channels, s.BC)) if channels > s.BC else shares)
    parts = torch.empty(shares, side * side + 1, channels, dtype=torch.float32, device=x.device)
    grad_weight = torch.empty(weight.shape, dtype=weight.dtype, device=x.device)
    grad_bias = torch.empty(channels, dtype=weight.dtype, device=x.device)
    launch(
        kernels.taps_gradient_kernel, (cdiv(channels, s.BC), shares, 1), (x, grad, parts),
        (*strides(x), *strides(grad), batch, height, width, channels),
        K=side, R=s.R, BW=s.BW, BC=s.BC, num_warps=s.warps,
    )  # fmt: skip
    launch(
        kernels.taps_total_kernel, (side * side + 1, cdiv(channels, 32), 1), (parts, grad_weight, grad_bias),
        (shares, channels), K=side, BS=16, BC=32, num_warps=4,
    )  # fmt: skip
    return grad_weight, grad_bias
