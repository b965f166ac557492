"""Scenes that stay on the device as bytes, and crops that are cut out of them there, a whole batch at a time.

What happens to a crop is what `affinear.tasks.segment.variation` does to it: zoomed, cut, mirrored, and its light and
colours changed, by other random numbers. Two things differ: crops that one class fills are taken as they come, and a
hue is turned in YIQ.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from affinear.tasks.segment.pairs import UNLABELLED, Pairs
from affinear.tasks.segment.samples import as_bytes
from affinear.tasks.segment.settings import Segmentation

DRAWS = 12  # random numbers of a crop
YIQ = ((0.299, 0.587, 0.114), (0.596, -0.274, -0.322), (0.211, -0.523, 0.312))
HUE = 2 * math.pi * 25 / 256  # the most that colours are turned


@dataclass(frozen=True)
class Kept:
    """Photos of one size and their labels.

    Attributes:
        images: (N, 3, H, W), uint8.
        labels: (N, H, W), int16.
    """

    images: Tensor
    labels: Tensor


def kept(half: Pairs, settings: Segmentation, device: torch.device) -> Kept:
    """A half that is stored, at the size that training photos have before they are zoomed."""
    images: list[Tensor] = []
    labels: list[Tensor] = []
    for photo, truth in (pair for pair in half.stored or () if pair is not None):
        pixels = as_bytes(Image.fromarray(photo), settings.short_side, settings.long_side)
        size = pixels.shape[1:]
        map_ = F.interpolate(torch.from_numpy(truth)[None, None].float(), size=size, mode="nearest-exact")
        images.append(pixels)
        labels.append(map_[0, 0].short())
    return Kept(torch.stack(images).to(device), torch.stack(labels).to(device))


def cut(some: Kept, picked: Tensor, draws: Tensor, settings: Segmentation) -> tuple[Tensor, Tensor]:
    """Crops (B, 3, h, w) as shares of white, and their labels (B, h, w), int64.

    Args:
        some: What they are cut out of.
        picked: Which photos (B,).
        draws: Uniform random numbers (B, DRAWS).
        settings: Of crop, zoom, flip and light.
    """
    assert settings.crop is not None
    height, width = some.images.shape[2:]
    zoom = settings.zoom[0] + (settings.zoom[1] - settings.zoom[0]) * draws[:, 0]
    rows = _places(height, settings.crop[0], zoom, draws[:, 1])
    columns = _places(width, settings.crop[1], zoom, draws[:, 2])
    columns = torch.where(draws[:, 3:4] < settings.flip, columns.flip(1), columns)
    shape = (len(picked), *settings.crop)
    grid = torch.stack((columns[:, None, :].expand(shape), rows[:, :, None].expand(shape)), dim=-1)
    photos = some.images.index_select(0, picked).float() / 255
    truth = some.labels.index_select(0, picked)[:, None].float() - UNLABELLED  # beyond a photo there are zeros
    images = F.grid_sample(photos, grid, mode="bilinear", padding_mode="border", align_corners=False)
    inside = (grid.abs() <= 1).all(dim=-1)[:, None]
    labels = F.grid_sample(truth, grid, mode="nearest", padding_mode="zeros", align_corners=False)[:, 0]
    images = inside * (lit(images, draws[:, 4:]) if settings.photometric else images)
    return images, labels.round().long() + UNLABELLED


def _places(side: int, crop: int, zoom: Tensor, share: Tensor) -> Tensor:
    """Where the pixels of a crop (B, crop) lie along a side, from -1 to 1, at a random place of the zoomed photo."""
    room = (side * zoom - crop).clamp(min=0)
    pixels = torch.arange(crop, device=zoom.device) + 0.5
    return 2 * (pixels + (room * share)[:, None]) / (side * zoom)[:, None] - 1


def lit(images: Tensor, draws: Tensor) -> Tensor:
    """Images (B, 3, H, W) in another light: brightness, contrast, saturation and hue, each of them in every other one.

    Args:
        images: As shares of white.
        draws: Uniform random numbers (B, 8): four that say whether, four that say how much.
    """
    happens = (draws[:, :4] < 0.5).float()
    shift = happens[:, 0] * (64 * draws[:, 4] - 32) / 255
    contrast = 1 + happens[:, 1] * (draws[:, 5] - 0.5)
    saturation = 1 + happens[:, 2] * (draws[:, 6] - 0.5)
    angle = happens[:, 3] * HUE * (2 * draws[:, 7] - 1)
    colours = _colours(saturation, angle)
    tones = torch.einsum("bij,bjhw->bihw", colours, images + shift[:, None, None, None])
    return (tones * contrast[:, None, None, None]).clamp(0, 1)


def _colours(saturation: Tensor, angle: Tensor) -> Tensor:
    """(B, 3, 3): colours turned and strengthened about the axis of greys."""
    there, back = _yiq(angle.device)
    one, none = torch.ones_like(angle), torch.zeros_like(angle)
    cos, sin = saturation * angle.cos(), saturation * angle.sin()
    turn = torch.stack((one, none, none, none, cos, -sin, none, sin, cos), dim=1).view(-1, 3, 3)
    return back @ turn @ there


@functools.cache
def _yiq(device: torch.device) -> tuple[Tensor, Tensor]:
    """There and back; made once, as nothing can be brought to a GPU while a graph is captured."""
    there = torch.tensor(YIQ)
    return there.to(device), there.inverse().to(device)
