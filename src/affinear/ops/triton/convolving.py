"""From maps to launches of the kernels in `depthwise`: strips, grids and room for results. No autograd here.

Maps are (B, H, W, C), or (1, B, H, W, C) as a compiler is told of them.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from . import depthwise as kernels
from .sizes import cdiv, next_power_of_2
from .starting import launch

SHARES = 1536  # programs that sum gradients of a kernel before their sums are added up: a dozen a multiprocessor
PROGRAMS = 4096  # at the least, where maps are large enough: a program walks on while there are as many
PAIRS = 64  # numbers that the threads of a warp hold, two each


class Strip(NamedTuple):
    """What a program walks along.

    Attributes:
        R: Rows.
        U: Columns at a time.
        P: Strips side by side.
        BC: Channels.
    """

    R: int
    U: int
    P: int
    BC: int


@cache
def strip_for(side: int, height: int, width: int, channels: int) -> Strip:
    """The strip of a convolution with a square kernel of this side."""
    bc = PAIRS if channels % PAIRS in (0, *range(PAIRS // 2 + 1, PAIRS)) else PAIRS // 2
    bc = min(bc, max(16, next_power_of_2(channels)))
    # More rows would not fit the registers: (R + K - 1) * K pairs of numbers are kept, and K * K taps.
    rows = _least_waste(height, (7, 8, 4) if side == 3 else (4,) if side == 5 else (2,))
    return Strip(rows, 1 if width % 2 else 2, PAIRS // bc, bc)


def _least_waste(length: int, sizes: tuple[int, ...]) -> int:
    """The size whose multiples exceed a length by the least; the first of equals."""
    return min(sizes, key=lambda size: cdiv(length, size) * size)


@cache
def span_of(width: int, others: int, s: Strip) -> int:
    """Columns a program walks along, in whole steps: all, or fewer where there would be too few programs."""
    steps = cdiv(width, s.U)
    wanted = min(steps, cdiv(PROGRAMS, max(others, 1)) * s.P)
    return cdiv(steps, wanted) * s.U


def strides(x: Tensor) -> tuple[int, int, int]:
    """Of images, rows and columns; channels lie side by side."""
    return x.stride(-4), x.stride(-3), x.stride(-2)


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
    """(added + convolution of x) * gate, all of one shape; `itself` adds x, `flip` turns the kernel around."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _start(x, weight, bias, added, gate, None, out, None, itself, flip, strip)
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
    out_sum: Tensor | None,
    itself: bool,
    flip: bool,
    strip: Strip | None,
) -> None:
    (batch, height, width, channels), side = x.shape[-4:], weight.shape[-1]
    s = strip or strip_for(side, height, width, channels)
    c_blocks, h_blocks = cdiv(channels, s.BC), cdiv(height, s.R)
    span = span_of(width, c_blocks * h_blocks * batch, s)
    # For what is not there stands something that is read and no result: another map, or a copy of a result that is
    # given twice, a compiler might make for the purpose.
    bias = None if bias is None else bias.contiguous()
    others = [weight if other is None else other for other in (bias, added, gate, grad)]
    steps = [(0, 0, 0) if other is None else strides(other) for other in (added, gate, grad)]
    launch(
        kernels.depthwise_kernel,
        (cdiv(width, span * s.P) * c_blocks, h_blocks, batch),
        (x, weight, *others, out, weight if out_sum is None else out_sum),
        (*strides(x), *steps[0], *steps[1], *steps[2], height, width, channels, span),
        K=side, FLIP=flip, BIAS=bias is not None, SELF=itself, ADD=added is not None, GATE=gate is not None,
        GRAD=grad is not None, R=s.R, U=s.U, P=s.P, BC=s.BC, num_warps=1,
    )  # fmt: skip


def taps_gradient(
    grad: Tensor, x: Tensor, weight: Tensor, *, strip: Strip | None = None, shares: int = SHARES
) -> tuple[Tensor, Tensor]:
    """Gradients of a kernel (C, 1, K, K) and of its bias (C,), both in the dtype of the kernel."""
    (batch, height, width, channels), side = x.shape[-4:], weight.shape[-1]
    s = strip or strip_for(side, height, width, channels)
    c_blocks, span = cdiv(channels, s.BC), cdiv(cdiv(width, s.U), s.P) * s.U
    strips = batch * cdiv(height, s.R) * cdiv(width, span * s.P)
    shares = min(strips, max(1, shares // c_blocks))
    parts = torch.empty(shares, side * side + 1, channels, dtype=torch.float32, device=x.device)
    grad_weight = torch.empty(weight.shape, dtype=weight.dtype, device=x.device)
    grad_bias = torch.empty(channels, dtype=weight.dtype, device=x.device)
    launch(
        kernels.taps_gradient_kernel, (c_blocks, shares, 1), (x, grad, parts),
        (*strides(x), *strides(grad), batch, height, width, channels, span),
        K=side, R=s.R, U=s.U, P=s.P, BC=s.BC, num_warps=1,
    )  # fmt: skip
    launch(
        kernels.taps_total_kernel, (side * side + 1, cdiv(channels, 32), 1), (parts, grad_weight, grad_bias),
        (shares, channels), K=side, BS=64, BC=32, num_warps=4,
    )  # fmt: skip
    return grad_weight, grad_bias
