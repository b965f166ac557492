"""The network of a job, made for its data, and how images are shown to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import timm
from torch import Tensor, nn

import affinear.models  # registers its names with timm
from affinear.models import dit
from affinear.models.catalogue import count_macs
from affinear.models.making import MOST_NUMBERS, check, check_name, make, outline, short, takes

from ...train.task import Job
from ...train.weights import fill
from . import trunk
from .data import Augment, Batching, Images
from .settings import ClassifySettings

__all__ = ["batching", "begin", "check_name", "create", "macs", "settle"]
SMALLEST = 32  # the least side that every network of ours can take, trunks apart, which take any
_FAMILIES = affinear.models.__all__


def create(job: Job[ClassifySettings], *, room: int = MOST_NUMBERS) -> nn.Module:
    """The network of a settled job, for its classes, and for its size of images where it wants to know.

    Args:
        job: Its facts have `class_names` and `channels`.
        room: How many numbers it may have, as `affinear.models.making` counts them.

    Raises:
        ValueError: If there is no such network, or it does not know an argument.
    """
    return make(job.model, _wanted(job), room=room)


def macs(job: Job[ClassifySettings]) -> int | None:
    """Multiply-adds of a settled job's network for one image, found without memory; None where that is not possible.

    Raises:
        ValueError: If the network does not take images of this size, or an argument.
    """
    size = job.settings.image_size
    assert size is not None
    network = outline(job.model, _wanted(job)).eval()
    try:
        return count_macs(network, (job.facts["channels"], *size))
    except NotImplementedError:  # an operation that cannot do without numbers
        return None
    except (ValueError, RuntimeError, AssertionError) as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"model: {job.model} does not take images of {' x '.join(map(str, size))} pixels ({said}); set image_size"
        ) from None


def _wanted(job: Job[ClassifySettings]) -> dict[str, Any]:
    """What the network of a settled job is made with."""
    known = takes(job.model)
    if "num_classes" not in known:
        raise ValueError(f"model: expected a network that tells images apart, such as mavit_tiny, got {job.model!r}")
    wanted: dict[str, Any] = {"num_classes": len(job.facts["class_names"]), "in_chans": job.facts["channels"]}
    if "img_size" in known:
        wanted["img_size"] = job.settings.image_size
    if job.settings.drop_path:
        if "drop_path_rate" not in known:
            raise ValueError(f"model_args: {job.model} takes no 'drop_path_rate'; set the recipe's drop_path to 0")
        wanted["drop_path_rate"] = job.settings.drop_path
    return wanted | dict(job.model_args)


def begin(network: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
    """Load weights into a fresh network; a classifier of another number of classes keeps its fresh weights.

    Raises:
        ValueError: If a tensor is missing, unexpected or of another shape; the first few are named.
    """
    head = getattr(network, "pretrained_cfg", {}).get("classifier", "head")
    fill(network, tensors, source, fresh=tuple(f"{name}." for name in ([head] if isinstance(head, str) else head)))


def settle(job: Job[ClassifySettings], images: Images) -> Job[ClassifySettings]:
    """The job with nothing left open: what data and network decide is decided."""
    if job.model in dit.SIZES:
        raise ValueError(
            f"model: expected a network that tells classes apart, got {job.model}, which draws them: --task generate"
        )
    check(job.model, job.model_args)
    config = _config(job.model)
    channels = channels_of(job.model_args, images)
    smallest = 1 if job.model in trunk.SIZES else SMALLEST
    size = job.settings.image_size or _size(job.model_args, images, config, smallest)
    found: dict[str, Any] = {
        "image_size": size,
        "mean": _fit(config["mean"], channels),
        "std": _fit(config["std"], channels),
        "interpolation": config["interpolation"],
        "crop_pct": 1.0 if images.size is not None else config["crop_pct"],
        "pad": min(size) // 8,
    }
    missing = {name: value for name, value in found.items() if getattr(job.settings, name) is None}
    facts = {"class_names": list(images.class_names), "channels": channels}
    return dataclasses.replace(job, settings=dataclasses.replace(job.settings, **missing), facts=facts)


def channels_of(model_args: Mapping[str, Any], images: Images) -> int:
    """Channels that the network takes: those of the images, unless it is told otherwise."""
    found = model_args.get("in_chans", images.channels)
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise ValueError(f"model_args: in_chans: expected 1 (grey) or 3 (colour), got {short(found)}")
    return found


def batching(job: Job[ClassifySettings]) -> Batching:
    """How images become batches under a job that has nothing left open."""
    recipe, shown = job.recipe, job.settings
    assert shown.image_size is not None
    assert shown.mean is not None
    assert shown.std is not None
    assert shown.interpolation is not None
    assert shown.crop_pct is not None
    augment = Augment(
        kind=shown.augment,  # pyright: ignore[reportArgumentType]  # checked by the settings
        auto_augment=shown.auto_augment,
        color_jitter=shown.color_jitter or None,
        reprob=shown.reprob,
        remode=shown.remode,
        recount=shown.recount,
        scale=shown.scale,
        ratio=shown.ratio,
        hflip=shown.hflip,
        vflip=shown.vflip,
        pad=shown.pad or 0,
        repeats=shown.repeats,
    )
    return Batching(
        batch_size=recipe.batch_size // recipe.accumulate,
        image_size=shown.image_size,
        channels=job.facts["channels"],
        mean=shown.mean,
        std=shown.std,
        interpolation=shown.interpolation,
        crop_pct=shown.crop_pct,
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
        sides = (given, given) if isinstance(given, int) else tuple(given) if isinstance(given, (list, tuple)) else ()
        if len(sides) != 2 or not all(type(side) is int and side > 0 for side in sides):
            raise ValueError(f"model_args: img_size: expected a side, or height and width, got {short(given)}")
        return sides
    if images.size is not None:
        return max(smallest, images.size[0]), max(smallest, images.size[1])
    return tuple(config["input_size"][1:])


def _fit(numbers: tuple[float, ...], channels: int) -> tuple[float, ...]:
    return tuple(numbers) if len(numbers) == channels else (sum(numbers) / len(numbers),) * channels


def own_settings(network: nn.Module) -> tuple[ClassifySettings, int]:
    """How a network of timm's wants images, as far as its configuration tells; and their channels."""
    config: dict[str, Any] = getattr(network, "pretrained_cfg", {})
    first = next(network.parameters())
    channels = first.shape[1] if first.ndim == 4 and first.shape[1] in (1, 3) else 3
    plain = Batching(batch_size=64, image_size=(224, 224))
    wanted = ClassifySettings(
        image_size=tuple(config.get("input_size", (3, 224, 224))[1:]),
        mean=_fit(config.get("mean", plain.mean), channels),
        std=_fit(config.get("std", plain.std), channels),
        interpolation=config.get("interpolation", plain.interpolation),
        crop_pct=config.get("crop_pct", 0.875),
        augment="none",
    )
    return wanted, channels
