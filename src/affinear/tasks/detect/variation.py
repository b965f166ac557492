"""What happens to a training image and its objects, decided by the seed of the draw and by nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from ...models.detectors import fitting
from .coco import Objects, mask_of

CROP_FROM = (400, 500, 600)  # shorter sides before a crop of `crop_sides`, as DETR has them
CROP_SIDES = (384, 600)
LEAST = 1.0  # side in pixels of what is left of a box that still counts


@dataclass(frozen=True)
class Variation:
    """How training images are varied.

    Attributes:
        short_sides: Shorter sides of which one is drawn for each image; none to leave sizes as they are.
        long_side: Longer side at most.
        crop_share: Share of images that are cropped before they are resized, as in DETR.
        jitter: Least and greatest factor of large-scale jitter, which fits an image into `crop`, enlarges or shrinks it
            and cuts `crop` out of it; None for none.
        crop: Height and width of a crop at the end; None for none. Smaller images stay as they are.
        flip: Share of images that are mirrored left and right.
        vflip: Share of images that are mirrored top and bottom.
        photometric: Whether brightness, contrast, saturation and hue vary.
    """

    short_sides: tuple[int, ...] = (800,)
    long_side: int = 1333
    crop_share: float = 0.0
    jitter: tuple[float, float] | None = None
    crop: tuple[int, int] | None = None
    flip: float = 0.5
    vflip: float = 0.0
    photometric: bool = False


@dataclass(frozen=True)
class Resize:
    """To this height and width."""

    height: int
    width: int


@dataclass(frozen=True)
class Crop:
    """This part."""

    top: int
    left: int
    height: int
    width: int


@dataclass(frozen=True)
class Flip:
    """Left and right change places, or top and bottom."""

    vertical: bool


Move: TypeAlias = Resize | Crop | Flip


def vary(
    image: Tensor, objects: Objects, variation: Variation, seed: int, masks: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """An image and its objects, as the seed says.

    Args:
        image: (3, H, W), uint8.
        objects: What it shows; crowds are not learned from.
        variation: How.
        seed: Of everything random.
        masks: Whether masks are drawn.

    Returns:
        The image (3, h, w), uint8, and "boxes" (N, 4) as left, top, right and bottom, "labels" (N,) and, if asked for,
        "masks" (N, h, w), uint8.
    """
    random = np.random.default_rng(seed)
    size = image.shape[-2], image.shape[-1]
    moves = plan(size, variation, random)
    objects = objects.some(np.flatnonzero(~objects.crowd))
    boxes, after = moved_boxes(objects.boxes, moves, size)
    kept = np.flatnonzero((boxes[:, 2:] - boxes[:, :2]).min(axis=1, initial=np.inf) >= LEAST)
    target = {"boxes": boxes[kept], "labels": objects.labels[kept]}
    if masks:
        drawn = [_moved(_mask(objects, int(i), size), moves, nearest=True)[0] for i in kept]
        filled = [number for number, mask in enumerate(drawn) if bool(mask.any())]
        target = {name: part[filled] for name, part in target.items()}
        blank = torch.zeros(0, *after, dtype=torch.uint8)
        drawn_masks = torch.stack([drawn[i] for i in filled]) if filled else blank
    out = _moved(image, moves, nearest=False)
    if variation.photometric:
        out = _coloured(out, random)
    found = {"boxes": torch.from_numpy(target["boxes"]).float(), "labels": torch.from_numpy(target["labels"])}
    return out, {**found, "masks": drawn_masks} if masks else found  # pyright: ignore[reportPossiblyUnboundVariable]


def plan(size: tuple[int, int], variation: Variation, random: np.random.Generator) -> list[Move]:
    """The moves that an image of this height and width goes through."""
    moves: list[Move] = []
    if random.random() < variation.flip:
        moves.append(Flip(vertical=False))
    if random.random() < variation.vflip:
        moves.append(Flip(vertical=True))
    if variation.jitter is not None and variation.crop is not None:
        scale = min(wanted / side for wanted, side in zip(variation.crop, size, strict=True))
        size = _resize(size, scale * random.uniform(*variation.jitter), moves)
    elif variation.short_sides:
        if random.random() < variation.crop_share:
            size = _fit(size, int(random.choice(CROP_FROM)), variation.long_side, moves)
            low, high = CROP_SIDES
            window = tuple(int(random.integers(min(side, low), min(side, high) + 1)) for side in size)
            size = _cut(size, window, random, moves)
        size = _fit(size, int(random.choice(variation.short_sides)), variation.long_side, moves)
    if variation.crop is not None:
        _cut(size, variation.crop, random, moves)
    return moves


def moved_boxes(
    boxes: NDArray[np.float64], moves: Sequence[Move], size: tuple[int, int]
) -> tuple[NDArray[np.float64], tuple[int, int]]:
    """Boxes (N, 4) after moves of an image of this height and width, cut at its borders; and the image's size then."""
    boxes = boxes.copy()
    for move in moves:
        if isinstance(move, Flip):
            low, high, side = (1, 3, size[0]) if move.vertical else (0, 2, size[1])
            boxes[:, low], boxes[:, high] = side - boxes[:, high], side - boxes[:, low]
        elif isinstance(move, Resize):
            boxes *= np.tile((move.width / size[1], move.height / size[0]), 2)
            size = move.height, move.width
        else:
            boxes -= np.tile((move.left, move.top), 2)
            size = move.height, move.width
            boxes = np.clip(boxes, 0, np.tile((size[1], size[0]), 2))
    return boxes, size


def _moved(image: Tensor, moves: Sequence[Move], nearest: bool) -> Tensor:
    """An image or mask (C, H, W) after moves."""
    for move in moves:
        if isinstance(move, Flip):
            image = image.flip(-2 if move.vertical else -1)
        elif isinstance(move, Crop):
            image = image[..., move.top : move.top + move.height, move.left : move.left + move.width]
        else:
            how = F.InterpolationMode.NEAREST_EXACT if nearest else F.InterpolationMode.BILINEAR
            image = F.resize_image(image, [move.height, move.width], interpolation=how, antialias=not nearest)
    return image.contiguous()


def _mask(objects: Objects, number: int, size: tuple[int, int]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(mask_of(objects.shapes[number], size).mask()))[None].to(torch.uint8)


def _resize(size: tuple[int, int], scale: float, moves: list[Move]) -> tuple[int, int]:
    after = max(1, round(size[0] * scale)), max(1, round(size[1] * scale))
    moves.append(Resize(*after))
    return after


def _fit(size: tuple[int, int], shorter: int, longer: int, moves: list[Move]) -> tuple[int, int]:
    after = fitting(size, shorter, longer)
    moves.append(Resize(*after))
    return after


def _cut(
    size: tuple[int, int], window: Sequence[int], random: np.random.Generator, moves: list[Move]
) -> tuple[int, int]:
    height, width = (min(side, part) for side, part in zip(size, window, strict=True))
    top, left = int(random.integers(size[0] - height + 1)), int(random.integers(size[1] - width + 1))
    moves.append(Crop(top, left, height, width))
    return height, width


def _coloured(image: Tensor, random: np.random.Generator) -> Tensor:
    """Light and colours of an image, each varied for half of the images."""
    changes = (
        (F.adjust_brightness, 0.875, 1.125),
        (F.adjust_contrast, 0.5, 1.5),
        (F.adjust_saturation, 0.5, 1.5),
        (F.adjust_hue, -0.05, 0.05),
    )
    for change, low, high in changes:
        if random.random() < 0.5:
            image = change(image, float(random.uniform(low, high)))
    return image
