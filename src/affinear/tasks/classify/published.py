"""The recipes by name: those that the papers' networks were trained with, and two for every day."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RANDAUGMENT = "rand-m9-mstd0.5-inc1"

# What all three papers share, which is DeiT's recipe: rates belong to a batch of 512.
_PAPERS: Mapping[str, Any] = {
    "epochs": 300,
    "batch_size": 1024,
    "lr": 5e-4,
    "lr_batch": 512,
    "weight_decay": 0.05,
    "smoothing": 0.1,
    "mixup": 0.8,
    "cutmix": 1.0,
    "drop_path": 0.1,
    "auto_augment": RANDAUGMENT,
    "color_jitter": 0.4,
    "reprob": 0.25,
    "interpolation": "bicubic",
}
_MAVIT: Mapping[str, Any] = {
    **_PAPERS,
    "warmup_epochs": 5,
    "warmup_lr": 1e-6,
    "min_lr": 1e-5,
    "ema_decay": 0.99996,
    "ema_batch": 512,
    "repeats": 3,
    "sync_bn": True,
}
_INLINE: Mapping[str, Any] = {
    **_PAPERS,
    "warmup_epochs": 20,
    "warmup_lr": 5e-7,
    "min_lr": 5e-6,
    "scale_all_lr": True,
    "clip_grad": 5.0,
}

# Fields of the engine's recipe and of the task's settings alike; what is not named has its default.
RECIPES: Mapping[str, Mapping[str, Any]] = {
    "mavit": _MAVIT,
    "nalaformer": _MAVIT,
    "inline_deit": {**_INLINE, "batch_size": 4096},
    "inline_pvt": {**_INLINE, "warmup_epochs": 5, "warmup_lr": 1e-6, "min_lr": 1e-5, "clip_grad": None},
    "inline_swin": {**_INLINE, "drop_path": 0.2},
    "inline_cswin": {**_INLINE, "drop_path": 0.2, "clip_grad": None, "ema_decay": 0.9996, "ema_batch": 4096},
    # A trained network, or any that has no recipe of its own: small steps, few epochs, nothing a network must know.
    "finetune": {
        "epochs": 30,
        "batch_size": 128,
        "lr": 1e-4,
        "lr_batch": 128,
        "warmup_epochs": 2,
        "warmup_lr": 1e-6,
        "min_lr": 1e-6,
        "clip_grad": 1.0,
        "auto_augment": RANDAUGMENT,
        "scale": (0.35, 1.0),
    },
    # Small images and demonstrations; nothing is mirrored, because digits and letters may be among them.
    "tiny": {
        "epochs": 20,
        "batch_size": 128,
        "lr": 1e-3,
        "warmup_epochs": 2,
        "warmup_lr": 1e-6,
        "clip_grad": 1.0,
        "augment": "simple",
        "hflip": 0.0,
    },
}

# What differs by size within a family.
SIZES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "mavit": {"small": {"drop_path": 0.15}, "base": {"drop_path": 0.4}, "large": {"drop_path": 0.55}},
    "nalaformer": {"small": {"drop_path": 0.15}, "base": {"drop_path": 0.4}, "large": {"drop_path": 0.55}},
    "inline_deit": {"small": {"batch_size": 1024}, "base": {"batch_size": 512}},
    "inline_pvt": {
        "medium": {"drop_path": 0.3, "clip_grad": 1.0},
        "large": {"drop_path": 0.3, "clip_grad": 1.0, "batch_size": 512},
    },
    "inline_swin": {"small": {"drop_path": 0.3}, "base": {"drop_path": 0.5, "batch_size": 512}},
    "inline_cswin": {
        "small": {"drop_path": 0.4},
        "base": {"drop_path": 0.5, "batch_size": 512, "weight_decay": 0.1},
    },
}


def family_of(model: str) -> str | None:
    """The family that a network belongs to, if it is one of ours.

    Examples:
        >>> family_of("inline_swin_tiny_linear"), family_of("resnet18")
        ('inline_swin', None)
    """
    return next((family for family in SIZES if model.startswith(f"{family}_")), None)


def of_size(model: str, family: str) -> Mapping[str, Any]:
    """What the recipe of a family has otherwise for a network of this size."""
    size = model.removeprefix(f"{family}_").partition("_")[0]
    return SIZES[family].get(size, {})
