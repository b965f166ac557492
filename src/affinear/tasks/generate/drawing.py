"""What a network made, as pictures: grids, and strips from one noise to another."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO

import numpy as np
import torch
from PIL import Image
from torch import Tensor

GAP = 2  # pixels between the pictures of a grid
SHOWN = 64  # side that a picture on a page has at least


def as_bytes(images: Tensor) -> Tensor:
    """Pictures (..., C, H, W) of 256 brightnesses, uint8, of numbers from -1 to 1.

    Examples:
        >>> as_bytes(torch.tensor([[[-1.0, 0.0, 1.0, 7.0]]])).tolist()
        [[[0, 128, 255, 255]]]
    """
    return ((images.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


def seen(images: Tensor, latent: bool) -> Tensor:
    """What can be looked at, (B, 1 or 3, H, W), uint8: pictures; of latents the first three channels, or the first."""
    if not latent:
        return as_bytes(images)
    shown = images[:, : 3 if images.shape[1] >= 3 else 1].float()
    low, high = shown.amin(dim=(1, 2, 3), keepdim=True), shown.amax(dim=(1, 2, 3), keepdim=True)
    return as_bytes(2 * (shown - low) / (high - low).clamp(min=1e-6) - 1)


def picture(pixels: Tensor) -> Image.Image:
    """A picture of bytes (1 or 3, H, W)."""
    array = pixels.cpu().numpy()
    return Image.fromarray(array[0] if len(array) == 1 else np.ascontiguousarray(array.transpose(1, 2, 0)))


def grid(pictures: Tensor, columns: int) -> Image.Image:
    """Pictures (B, 1 or 3, H, W), uint8, row by row, large enough to be seen."""
    count, channels, height, width = pictures.shape
    rows = -(-count // columns)
    size = (channels, rows * (height + GAP) - GAP, columns * (width + GAP) - GAP)
    page = torch.full(size, 255, dtype=torch.uint8)
    for number, pixels in enumerate(pictures.cpu()):
        top, left = number // columns * (height + GAP), number % columns * (width + GAP)
        page[:, top : top + height, left : left + width] = pixels
    found = picture(page)
    times = max(1, -(-SHOWN // max(height, width)))
    return found.resize((found.width * times, found.height * times), Image.Resampling.NEAREST)


def png_file(image: Image.Image) -> bytes:
    """A PNG file."""
    held = BytesIO()
    image.save(held, "PNG")
    return held.getvalue()


def between(first: Tensor, last: Tensor, count: int) -> Tensor:
    """Noises (count, C, H, W) from one to another along the sphere that noise lies on, evenly apart.

    Examples:
        >>> way = between(torch.tensor([[[3.0, 0.0]]]), torch.tensor([[[0.0, 3.0]]]), 3)
        >>> [round(float(step.norm()), 3) for step in way]
        [3.0, 3.0, 3.0]
    """
    one, other = first.double().flatten(), last.double().flatten()
    cosine = (one @ other / (one.norm() * other.norm())).clamp(-1, 1)
    angle = torch.arccos(cosine)
    shares = torch.linspace(0, 1, count, dtype=torch.float64, device=first.device)[:, None]
    if float(angle) < 1e-6:
        return first.expand(count, *first.shape).clone()
    way = (torch.sin((1 - shares) * angle) * one + torch.sin(shares * angle) * other) / torch.sin(angle)
    return way.to(first.dtype).unflatten(1, first.shape)


def rows_of(classes: Sequence[str], most: int) -> list[int]:
    """Numbers of classes for the rows of a grid, evenly among all."""
    return np.linspace(0, len(classes) - 1, min(len(classes), most)).astype(int).tolist()
