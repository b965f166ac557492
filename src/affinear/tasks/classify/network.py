"""The network of a run, made for its data, and how images are shown to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import timm
import torch
from torch import Tensor, nn

import affinear.models  # registers its names with timm
from affinear.models.making import MOST_NUMBERS, check_name, make, takes

from ...train.recipe import Recipe
from . import trunk
from .data import Augment, Batching, Images

__all__ = ["batching", "check_name", "create", "fill", "resolve"]
SMALLEST = 32  # the least side that every network of ours can take, trunks apart, which take any
_FAMILIES = affinear.models.__all__


def create(
    model: str,
    classes: int,
    channels: int,
    recipe: Recipe,
    model_args: Mapping[str, Any],
    *,
    room: int = MOST_NUMBERS,
) -> nn.Module:
    """The network of this name, for so many classes, and for the recipe's size of images where it wants to know.

    Args:
        model: Its name.
        classes: What it tells apart.
        channels: Of its images.
        recipe: Gives the size of images and the drop path.
        model_args: What it is made with beside that.
        room: How many numbers it may have, as `affinear.models.making` counts them.

    Raises:
        ValueError: If there is no such network, or it does not know an argument.
    """
    known = takes(model)
    wanted: dict[str, Any] = {"num_classes": classes, "in_chans": channels}
    if "img_size" in known:
        wanted["img_size"] = recipe.image_size
    if recipe.drop_path:
        if "drop_path_rate" not in known:
            raise ValueError(f"model_args: {model} takes no 'drop_path_rate'; set the recipe's drop_path to 0")
        wanted["drop_path_rate"] = recipe.drop_path
    return make(model, wanted | dict(model_args), room=room)


def fill(network: nn.Module, tensors: Mapping[str, Tensor], source: str, *, new_head: bool = False) -> list[str]:
    """Load weights into a network.

    Args:
        network: Of any kind.
        tensors: By name.
        source: What they came from, for the error.
        new_head: Whether a classifier of another number of classes is left as it is, with its fresh weights.

    Returns:
        The names that were left as they are.

    Raises:
        ValueError: If a tensor is missing, unexpected or of another shape; the first few are named.
    """
    own = network.state_dict()
    head = getattr(network, "pretrained_cfg", {}).get("classifier", "head")
    heads = tuple(f"{name}." for name in ([head] if isinstance(head, str) else head))
    other = [name for name in own if name in tensors and tensors[name].shape != own[name].shape]
    kept = [name for name in other if new_head and name.startswith(heads)]
    wrong = [
        f"{name} is {tuple(tensors[name].shape)}, not {tuple(own[name].shape)}" for name in other if name not in kept
    ]
    wrong += [
        f"{name} is of {tensors[name].dtype}, not {own[name].dtype}"
        for name in own
        if name in tensors and tensors[name].is_floating_point() != own[name].is_floating_point()
    ]
    wrong += [f"{name} is missing" for name in own if name not in tensors]
    wrong += [f"{name} is unexpected" for name in tensors if name not in own]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(f"{source}: these weights are of another network: {'; '.join(wrong[:3])}{more}")
    network.load_state_dict({name: own[name] if name in kept else tensors[name] for name in own})
    return kept


def resolve(recipe: Recipe, model: str, model_args: Mapping[str, Any], images: Images, device: torch.device) -> Recipe:
    """The recipe with nothing left open: what data, network and machine decide is decided."""
    config = _config(model)
    cuda = device.type == "cuda"
    channels = channels_of(model_args, images)
    smallest = 1 if model in trunk.SIZES else SMALLEST
    size = recipe.image_size or _size(model_args, images, config, smallest)
    found: dict[str, Any] = {
        "image_size": size,
        "mean": _fit(config["mean"], channels),
        "std": _fit(config["std"], channels),
        "interpolation": config["interpolation"],
        "crop_pct": 1.0 if images.size is not None else config["crop_pct"],
        "precision": "bf16" if cuda else "no",
        "compile": cuda,
        "channels_last": cuda,
        "pad": min(size) // 8,
    }
    missing = {name: value for name, value in found.items() if getattr(recipe, name) is None}
    return dataclasses.replace(recipe, **missing)


def channels_of(model_args: Mapping[str, Any], images: Images) -> int:
    """Channels that the network takes: those of the images, unless it is told otherwise."""
    return int(model_args.get("in_chans", images.channels))


def batching(recipe: Recipe, channels: int) -> Batching:
    """How images become batches under a recipe that has nothing left open."""
    assert recipe.image_size is not None
    assert recipe.mean is not None
    assert recipe.std is not None
    assert recipe.interpolation is not None
    assert recipe.crop_pct is not None
    augment = Augment(
        kind=recipe.augment,  # pyright: ignore[reportArgumentType]  # checked by the recipe
        auto_augment=recipe.auto_augment,
        color_jitter=recipe.color_jitter or None,
        reprob=recipe.reprob,
        remode=recipe.remode,
        recount=recipe.recount,
        scale=recipe.scale,
        ratio=recipe.ratio,
        hflip=recipe.hflip,
        vflip=recipe.vflip,
        pad=recipe.pad or 0,
        repeats=recipe.repeats,
    )
    return Batching(
        batch_size=recipe.batch_size // recipe.accumulate,
        image_size=recipe.image_size,
        channels=channels,
        mean=recipe.mean,
        std=recipe.std,
        interpolation=recipe.interpolation,
        crop_pct=recipe.crop_pct,
        augment=augment,
        workers=recipe.workers,
        seed=recipe.seed,
    )


def _config(model: str) -> dict[str, Any]:
    check_name(model)
    known = timm.get_pretrained_cfg(model)
    config: dict[str, Any] = {} if known is None else known.to_dict()
    plain = {"input_size": (3, 224, 224), "mean": (0.5,) * 3, "std": (0.5,) * 3, "interpolation": "bicubic"}
    return {**plain, "crop_pct": 0.875, **{name: value for name, value in config.items() if value is not None}}


def _size(model_args: Mapping[str, Any], images: Images, config: Mapping[str, Any], smallest: int) -> tuple[int, int]:
    given = model_args.get("img_size")
    if given is not None:
        return (given, given) if isinstance(given, int) else tuple(given)
    if images.size is not None:
        return max(smallest, images.size[0]), max(smallest, images.size[1])
    return tuple(config["input_size"][1:])


def _fit(numbers: tuple[float, ...], channels: int) -> tuple[float, ...]:
    return tuple(numbers) if len(numbers) == channels else (sum(numbers) / len(numbers),) * channels


def own_batching(network: nn.Module, image_size: tuple[int, int] | None) -> Batching:
    """How a network of timm's wants images, as far as its configuration tells."""
    config: dict[str, Any] = getattr(network, "pretrained_cfg", {})
    plain = Batching(batch_size=64, image_size=image_size or tuple(config.get("input_size", (3, 224, 224))[1:]))
    first = next(network.parameters())
    channels = first.shape[1] if first.ndim == 4 and first.shape[1] in (1, 3) else 3
    return dataclasses.replace(
        plain,
        channels=channels,
        mean=_fit(config.get("mean", plain.mean), channels),
        std=_fit(config.get("std", plain.std), channels),
        interpolation=config.get("interpolation", plain.interpolation),
        crop_pct=config.get("crop_pct", 0.875),
    )
