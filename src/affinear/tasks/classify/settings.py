"""The settings of classification: how images are shown to a network and varied, and how targets are softened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ...train import settings
from ...train.settings import Check, Settings

AUGMENTS = ("none", "simple", "timm")
ERASERS = ("const", "rand", "pixel")


@dataclass(frozen=True)
class ClassifySettings(Settings):
    """What training a classifier of images needs beside the engine's recipe.

    None stands for what data and network decide when the run begins: `image_size`, `mean`, `std`, `interpolation`,
    `crop_pct`, `pad`. The settings in a run's folder have them all.

    Attributes:
        smoothing: Share of the target that is spread over all classes.
        mixup: Alpha of mixup; 0 turns it off.
        cutmix: Alpha of cutmix; 0 turns it off.
        mixup_prob: Share of batches that are mixed.
        mixup_switch_prob: Share of them that get cutmix, if both are on.
        drop_path: Stochastic depth of the last block.
        augment: "none", "simple" (pad, crop, flip) or "timm" (crops of any scale, RandAugment, erasing).
        auto_augment: RandAugment's settings, as timm spells them; None for none.
        color_jitter: How far colours vary.
        reprob: Share of images in which a rectangle is erased.
        remode: What it is filled with: const, rand or pixel.
        recount: Rectangles at most.
        scale: Smallest and largest share of an image that a crop takes.
        ratio: Narrowest and widest shape of a crop.
        hflip: Share of images that are mirrored left to right.
        vflip: Share of images that are mirrored top to bottom.
        pad: Pixels around an image before "simple" crops it; None for an eighth of its shorter side.
        repeats: Variants of an image in one epoch, of which repeated augmentation uses 3.
        image_size: Height and width.
        mean: Of each channel, taken off.
        std: Of each channel, divided by.
        interpolation: How images are resized: bilinear, bicubic ...
        crop_pct: Share of an image that evaluation keeps.

    Examples:
        >>> ClassifySettings(mixup=-1)
        Traceback (most recent call last):
        ValueError: mixup: expected a number of at least 0, got -1
    """

    smoothing: float = 0.1
    mixup: float = 0.0
    cutmix: float = 0.0
    mixup_prob: float = 1.0
    mixup_switch_prob: float = 0.5
    drop_path: float = 0.0
    augment: str = "timm"
    auto_augment: str | None = None
    color_jitter: float = 0.0
    reprob: float = 0.0
    remode: str = "pixel"
    recount: int = 1
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    hflip: float = 0.5
    vflip: float = 0.0
    pad: int | None = None
    repeats: int = 1
    image_size: tuple[int, int] | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    interpolation: str | None = None
    crop_pct: float | None = None

    checks: ClassVar[Mapping[str, Check]] = {
        "smoothing": settings.share(below=True),
        "mixup": settings.at_least_0(),
        "cutmix": settings.at_least_0(),
        "mixup_prob": settings.share(),
        "mixup_switch_prob": settings.share(),
        "drop_path": settings.share(below=True),
        "augment": settings.one_of(AUGMENTS),
        "auto_augment": settings.text(optional=True),
        "color_jitter": settings.at_least_0(),
        "reprob": settings.share(),
        "remode": settings.one_of(ERASERS),
        "recount": settings.whole(1),
        "scale": settings.numbers(2, False, above=0),
        "ratio": settings.numbers(2, False, above=0),
        "hflip": settings.share(),
        "vflip": settings.share(),
        "pad": settings.whole(0, optional=True),
        "repeats": settings.whole(1),
        "image_size": settings.size(),
        "mean": settings.numbers(None, True),
        "std": settings.numbers(None, True, above=0),
        "interpolation": settings.text(optional=True),
        "crop_pct": settings.more_than_0(optional=True),
    }
