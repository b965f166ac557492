"""How images become batches, and what a network gets to see of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, create_transform
from timm.data.random_erasing import RandomErasing
from torch import Tensor

from .augment import Augment

INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos", "box", "hamming", "random")


@dataclass(frozen=True)
class Batching:
    """How images become batches.

    Attributes:
        batch_size: Images in a batch, over all processes together.
        image_size: Height and width that the network gets.
        channels: 1 for grey, 3 for colour; images are converted.
        mean: What is taken off each channel, where white is 1.
        std: What each channel is divided by then.
        interpolation: How images are resized, in timm's words; "random" chooses for each training image.
        crop_pct: Share of the height and width that evaluation looks at.
        augment: How training images are varied.
        workers: Processes that load; 0 to load in this one.
        seed: Of the order and of all that is random about images.
    """

    batch_size: int
    image_size: tuple[int, int]
    channels: int = 3
    mean: tuple[float, ...] = IMAGENET_DEFAULT_MEAN
    std: tuple[float, ...] = IMAGENET_DEFAULT_STD
    interpolation: str = "bicubic"
    crop_pct: float = 1.0
    augment: Augment = field(default_factory=Augment)
    workers: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size: expected 1 or more, got {self.batch_size}")
        if len(self.image_size) != 2 or min(self.image_size) < 1:
            raise ValueError(f"image_size: expected a height and a width of 1 or more, got {self.image_size}")
        if self.channels not in (1, 3):
            raise ValueError(f"channels: expected 1 (grey) or 3 (colour), got {self.channels}")
        if not len(self.mean) == len(self.std) == self.channels or min(self.std) <= 0:
            raise ValueError(
                f"mean, std: expected {self.channels} numbers each, std above 0, got {self.mean} and {self.std}"
            )
        if self.interpolation not in INTERPOLATIONS:
            raise ValueError(f"interpolation: expected one of {', '.join(INTERPOLATIONS)}, got {self.interpolation!r}")
        if not 0 < self.crop_pct <= 1:
            raise ValueError(f"crop_pct: expected more than 0 and at most 1, got {self.crop_pct}")
        if self.workers < 0:
            raise ValueError(f"workers: expected 0 or more, got {self.workers}")
        if self.augment.kind == "simple" and self.augment.pad >= min(self.image_size):
            raise ValueError(
                f"augment.pad: expected less than the image's sides, {self.image_size}, got {self.augment.pad}"
            )


class Fit:
    """Resizes an image, cuts out its middle and gives it as bytes (channels, height, width).

    Args:
        batching: The size and the interpolation.
        crop_pct: Share of the sides that is kept.
    """

    def __init__(self, batching: Batching, crop_pct: float) -> None:
        self.channels = batching.channels
        self.transform: Any = create_transform(
            (batching.channels, *batching.image_size),
            is_training=False,
            interpolation=batching.interpolation if batching.interpolation != "random" else "bilinear",
            crop_pct=crop_pct,
            normalize=False,
        )

    def __call__(self, image: Image.Image) -> NDArray[np.uint8]:
        """The image as bytes."""
        return self.transform(in_channels(image, self.channels)).numpy()


def in_channels(image: Image.Image, channels: int) -> Image.Image:
    """The image as grey or in colour."""
    mode = "L" if channels == 1 else "RGB"
    return image if image.mode == mode else image.convert(mode)


class Normalize:
    """Makes of bytes what a network wants: float32, about 0 with a spread of about 1. Other numbers stay as they are.

    Args:
        batching: The statistics.
        device: Where the images are.
    """

    def __init__(self, batching: Batching, device: torch.device | str = "cpu") -> None:
        self.shift = (255 * torch.tensor(batching.mean)[:, None, None]).to(device)
        self.spread = (255 * torch.tensor(batching.std)[:, None, None]).to(device)

    def __call__(self, images: Tensor) -> Tensor:
        """The images (..., channels, height, width) in numbers."""
        if images.dtype != torch.uint8:
            return images
        return images.to(torch.float32).sub_(self.shift).div_(self.spread)


def as_tensor(image: Image.Image, batching: Batching) -> Tensor:
    """One image as evaluation sees it: (channels, height, width), float32, normalised.

    Args:
        image: In any size, in mode "RGB" or "L", as `open_image` gives it.
        batching: The size, the crop and the statistics.
    """
    return Normalize(batching)(torch.from_numpy(Fit(batching, batching.crop_pct)(image)))


def timm_transform(batching: Batching) -> Callable[[Image.Image], Tensor]:
    """The training transform of timm but for erasing: an image to bytes.

    Raises:
        ValueError: If timm does not know the policy that is asked for.
    """
    augment = batching.augment
    try:
        transform: Any = create_transform(
            (batching.channels, *batching.image_size),
            is_training=True,
            scale=augment.scale,
            ratio=augment.ratio,
            hflip=augment.hflip,
            vflip=augment.vflip,
            color_jitter=augment.color_jitter or None,  # pyright: ignore[reportArgumentType]  # which means none
            auto_augment=augment.auto_augment,
            interpolation=batching.interpolation,
            mean=batching.mean,
            std=batching.std,
            normalize=False,
        )
    except (AssertionError, KeyError, ValueError) as error:
        raise ValueError(f"augment.auto_augment: timm cannot read {augment.auto_augment!r} ({error})") from error
    return transform


def timm_eraser(batching: Batching) -> Callable[[Tensor], Tensor] | None:
    """What erases rectangles of a normalised image, in place; None if nothing does."""
    augment = batching.augment
    if not augment.reprob:
        return None
    return RandomErasing(augment.reprob, mode=augment.remode, max_count=augment.recount, device="cpu")
