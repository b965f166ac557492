"""What `affinear compare` needs to know of classification: recipes of the trunks, and attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...lens.glance import Attention, glance
from ...train.recipe import Recipe
from ...train.task import Job, Setup, Task, Trained
from ..images.batching import as_tensor
from ..images.labelled.images import ArraySource, Images
from ..images.labelled.some import chosen
from . import network as networks
from . import trunk  # registers its names with timm
from .settings import ClassifySettings
from .variants import ROTARY, NormedQueries, variant

MICRO, CIFAR = "affinear_trunk_micro", "affinear_trunk_cifar"
LARGEST = 64  # pixels; larger images are made smaller for a trunk
SIDE = 32  # whole networks see images whose sides are multiples of it: every stride, window and cluster can have them
WATCHED = 64  # test images that the numbers of attention are taken of
SHOWN = 4  # test images that maps are drawn of

# What the trunks are trained with. Everything is decided here, so that a comparison is the same on every machine.
_PLAIN: Mapping[str, Any] = {
    "lr": 4e-3,
    "weight_decay": 0.05,
    "warmup_lr": 1e-6,
    "min_lr": 1e-5,
    "clip_grad": 1.0,
    "smoothing": 0.1,
    "compile": False,
}
TRUNK_RECIPES: Mapping[str, Mapping[str, Any]] = {
    # Digits are neither mirrored nor shifted: with so few epochs it would not help.
    MICRO: {
        **_PLAIN,
        "epochs": 10,
        "batch_size": 96,
        "warmup_epochs": 1.0,
        "augment": "none",
        "hflip": 0.0,
        "log_every": 1000,
    },
    CIFAR: {
        **_PLAIN,
        "epochs": 30,
        "batch_size": 256,
        "lr": 1e-3,
        "warmup_epochs": 3.0,
        "augment": "simple",
        "pad": 4,
        "hflip": 0.5,
    },
}


def setup(task: Task[Any, Any], model: str, images: Images) -> Setup:
    """The recipe of a comparison: the trunk's, or for any other network the one for small images."""
    here: dict[str, Any] = {"workers": 0} if isinstance(images.train, ArraySource) else {}
    if model not in trunk.SIZES:
        plain = task.preset(model, "tiny").changed(compile=False, **here)
        return plain.changed(batch_size=min(plain.recipe.batch_size, len(images.train)))
    small = images.size is not None and max(images.size) <= LARGEST
    shown = {"image_size": images.size if small else (32, 32)}
    found = Setup(task, Recipe(), ClassifySettings()).changed(**TRUNK_RECIPES[model], **shown, **here)
    return found.changed(batch_size=min(found.recipe.batch_size, len(images.train)))


def setup_of(task: Task[Any, Any], models: Sequence[str], images: Images) -> Setup:
    """One recipe for several networks: what each would decide about images for itself, the first decides for all."""
    found = setup(task, models[0], images)
    first = networks.settle(Job(models[0], {}, found.recipe, found.settings), images).settings  # pyright: ignore[reportArgumentType]
    assert first.image_size is not None
    size = tuple(-(-side // SIDE) * SIDE for side in first.image_size)
    return found.changed(
        image_size=size, mean=first.mean, std=first.std, interpolation=first.interpolation, crop_pct=first.crop_pct
    )


def look(trained: Trained[Images, ClassifySettings], images: Images) -> Attention:
    """Numbers and maps of a trained network's attention on test images, the same ones for every variant."""
    network, batching = trained.network, networks.batching(trained.job)
    device = next(network.parameters()).device
    pixels = [as_tensor(image, batching).to(device) for _, image in chosen(images.test, WATCHED)]
    shown = [(number, as_tensor(image, batching).to(device)) for number, image in chosen(images.test, SHOWN)]
    normed = any(isinstance(layer, NormedQueries) for layer in network.modules())
    return glance(network, torch.stack(pixels), shown, loudness=not normed)


def arguments(model: str, name: str) -> dict[str, Any]:
    """What a network is made with to have the attention of this name.

    Raises:
        ValueError: If the network cannot have it.
    """
    if model in trunk.SIZES:
        return {"mechanism": variant(name).name}
    if name == "own":
        return {}
    if name.endswith(ROTARY) or not isinstance(variant(name).parts.mechanism, str):
        raise ValueError(
            f"mechanisms: {name!r} is for the trunks ({', '.join(trunk.SIZES)}); {model} takes the names of mechanisms "
            "alone, as its positions are its own"
        )
    return {"mechanism": name}
