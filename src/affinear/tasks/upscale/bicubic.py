"""Bicubic resizing as MATLAB's `imresize` does it, which all published numbers of super-resolution are made with.

Shrinking stretches the kernel, so that nothing finer than the new pixels is left; beyond the border the image is
mirrored, its last pixel included.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor


def resize(images: Tensor, factor: float) -> Tensor:
    """Images of another size, their sides rounded up.

    Args:
        images: (..., H, W), in float32 or float64.
        factor: New sides over old ones: 4, or 1 / 4.

    Returns:
        Images in the same dtype, not rounded and not cut off at black and white.

    Raises:
        ValueError: If the factor is not positive, or the images are not of floating point.

    Example:
        >>> import torch
        >>> from affinear.tasks.upscale.bicubic import resize
        >>> resize(torch.tensor([[0.0, 0.0, 1.0, 1.0]]), 1 / 2)
        tensor([[0.0547, 0.9453]])
    """
    if not factor > 0:
        raise ValueError(f"factor: expected a number above 0, got {factor}")
    if not images.is_floating_point():
        raise ValueError(f"images: expected floating point, got {images.dtype}; divide or cast them first")
    rows_done = _along_last(images.transpose(-1, -2), factor).transpose(-1, -2)
    return _along_last(rows_done, factor)


def to_bytes(images: Tensor) -> Tensor:
    """Grey levels (0 to 255) rounded, halves up, and cut off: uint8.

    Example:
        >>> import torch
        >>> from affinear.tasks.upscale.bicubic import to_bytes
        >>> to_bytes(torch.tensor([-3.0, 0.5, 254.4, 300.0])).tolist()
        [0, 1, 254, 255]
    """
    return (images + 0.5).floor().clamp(0, 255).to(torch.uint8)


def _along_last(x: Tensor, factor: float) -> Tensor:
    """Resize the last dimension, one tap of the kernel after the other."""
    indices, weights = (table.to(x.device) for table in _taps(x.shape[-1], factor))
    weights = weights.to(x.dtype)
    out = x[..., indices[0]] * weights[0]
    for index, weight in zip(indices[1:], weights[1:], strict=True):
        out = out.addcmul(x[..., index], weight)
    return out


@lru_cache(maxsize=64)
def _taps(length: int, factor: float) -> tuple[Tensor, Tensor]:
    """Which old pixels make each new one, and how much they weigh; each (taps, new length)."""
    new = math.ceil(length * factor - 1e-9)
    step = 1 / factor
    # A third is no number of a computer's; three is, and then weights are the same wherever the pixels are.
    step = float(round(step)) if abs(step - round(step)) < 1e-9 else step
    stretch = max(1.0, step)
    centre = (torch.arange(new, dtype=torch.float64) + 0.5) * step - 0.5
    taps = math.ceil(4 * stretch) + 2
    indices = (centre - 2 * stretch).floor().long() + torch.arange(taps)[:, None]
    weights = _cubic((centre - indices) / stretch)
    weights = weights / weights.sum(0)
    mirrored = indices % (2 * length)
    mirrored = torch.where(mirrored < length, mirrored, 2 * length - 1 - mirrored)
    used = weights.any(dim=1)
    return mirrored[used], weights[used]


def _cubic(x: Tensor) -> Tensor:
    """Keys' kernel, whose slope at one is minus a half."""
    x = x.abs()
    near = (1.5 * x - 2.5) * x**2 + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return torch.where(x <= 1, near, torch.where(x < 2, far, 0.0))
