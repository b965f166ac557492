"""Depthwise convolution of maps with channels last, with the sum it feeds and the gate after that, in one pass."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .tracing import has_tangents, is_compiling, is_transformed
from .triton import backend as triton_backend
from .triton import passes

SIDES = (3, 5, 7)
MULTIPLE = 8  # of channels


def depthwise(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    itself: bool = False,
    added: Tensor | None = None,
    gate: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """One kernel per channel over maps, with what is added to the result and what gates the sum, in one pass.

    (x + added + convolution of x) * gate, of which all but the convolution may be left out.

    Args:
        x: Maps (B, H, W, C), of any strides; best with channels side by side.
        weight: One odd square kernel per channel, (C, 1, K, K), in the dtype of `x` or in float32.
        bias: (C,), likewise.
        itself: Whether `x` is added to its convolution.
        added: (B, H, W, C), what else is.
        gate: (B, H, W, C), what multiplies the sum.
        backend: "triton" (one pass over the maps, for CUDA), "torch", or "auto", which is "triton" for CUDA tensors
            that it can serve and "torch" for all others.

    Returns:
        Maps (B, H, W, C) in the dtype of `x`.

    Raises:
        ValueError: If the arguments do not fit.

    Example:
        >>> import torch
        >>> from affinear.ops import depthwise
        >>> x, weight = torch.randn(2, 5, 7, 8), torch.randn(8, 1, 3, 3)
        >>> depthwise(x, weight, itself=True).shape
        torch.Size([2, 5, 7, 8])
    """
    _check(x, weight, bias, added, gate, backend)
    plain = backend == "torch" or (backend == "auto" and not x.is_cuda)  # also where Triton could interpret the kernels
    reason = "expected CUDA tensors" if plain else _why_not(x, weight)
    if backend == "triton" and reason is not None:
        raise ValueError(f"backend: {reason}; pass backend='torch'")
    if reason is not None:
        return _in_torch(x, weight, bias, itself, added, gate)
    if is_compiling():
        return _with_five_axes(x, weight, bias, itself, added, gate)
    return passes.depthwise(x, weight, bias, itself, added, gate, False)


def _with_five_axes(
    x: Tensor, weight: Tensor, bias: Tensor | None, itself: bool, added: Tensor | None, gate: Tensor | None
) -> Tensor:
    """The same for a compiler, which takes what has four axes for (B, C, H, W).

    In networks with convolutions inductor keeps those for backward with the second axis innermost, so that maps with
    their channels last would be turned over when they are kept, and back again when they are needed.
    """
    x, added, gate = (None if other is None else other.unsqueeze(0) for other in (x, added, gate))  # pyright: ignore
    return passes.depthwise(x, weight, bias, itself, added, gate, False).squeeze(0)


def _in_torch(
    x: Tensor, weight: Tensor, bias: Tensor | None, itself: bool, added: Tensor | None, gate: Tensor | None
) -> Tensor:
    """The same in torch's own operations."""
    weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    out = F.conv2d(x.permute(0, 3, 1, 2), weight, bias, padding=weight.shape[-1] // 2, groups=weight.shape[0])
    out = out.permute(0, 2, 3, 1)
    if itself:
        out = x + out
    if added is not None:
        out = added + out
    return out if gate is None else out * gate


def _why_not(x: Tensor, weight: Tensor) -> str | None:
    """Why the kernels cannot serve a call; None where they can."""
    side, channels = weight.shape[-1], x.shape[3]
    if x.device.type != "cuda" and not (triton_backend.INTERPRETED and x.device.type == "cpu"):
        return f"expected CUDA tensors for 'triton', got {x.device}"
    if x.dtype == torch.float64 or weight.dtype == torch.float64:
        return "expected float16, bfloat16 or float32 for 'triton', got torch.float64"
    if side not in SIDES or channels % MULTIPLE:
        return f"expected kernels {SIDES} wide and channels by {MULTIPLE} for 'triton', got {side} and {channels}"
    if is_transformed() or has_tangents():
        return "expected a call outside torch.func and forward_ad for 'triton', got one inside"
    return triton_backend.lacks(x.device.index)


def _check(
    x: Tensor, weight: Tensor, bias: Tensor | None, added: Tensor | None, gate: Tensor | None, backend: str
) -> None:
    if backend not in ("auto", "torch", "triton"):
        raise ValueError(f"backend: expected 'auto', 'torch' or 'triton', got {backend!r}")
    if x.ndim != 4:
        raise ValueError(f"x: expected maps (B, H, W, C), got {tuple(x.shape)}")
    channels, side = x.shape[3], weight.shape[-1]
    if weight.shape != (channels, 1, side, side) or side % 2 == 0:
        raise ValueError(
            f"weight: expected ({channels}, 1, K, K), K odd, for {channels} channels, got {tuple(weight.shape)}"
        )
    if bias is not None and bias.shape != (channels,):
        raise ValueError(f"bias: expected ({channels},), got {tuple(bias.shape)}")
    for name, other in (("added", added), ("gate", gate)):
        if other is not None and (other.shape != x.shape or other.dtype != x.dtype):
            raise ValueError(
                f"{name}: expected {tuple(x.shape)} in {x.dtype}, as x, got {tuple(other.shape)} in {other.dtype}"
            )
