"""From rows of channels to launches of the kernels in `add_norm`, and what makes a derivative of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..tracing import stands_for_many
from . import add_norm as kernels
from .library import ONCE_ONLY, ONE_ONLY, on_device
from .sizes import cdiv, next_power_of_2
from .starting import launch

HELD = 4096  # numbers that a program holds of each of its tensors
SHARES = 264  # programs that sum gradients of the weights before their sums are added up: two a multiprocessor


def rows_for(channels: int) -> dict[str, int]:
    """The block of rows of one program, and its warps."""
    width = next_power_of_2(channels)
    return {"BM": max(1, HELD // width), "BC": width, "num_warps": 8}


def add(x: Tensor, other: Tensor, weight: Tensor, bias: Tensor, eps: float, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """The sum of two tensors (..., C), and its norm in the dtype `kind`."""
    total = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, other.dtype), device=x.device)
    normed = torch.empty(x.shape, dtype=kind, device=x.device)
    channels, block = x.shape[-1], rows_for(x.shape[-1])
    rows = x.numel() // channels
    launch(
        kernels.add_norm_kernel, (cdiv(rows, block["BM"]), 1, 1),
        (*(given.contiguous() for given in (x, other, weight, bias)), total, normed), (rows, channels, eps), **block,
    )  # fmt: skip
    return total, normed


def gradients(
    grad: Tensor, grad_total: Tensor | None, total: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Of what was added, of the weight and of the bias, from those of the norm and of the sum."""
    channels, block = total.shape[-1], rows_for(total.shape[-1])
    rows = total.numel() // channels
    shares = min(SHARES, cdiv(rows, block["BM"]))
    out = torch.empty_like(total)
    parts = torch.empty(shares, 2, channels, dtype=torch.float32, device=total.device)
    more = out if grad_total is None else grad_total.contiguous()
    launch(
        kernels.add_norm_gradient_kernel, (shares, 1, 1),
        (total, weight.contiguous(), grad.contiguous(), more, out, parts), (rows, channels, eps),
        BOTH=grad_total is not None, **block,
    )  # fmt: skip
    grad_weight, grad_bias = parts.sum(0).to(weight.dtype).unbind()
    return out, grad_weight, grad_bias


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, other: Tensor, weight: Tensor, bias: Tensor, eps: float, kind: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        total, normed = on_device(add, x, other, weight, bias, eps, kind)
        ctx.save_for_backward(total, weight)
        ctx.eps, ctx.kinds = eps, (x.dtype, other.dtype)
        ctx.set_materialize_grads(False)
        return total, normed

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad, grad_normed = grads
        if torch.is_grad_enabled():
            raise RuntimeError(ONCE_ONLY)
        if any(x is not None and stands_for_many(x) for x in grads):
            raise RuntimeError(ONE_ONLY)
        grad_weight = grad_bias = None
        if grad_normed is not None:
            total, weight = ctx.saved_tensors
            grad, grad_weight, grad_bias = on_device(gradients, grad_normed, grad, total, weight, ctx.eps)
        each = (None, None) if grad is None else (grad.to(kind) for kind in ctx.kinds)
        return *each, grad_weight, grad_bias, None, None


add_norm = _AddNorm.apply  # of two tensors, weight, bias, epsilon and the dtype of the norm, the sum and its norm
