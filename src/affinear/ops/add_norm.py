"""A residual sum and the layer norm of it, in one pass."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .tracing import has_tangents, is_compiling, is_transformed
from .triton import backend as triton_backend

WIDEST = 4096  # channels that a program holds


def add_norm(
    x: Tensor, other: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """X + other, and its layer norm over the last axis.

    Args:
        x: (..., C), of any strides.
        other: The same shape and device; another dtype is promoted as in a sum.
        weight: (C,), in the dtype of the sum or in float32; under autocast in any.
        bias: (C,), in the dtype of the weight.
        eps: Added to the variance.
        backend: "triton" (one pass, for CUDA), "torch", or "auto", which is "triton" for CUDA tensors that it can serve
            and "torch" for all others, and in compiled networks, whose compiler makes such a pass itself.

    Returns:
        The sum (..., C), and its norm (..., C): in the dtype of the sum, or under autocast in that of
        linear layers.

    Raises:
        ValueError: If the arguments do not fit.

    Example:
        >>> import torch
        >>> from affinear.ops import add_norm
        >>> x, other = torch.randn(2, 2, 5, 8).unbind()
        >>> total, normed = add_norm(x, other, torch.ones(8), torch.zeros(8))
        >>> torch.equal(total, x + other), normed.shape
        (True, torch.Size([2, 5, 8]))
    """
    _check(x, other, weight, bias, backend)
    kind = _kind_of_norm(x, other)
    plain = backend == "torch" or (backend == "auto" and not x.is_cuda)  # also where Triton could interpret the kernels
    reason = "expected CUDA tensors" if plain else _why_not(x, other, weight, bias)
    if backend == "triton" and reason is not None:
        raise ValueError(f"backend: {reason}; pass backend='torch'")
    if reason is not None or x.numel() == 0:
        return _in_torch(x, other, weight, bias, eps, kind)
    from .triton import adding

    return adding.add_norm(x, other, weight, bias, eps, kind)  # pyright: ignore[reportReturnType]


def _in_torch(
    x: Tensor, other: Tensor, weight: Tensor, bias: Tensor, eps: float, kind: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The same in torch's own operations."""
    total = x + other
    wide = torch.promote_types(total.dtype, weight.dtype)
    return total, F.layer_norm(total.to(wide), weight.shape, weight.to(wide), bias.to(wide), eps).to(kind)


def _kind_of_norm(x: Tensor, other: Tensor) -> torch.dtype:
    """The dtype that a linear layer would take the norm in."""
    kind = torch.promote_types(x.dtype, other.dtype)
    return torch.get_autocast_dtype(x.device.type) if _is_autocast(x) and kind != torch.float64 else kind


def _is_autocast(x: Tensor) -> bool:
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def _why_not(*tensors: Tensor) -> str | None:
    """Why the kernels cannot serve a call; None where they can."""
    x = tensors[0]
    if x.device.type != "cuda" and not (triton_backend.INTERPRETED and x.device.type == "cpu"):
        return f"expected CUDA tensors for 'triton', got {x.device}"
    if any(tensor.dtype == torch.float64 for tensor in tensors):
        return "expected float16, bfloat16 or float32 for 'triton', got torch.float64"
    if x.shape[-1] > WIDEST:
        return f"expected up to {WIDEST} channels for 'triton', got {x.shape[-1]}"
    if is_compiling():
        return "expected a call outside torch.compile for 'triton', got one inside"
    if is_transformed() or has_tangents():
        return "expected a call outside torch.func and forward_ad for 'triton', got one inside"
    watched = torch._C._len_torch_dispatch_stack()  # pyright: ignore[reportPrivateUsage]
    if watched or any(type(tensor) not in (Tensor, torch.nn.Parameter) for tensor in tensors):
        return "expected plain tensors and no dispatch mode for 'triton', got others"
    return triton_backend.lacks(x.device.index)


def _check(x: Tensor, other: Tensor, weight: Tensor, bias: Tensor, backend: str) -> None:
    if backend not in ("auto", "torch", "triton"):
        raise ValueError(f"backend: expected 'auto', 'torch' or 'triton', got {backend!r}")
    if x.ndim == 0:
        raise ValueError("x: expected channels on its last axis, got a number")
    if other.shape != x.shape or other.device != x.device:
        raise ValueError(
            f"other: expected {tuple(x.shape)} on {x.device}, as x has, got {tuple(other.shape)} on {other.device}"
        )
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor.shape != x.shape[-1:] or tensor.device != x.device:
            raise ValueError(
                f"{name}: expected ({x.shape[-1]},) on {x.device}, got {tuple(tensor.shape)} on {tensor.device}"
            )
    kinds = {torch.promote_types(x.dtype, other.dtype), torch.float32}
    if _is_autocast(x):
        kinds.add(weight.dtype)
    if weight.dtype not in kinds or bias.dtype != weight.dtype:
        wanted = " or ".join(sorted(map(str, kinds)))
        raise ValueError(f"weight: expected {wanted}, and bias the same, got {weight.dtype} and {bias.dtype}")
