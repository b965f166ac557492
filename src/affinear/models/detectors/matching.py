"""Boxes matched with objects and drawn to learn from, for all images of a batch at once.

torchvision goes image by image: thousands of small kernels in a step, and hundreds of waits for the GPU. Here the same
rules and the same random numbers give the same regions; rows of different lengths are filled up to a rectangle.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torchvision.models.detection._utils import BalancedPositiveNegativeSampler, Matcher

BACKGROUND, BETWEEN = -1, -2  # torchvision's marks of boxes that show nothing, and of those nobody learns from
AT_ONCE = 2**26  # pairs of boxes that are compared at once


class Rows:
    """Rows of different lengths, laid end to end, and how they become a rectangle.

    Args:
        counts: Length of each row.
        device: Where their values are.

    Example:
        >>> import torch
        >>> rows = Rows([2, 0, 1], torch.device("cpu"))
        >>> rows.padded(torch.tensor([5, 6, 7])).tolist()
        [[5, 6], [0, 0], [7, 0]]
    """

    def __init__(self, counts: Sequence[int], device: torch.device) -> None:
        self.counts = list(counts)
        self.starts = np.cumsum([0, *self.counts[:-1]])
        owner = np.repeat(np.arange(len(self.counts)), self.counts)
        places = np.stack((owner, np.arange(len(owner)) - self.starts[owner]))
        self.owner, self.place = bring(torch.from_numpy(places), device)

    @staticmethod
    def of(parts: Sequence[Tensor]) -> Rows:
        """The rows that these are."""
        return Rows([len(part) for part in parts], parts[0].device)

    def padded(self, values: Tensor) -> Tensor:
        """Values (N, ...) as (rows, longest, ...), zeros after the end of a row."""
        out = values.new_zeros(len(self.counts), max(self.counts), *values.shape[1:])
        out[self.owner, self.place] = values
        return out

    def real(self) -> Tensor:
        """Which places of the rectangle are a row's own, (rows, longest)."""
        return self.padded(torch.ones_like(self.owner, dtype=torch.bool))


def bring(values: Tensor, device: torch.device) -> Tensor:
    """Values on a device. CUDA is not waited for: the pinned copy is not used again before it has been read."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def overlaps(boxes: Tensor, others: Tensor) -> Tensor:
    """Intersection over union of boxes (B, N, 4) and others (B, M, 4), (B, N, M)."""
    left, top, right, bottom = boxes[:, :, None].unbind(-1)
    left_2, top_2, right_2, bottom_2 = others[:, None].unbind(-1)
    width = (torch.minimum(right, right_2) - torch.maximum(left, left_2)).clamp(min=0)
    shared = width * (torch.minimum(bottom, bottom_2) - torch.maximum(top, top_2)).clamp(min=0)
    return shared / ((right - left) * (bottom - top) + (right_2 - left_2) * (bottom_2 - top_2) - shared)


def match(matcher: Matcher, objects: Tensor, real: Tensor, boxes: Tensor) -> Tensor:
    """The object that each box shows, by torchvision's rules, (B, N); `BACKGROUND` or `BETWEEN` where none.

    Args:
        matcher: The thresholds.
        objects: (B, G, 4), their boxes, filled up.
        real: (B, G), which of them are there.
        boxes: (B, N, 4), or (1, N, 4) for the same boxes in every image.
    """
    images, most = real.shape
    if not most:
        return torch.full((images, boxes.shape[1]), BACKGROUND, device=boxes.device)
    boxes = boxes.expand(images, -1, -1)
    some = max(1, AT_ONCE // max(most * boxes.shape[1], 1))
    parts = [slice(first, first + some) for first in range(0, images, some)]
    return torch.cat([_match(matcher, objects[part], real[part], boxes[part]) for part in parts])


def _match(matcher: Matcher, objects: Tensor, real: Tensor, boxes: Tensor) -> Tensor:
    shares = overlaps(objects, boxes).masked_fill_(~real[..., None], -1)
    most, nearest = shares.max(dim=1)
    found = nearest.masked_fill(most < matcher.high_threshold, BETWEEN)
    found = found.masked_fill_(most < matcher.low_threshold, BACKGROUND)
    if matcher.allow_low_quality_matches:  # what an object is nearest to is its own, however far
        nearest_to_one = (shares == shares.amax(dim=2, keepdim=True)) & real[..., None]
        found = torch.where(nearest_to_one.any(dim=1), nearest, found)
    return found


def draw(
    sampler: BalancedPositiveNegativeSampler, labels: Tensor, counts: Sequence[int]
) -> tuple[Tensor, Tensor, list[int]]:
    """Boxes to learn from, drawn as torchvision draws them, to the same random numbers.

    Args:
        sampler: How many of an image, and how many of them objects at most.
        labels: (N,), of the boxes of all images end to end: above 0 for objects, 0 for background, below for neither.
        counts: Boxes of each image.

    Returns:
        Numbers of the boxes that show objects, of those that do not, both rising, and how many were drawn of each
        image.
    """
    device = labels.device
    kinds = [torch.where(labels >= 1)[0], torch.where(labels == 0)[0]]
    ends = bring(torch.from_numpy(np.cumsum(counts)), device)
    upto: list[list[int]] = torch.stack([torch.searchsorted(kind, ends) for kind in kinds]).tolist()
    there = np.diff(np.array(upto), axis=1, prepend=0)
    shows = np.minimum(there[0], int(sampler.batch_size_per_image * sampler.positive_fraction))
    taken = np.stack((shows, np.minimum(there[1], sampler.batch_size_per_image - shows)))
    orders: tuple[list[Tensor], list[Tensor]] = ([], [])
    for image in range(len(counts)):
        for kind, order in enumerate(orders):
            order.append(torch.randperm(int(there[kind, image]), device=device)[: int(taken[kind, image])])
    first = np.cumsum(there, axis=1) - there
    shift = np.concatenate([np.repeat(first[kind], taken[kind]) for kind in (0, 1)])
    shift = bring(torch.from_numpy(shift), device)
    shifts = shift.split(taken.sum(axis=1).tolist())
    drawn = [
        kind[torch.cat(order) + shift].sort().values for kind, order, shift in zip(kinds, orders, shifts, strict=True)
    ]
    return drawn[0], drawn[1], taken.sum(axis=0).tolist()


def limits(sizes: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """Right and bottom rims of images of these heights and widths, (B, 2)."""
    rims = torch.tensor([(width, height) for height, width in sizes], dtype=torch.float32)
    return bring(rims, device)


def clip(boxes: Tensor, rims: Tensor) -> Tensor:
    """Boxes (..., 4) cut off at the rims (..., 2) of their images."""
    corners = boxes.unflatten(-1, (2, 2)).clamp(min=0)
    return torch.minimum(corners, rims[..., None, :]).flatten(-2)
