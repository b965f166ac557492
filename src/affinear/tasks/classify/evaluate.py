"""How well a network tells test images apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.nn import functional as F

from ...models.about import About, about
from ...models.checkpoints import read, room_for, shape_of_ends
from ...models.making import make, outline, takes
from ...models.sealing import broken
from ...train.checkpoint import BEST
from ...train.devices import accelerated
from ...train.recipe import Recipe
from . import network as networks
from .data import NO_IMAGE, Batching, Images, Normalize, Skipped, open_data, ready, test_loader

RUN = "run.json"
LARGEST = 2**13  # side of the images that a file of weights may ask for
MOST_AT_ONCE = 2**16


@dataclass(frozen=True)
class ClassScore:
    """How one class fared.

    Attributes:
        name: Of the class.
        images: Test images of it.
        top1: Share of them that were told.
    """

    name: str
    images: int
    top1: float


@dataclass(frozen=True)
class Score:
    """How a network did on test images.

    Attributes:
        top1: Share of images whose class comes first.
        top5: Share of images whose class is among the first five.
        loss: Mean cross entropy.
        images: How many were looked at.
        classes: Each class by itself.
        skipped: Names of images that could not be read.
    """

    top1: float
    top5: float
    loss: float
    images: int
    classes: tuple[ClassScore, ...]
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True)
class Trained:
    """A trained network with what it needs to be used.

    Attributes:
        network: In evaluation mode.
        model: Its name.
        class_names: What its outputs mean; empty if the file does not tell.
        batching: How it wants images.
    """

    network: nn.Module
    model: str
    class_names: tuple[str, ...]
    batching: Batching


def score(
    network: Callable[[Tensor], Tensor],
    batches: Iterable[tuple[Tensor, Tensor]],
    class_names: tuple[str, ...],
    accelerator: Accelerator,
) -> Score:
    """Look at all batches, in all processes, and count.

    Args:
        network: In evaluation mode.
        batches: Images and targets on the network's device; rows of the target `NO_IMAGE` are not counted.
        class_names: Of all classes.
        accelerator: Which adds up what the processes counted.
    """
    count = len(class_names)
    # Rows: images, first guesses right, among the first five; by class. Sums of float64 are exact for counts.
    table = torch.zeros(3, count, dtype=torch.float64, device=accelerator.device)
    loss = torch.zeros((), dtype=torch.float64, device=accelerator.device)
    with torch.no_grad():
        for images, targets in batches:
            with accelerator.autocast():
                logits = network(images).float()
            seen = targets != NO_IMAGE
            logits, targets = logits[seen], targets[seen]
            guesses = logits.topk(min(5, count), dim=1).indices
            right = guesses == targets[:, None]
            rows = torch.stack((torch.ones_like(targets, dtype=torch.bool), right[:, 0], right.any(1))).double()
            table.index_add_(1, targets, rows)
            loss += F.cross_entropy(logits, targets, reduction="sum").double()
    return _score(accelerator.reduce(table), accelerator.reduce(loss), class_names)  # pyright: ignore[reportArgumentType]


def load_trained(
    source: Path,
    model: str | None = None,
    *,
    model_args: Mapping[str, Any] | None = None,
    image_size: tuple[int, int] | None = None,
) -> Trained:
    """A trained network from the folder of a run, whose best weights are taken, or from a file of weights.

    Args:
        source: The folder or the file.
        model: Name of the network, for files that do not tell.
        model_args: What it is made with beside that, for files that do not tell.
        image_size: Height and width, if not those it was trained with.

    Raises:
        ValueError: If there are no such weights, or they are of another network.
    """
    path = source / BEST if source.is_dir() else source
    if not path.is_file():
        raise ValueError(f"{source}: expected the folder of a run or a file of weights, got {_absence(source)}")
    told = about(path) if path.suffix == ".safetensors" else None
    if told is None:
        return _foreign(path, model, model_args or {}, image_size)
    if model is not None and model != told.model:
        raise ValueError(f"{path}: these weights are of {told.model}, not of {model}")
    if broken(path):
        raise ValueError(f"{path}: the file is not what was written: a bit of it has changed; get a whole copy of it")
    tensors = read(path).tensors
    recipe = _recipe(told, path)
    made = networks.create(
        told.model,
        len(told.class_names),
        told.channels,
        recipe.changed(drop_path=0.0),
        told.model_args,
        room=room_for(tensors),
    )
    networks.fill(made, tensors, str(path))
    size = {"image_size": image_size} if image_size else {}
    batching = replace(networks.batching(recipe, told.channels), **size)
    return Trained(made.eval(), told.model, told.class_names, batching)


def evaluate(
    source: Path | Trained,
    data: str | Images,
    *,
    model: str | None = None,
    batch_size: int | None = None,
    workers: int = 0,
    image_size: tuple[int, int] | None = None,
) -> Score:
    """How well trained weights do on the test half of a data set.

    Args:
        source: The folder of a run, a file of weights, or what `load_trained` gave.
        data: What `--data` takes, or an open data set.
        model: Name of the network, for bare weights.
        batch_size: Images at a time; that of training if not given.
        workers: Processes that read images.
        image_size: Height and width, if not those it was trained with.

    Raises:
        ValueError: If the weights cannot be used, or know other classes than the data has.
        TooManyCorrupt: If more than one test image in a hundred cannot be read.
    """
    trained = source if isinstance(source, Trained) else load_trained(source, model, image_size=image_size)
    images = open_data(data) if isinstance(data, str) else data
    check_classes(trained, images)
    skipped = Skipped()
    batching = replace(trained.batching, workers=workers, batch_size=batch_size or trained.batching.batch_size)
    with accelerated() as accelerator:
        loader = accelerator.prepare(test_loader(images, batching, skipped, full=True))
        batches = ready(loader, Normalize(batching, accelerator.device))
        found = score(trained.network.to(accelerator.device), batches, images.class_names, accelerator)
        skipped.absorb(gather_object(skipped.state()))
    return replace(found, skipped=skipped.names)


def check_classes(trained: Trained, images: Images) -> None:
    """Raise ValueError if a network knows other classes than the data has."""
    ours, theirs = trained.class_names, images.class_names
    outputs = len(ours) or int(getattr(trained.network, "num_classes", len(theirs)))
    if outputs != len(theirs):
        raise ValueError(f"data: the network tells {outputs} classes apart, {images.name} has {len(theirs)}")
    for number, (one, other) in enumerate(zip(ours, theirs, strict=False)):  # bare weights have no names
        if one != other:
            raise ValueError(f"data: class {number} is {one!r} for the network and {other!r} in {images.name}")


def _score(table: Tensor, loss: Tensor, class_names: tuple[str, ...]) -> Score:
    counts, first, five = table.tolist()
    total = int(sum(counts))
    if not total:
        raise ValueError("data: expected test images, got none that can be read")
    classes = tuple(
        ClassScore(name, int(n), right / n if n else 0.0)
        for name, n, right in zip(class_names, counts, first, strict=True)
    )
    return Score(sum(first) / total, sum(five) / total, loss.item() / total, total, classes)


def _foreign(
    path: Path, model: str | None, model_args: Mapping[str, Any], image_size: tuple[int, int] | None
) -> Trained:
    if model is None:
        raise ValueError(f"{path}: the file does not tell which network it belongs to; name it with --model")
    tensors = read(path).tensors
    sized = {"img_size": image_size} if image_size and "img_size" in takes(model) else {}
    given: dict[str, Any] = {**model_args, **sized}
    ends: dict[str, Any] = shape_of_ends(tensors, outline(model, {}))
    made = make(model, {**ends, **given}, room=room_for(tensors))
    networks.fill(made, tensors, str(path))
    return Trained(made.eval(), model, (), networks.own_batching(made, image_size))


def _recipe(told: About, path: Path) -> Recipe:
    try:
        recipe = Recipe().changed(**told.recipe)
    except ValueError as error:
        raise ValueError(f"{path}: recipe: {str(error).removeprefix('recipe: ')}") from None
    for name in ("image_size", "mean", "std", "interpolation", "crop_pct"):
        if getattr(recipe, name) is None:
            raise ValueError(f"{path}: recipe: {name}: expected what the weights were trained with, got none")
    if max(recipe.image_size or ()) > LARGEST or recipe.batch_size > MOST_AT_ONCE:
        raise ValueError(
            f"{path}: recipe: expected sides of at most {LARGEST} and batches of at most {MOST_AT_ONCE}, got "
            f"{recipe.image_size} and {recipe.batch_size}"
        )
    return recipe


def _absence(source: Path) -> str:
    if not source.exists():
        return "nothing of that name"
    if (source / RUN).is_file():
        return f"a run that has no {BEST} yet"
    return f"a folder without {BEST}"
