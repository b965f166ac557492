"""PSNR and SSIM as papers of super-resolution count them: on the luma Y, without the border."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ...train.task import Part, Score

SIDE, DEVIATION = 11, 1.5  # of SSIM's gaussian window
HIGHEST = 100.0  # decibels; of images that are the same
NUMBERS = 4  # that are summed up: photos, PSNR, SSIM, PSNR of bicubic


def luma(images: Tensor) -> Tensor:
    """Y of images (..., 3, H, W) in bytes: float64 from 16 to 235, not rounded.

    Example:
        >>> import torch
        >>> from affinear.tasks.upscale.metric import luma
        >>> luma(torch.full((3, 1, 1), 255)).item()
        235.0
    """
    weights = torch.tensor((65.481, 128.553, 24.966), dtype=torch.float64, device=images.device)
    return 16 + torch.einsum("...chw,c->...hw", images.double(), weights) / 255


def psnr(one: Tensor, other: Tensor) -> float:
    """Peak signal to noise of two lumas (H, W) in decibels, at most `HIGHEST`.

    Example:
        >>> import torch
        >>> from affinear.tasks.upscale.metric import psnr
        >>> round(psnr(torch.zeros(4, 4), torch.ones(4, 4)), 4)
        48.1308
    """
    error = (one.double() - other.double()).square().mean().item()
    return HIGHEST if error == 0 else min(HIGHEST, 10 * math.log10(255**2 / error))


def ssim(one: Tensor, other: Tensor) -> float:
    """Structural similarity of two lumas (H, W), each side at least 11: Wang's, where the window fits.

    Example:
        >>> import torch
        >>> from affinear.tasks.upscale.metric import ssim
        >>> luma = torch.rand(12, 15) * 255
        >>> round(ssim(luma, luma), 6)
        1.0
    """
    place = torch.arange(SIDE, dtype=torch.float64, device=one.device) - SIDE // 2
    window = torch.exp(-(place**2) / (2 * DEVIATION**2))
    window = window / window.sum()
    a, b = one.double(), other.double()
    moments = torch.stack((a, b, a * a, b * b, a * b))[:, None]
    moments = F.conv2d(F.conv2d(moments, window.view(1, 1, -1, 1)), window.view(1, 1, 1, -1))
    mean_a, mean_b, square_a, square_b, product = moments[:, 0]
    small, smaller = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    alike = (2 * mean_a * mean_b + small) * (2 * (product - mean_a * mean_b) + smaller)
    spread = (square_a - mean_a**2) + (square_b - mean_b**2) + smaller
    return (alike / ((mean_a**2 + mean_b**2 + small) * spread)).mean().item()


def compared(found: Tensor, truth: Tensor, border: int) -> tuple[float, float]:
    """PSNR and SSIM of two images (3, H, W) in bytes, on Y, without so many pixels of the border."""
    inside = slice(border, -border or None)
    one, other = (luma(image)[inside, inside] for image in (found, truth))
    return psnr(one, other), ssim(one, other)


def score_of(sums: Tensor, sets: Sequence[str], skipped: Sequence[str]) -> Score:
    """A score out of the sums (sets, NUMBERS) over all photos of every set; sets without a photo are left out."""
    whole = sums.sum(0)
    parts = tuple(Part(name, int(row[0]), _means(row)) for name, row in zip(sets, sums, strict=True) if int(row[0]) > 0)
    return Score(_means(whole), int(whole[0]), parts, tuple(skipped))


def _means(row: Tensor) -> dict[str, float]:
    count, *totals = row.tolist()
    peak, similarity, bicubic = (total / max(count, 1) for total in totals)
    return {"psnr": peak, "ssim": similarity, "gain": peak - bicubic}
