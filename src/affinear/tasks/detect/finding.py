"""What a detector found in an image, as it is judged and written: boxes and masks at the image's own size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from .precision import Found
from .runs import Runs

INSIDE = 0.5  # chance from which on a pixel belongs to a mask
AT_ONCE = 2**20  # pixels of masks that are pasted at once


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
        masks = pasted(told["masks"], told["boxes"], size)
    return Found(boxes, told["labels"].long().numpy(), told["scores"].double().numpy(), masks)


def pasted(chances: Tensor, boxes: Tensor, size: tuple[int, int]) -> tuple[Runs, ...]:
    """Masks that were told on small grids over boxes, at the image's size, as torchvision pastes them.

    Args:
        chances: (N, M, M), float32: of each part of a box to be inside.
        boxes: (N, 4), float32: left, top, right and bottom.
        size: Height and width of the image.
    """
    grid = chances.shape[-1]
    middle, half = (boxes[:, :2] + boxes[:, 2:]) / 2, (boxes[:, 2:] - boxes[:, :2]) / 2 * ((grid + 2) / grid)
    low, high = (middle - half).long().numpy(), (middle + half).long().numpy()
    sides = np.maximum(high - low + 1, 1)
    first = np.maximum(low, 0)
    shown = np.maximum(np.minimum(low + sides, (size[1], size[0])) - first, 0)  # columns and rows inside of the image
    rimmed = F.pad(chances, (1,) * 4).numpy()
    masks: list[Runs] = []
    for some in _portions(shown.prod(axis=1)):
        masks += _paste(rimmed[some], low[some], first[some], sides[some], shown[some], size)
    return tuple(masks)


def _portions(pixels: NDArray[np.int64]) -> Iterator[slice]:
    """Neighbours that together have no more pixels than are worked on at once, or one that has more."""
    begin, total = 0, 0
    for i, count in enumerate(pixels.tolist()):
        if i > begin and total + count > AT_ONCE:
            yield slice(begin, i)
            begin, total = i, 0
        total += count
    if begin < len(pixels):
        yield slice(begin, len(pixels))


def _paste(
    rimmed: NDArray[np.float32],
    low: NDArray[np.int64],
    first: NDArray[np.int64],
    sides: NDArray[np.int64],
    shown: NDArray[np.int64],
    size: tuple[int, int],
) -> list[Runs]:
    """Runs of some masks, all their pixels in one list: mask by mask, column by column.

    Args:
        rimmed: (N, M + 2, M + 2), the chances with a rim of nothing.
        low: (N, 2), column and row where a mask begins, perhaps outside of the image.
        first: (N, 2), where it begins inside.
        sides: (N, 2), columns and rows of a mask.
        shown: (N, 2), those inside of the image.
        size: Height and width of the image.
    """
    grid = rimmed.shape[-1]
    owner, column = _ragged(shown[:, 0])
    left, right, share = _between(column + (first - low)[owner, 0], sides[owner, 0], grid)
    across = rimmed[owner, :, left] * (1 - share)[:, None] + rimmed[owner, :, right] * share[:, None]
    rows_owner, row = _ragged(shown[:, 1])
    above, below, part = _between(row + (first - low)[rows_owner, 1], sides[rows_owner, 1], grid)
    lines, place = _ragged(shown[owner, 1])  # the column of each pixel, and its row there
    here = (np.cumsum(shown[:, 1]) - shown[:, 1])[owner[lines]] + place
    inside = across[lines, above[here]] * (1 - part[here]) + across[lines, below[here]] * part[here] > INSIDE
    end = place == shown[owner[lines], 1] - 1
    begins, ends = inside.copy(), inside.copy()
    begins[1:] &= (place[1:] == 0) | ~inside[:-1]
    ends[:-1] &= end[:-1] | ~inside[1:]
    at = (column + first[owner, 0])[lines] * size[0] + first[owner[lines], 1] + place
    cuts = np.cumsum(np.bincount(owner[lines[begins]], minlength=len(rimmed)))[:-1]
    pairs = zip(np.split(at[begins], cuts), np.split(at[ends] + 1, cuts), strict=True)
    return [Runs.between(starts, stops, *size) for starts, stops in pairs]


def _ragged(counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of each item of rows of these lengths, laid end to end, its row and its place there."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]


def _between(
    place: NDArray[np.int64], side: NDArray[np.int64], grid: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """The two places of a grid that a pixel of an enlarged side lies between, and the share of the second."""
    exact = np.float32(grid) / side.astype(np.float32) * (place + np.float32(0.5)).astype(np.float32) - np.float32(0.5)
    exact = np.maximum(exact, np.float32(0))
    before = np.minimum(exact.astype(np.int64), grid - 1)
    return before, np.minimum(before + 1, grid - 1), exact - before.astype(np.float32)


def at_least(found: Found, score: float) -> Found:
    """What is as sure as this, the surest first."""
    order = np.argsort(-found.scores, kind="stable")
    kept = order[found.scores[order] >= score]
    masks = None if found.masks is None else tuple(found.masks[i] for i in kept.tolist())
    return Found(found.boxes[kept], found.labels[kept], found.scores[kept], masks)


def as_tensor(pixels: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> Tensor:
    """Pixels (H, W, 3) as (3, H, W)."""
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))
