"""How a family's names become networks in timm's way, and what timm keeps beside each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, register_notrace_module
from torch import nn

from ..layers import LearnedPosition
from ._names import translate

register_notrace_module(LearnedPosition)  # what it does depends on the size that comes

Network = TypeVar("Network", bound=nn.Module)


def config(size: int = 224, **other: Any) -> dict[str, Any]:
    """Input size, normalisation and names of first and last layer of a network trained on ImageNet-1K.

    No weights are on a hub: `affinear convert` reads the released files.
    """
    return {
        "input_size": (3, size, size),
        "pool_size": (size // 32, size // 32),
        "num_classes": 1000,
        "crop_pct": 224 / 256,
        "interpolation": "bicubic",
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": "stem.proj",
        "classifier": "head.fc",
        **other,
    }


def build(
    family: Callable[..., Network],
    variant: str,
    pretrained: bool,
    own: Mapping[str, Any],
    given: Mapping[str, Any],
    features: int | tuple[int, ...] = (0, 1, 2, 3),
) -> Network:
    """The variant of a family, with what the caller gave in place of its own settings.

    Args:
        family: The network's class.
        variant: The registered name.
        pretrained: Whether to load weights from the file or state dict of the pretrained configuration.
        own: The variant's settings.
        given: What timm and its caller pass; the class refuses what it does not know.
        features: Which stages `features_only` gives unless told; a number for the last so many.
    """
    return build_model_with_cfg(
        family,
        variant,
        pretrained,
        feature_cfg={"out_indices": features, "feature_cls": "getter"},
        pretrained_filter_fn=translate,
        **{**own, **given},
    )
