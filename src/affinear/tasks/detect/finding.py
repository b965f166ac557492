"""What a detector found in an image, as it is judged and written: boxes and masks at the image's own size."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .precision import Found
from .runs import Runs

INSIDE = 0.5  # chance from which on a pixel belongs to a mask


def found_of(told: Mapping[str, Tensor], size: tuple[int, int]) -> Found:
    """What a detector told of an image of this height and width.

    Args:
        told: "boxes" (N, 4) as left, top, right and bottom, "labels" (N,), "scores" (N,) and, where masks were learned,
            "masks" (N, 28, 28).
        size: Height and width.
    """
    told = {name: tensor.detach().float().cpu() for name, tensor in told.items()}
    corners = told["boxes"].double().numpy()
    boxes = np.concatenate((corners[:, :2], corners[:, 2:] - corners[:, :2]), axis=1)
    masks = None
    if "masks" in told:
        masks = tuple(pasted(mask, box, size) for mask, box in zip(told["masks"], told["boxes"], strict=True))
    return Found(boxes, told["labels"].long().numpy(), told["scores"].double().numpy(), masks)


def pasted(chances: Tensor, box: Tensor, size: tuple[int, int]) -> Runs:
    """A mask that was told on a small grid over a box, at the image's size, as torchvision pastes it.

    Args:
        chances: (M, M), of each part of the box to be inside.
        box: (4,), left, top, right and bottom.
        size: Height and width of the image.
    """
    grid = chances.shape[-1]
    middle, half = (box[:2] + box[2:]) / 2, (box[2:] - box[:2]) / 2 * ((grid + 2) / grid)
    low, high = (middle - half).long().tolist(), (middle + half).long().tolist()
    width, height = (max(high[i] - low[i] + 1, 1) for i in (0, 1))
    wide = F.interpolate(
        F.pad(chances[None, None], (1,) * 4), size=(height, width), mode="bilinear", align_corners=False
    )
    left, top = max(low[0], 0), max(low[1], 0)
    right, bottom = min(low[0] + width, size[1]), min(low[1] + height, size[0])
    part = wide[0, 0, top - low[1] : max(bottom - low[1], 0), left - low[0] : max(right - low[0], 0)] > INSIDE
    if not part.numel():
        return Runs(*size, np.array([size[0] * size[1]]))
    return Runs.of(part.numpy(), (top, left), size)


def at_least(found: Found, score: float) -> Found:
    """What is as sure as this, the surest first."""
    order = np.argsort(-found.scores, kind="stable")
    kept = order[found.scores[order] >= score]
    masks = None if found.masks is None else tuple(found.masks[i] for i in kept.tolist())
    return Found(found.boxes[kept], found.labels[kept], found.scores[kept], masks)


def as_tensor(pixels: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> Tensor:
    """Pixels (H, W, 3) as (3, H, W)."""
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))
