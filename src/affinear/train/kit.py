"""All that a run trains with, made and prepared: network, optimizer, schedule, loss, loaders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from timm.data.mixup import Mixup
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2, get_optimizer_info
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from ..tasks.classify import network as networks
from ..tasks.classify.data import Images, Normalize, Skipped, test_loader, train_loader
from .devices import is_sharded
from .recipe import Recipe
from .seeding import seed_of

Batches = Any  # a loader that accelerate prepared, which has no type to speak of


@dataclass(frozen=True)
class Kit:
    """All that a run trains with.

    Attributes:
        accelerator: Knows devices and processes.
        recipe: With nothing left open.
        network: As it was made; its weights are those that are trained, unless they are sharded.
        called: The same, wrapped for many processes, mixed precision and compilation.
        optimizer: Prepared.
        schedule: Sets the learning rate for each step.
        average: The averaged weights, or None.
        mixup: Mixes images and targets, or None.
        loss: Of outputs and targets.
        train_batches: Prepared loader.
        test_batches: Prepared loader.
        normalize: What makes numbers of their bytes.
        steps_per_epoch: Optimizer steps.
        skipped: Corrupt images are counted here.
    """

    accelerator: Accelerator
    recipe: Recipe
    network: nn.Module
    called: nn.Module
    optimizer: Any
    schedule: Scheduler
    average: ModelEmaV3 | None
    mixup: Mixup | None
    loss: nn.Module
    train_batches: Batches
    test_batches: Batches
    normalize: Normalize
    steps_per_epoch: int
    skipped: Skipped

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.steps_per_epoch * self.recipe.epochs

    @property
    def parameters(self) -> int:
        """How many weights are trained."""
        return sum(parameter.numel() for parameter in self.network.parameters() if parameter.requires_grad)


def build(
    accelerator: Accelerator,
    recipe: Recipe,
    model: str,
    model_args: Mapping[str, Any],
    images: Images,
    start: Mapping[str, Tensor] | None,
    source: str,
) -> Kit:
    """Make and prepare everything.

    Args:
        accelerator: Made for this recipe.
        recipe: With nothing left open.
        model: Name of the network.
        model_args: What it is made with beside classes, channels and size.
        images: The data set.
        start: Weights to begin with; a classifier of another number of classes is not taken. None for fresh ones.
        source: What `start` came from, for errors.
    """
    check_processes(recipe, accelerator)
    channels = networks.channels_of(model_args, images)
    torch.manual_seed(seed_of(recipe.seed, 0))
    network = networks.create(model, len(images.class_names), channels, recipe, model_args)
    if start is not None:
        networks.fill(network, start, source, new_head=True)
    network = _placed(network, accelerator, recipe)
    average = None if recipe.ema_decay is None else ModelEmaV3(network, decay=recipe.ema_decay)
    skipped, batching = Skipped(), networks.batching(recipe, channels)
    train, test = train_loader(images, batching, skipped), test_loader(images, batching, skipped, full=True)
    steps = len(train) // recipe.accumulate
    if not steps:
        raise ValueError(
            f"accumulate: the training images do not fill {recipe.accumulate} parts of a batch; take fewer"
        )
    called, optimizer = accelerator.prepare(network, _optimizer(network, recipe))
    return Kit(
        accelerator=accelerator,
        recipe=recipe,
        network=network,
        called=called,
        optimizer=optimizer,
        schedule=make_schedule(optimizer.optimizer, recipe, steps),
        average=average,
        mixup=_mixup(recipe, len(images.class_names)),
        loss=_loss(recipe),
        train_batches=accelerator.prepare(train),
        test_batches=accelerator.prepare(test),
        normalize=Normalize(batching, accelerator.device),
        steps_per_epoch=steps,
        skipped=skipped,
    )


def make_schedule(optimizer: torch.optim.Optimizer, recipe: Recipe, steps_per_epoch: int) -> Scheduler:
    """What sets the learning rate after each step."""
    schedule, _ = create_scheduler_v2(
        optimizer,
        sched=recipe.sched,
        num_epochs=recipe.epochs,
        decay_epochs=max(1, recipe.epochs // 3),
        min_lr=recipe.min_lr,
        warmup_lr=recipe.warmup_lr,
        warmup_epochs=recipe.warmup_epochs,  # pyright: ignore[reportArgumentType]  # becomes steps, whole or not
        step_on_epochs=False,
        updates_per_epoch=steps_per_epoch,
    )
    assert schedule is not None  # the recipe lets no other name through
    return schedule


def check_processes(recipe: Recipe, accelerator: Accelerator) -> None:
    """Raise ValueError for what so many processes cannot share."""
    processes, part = accelerator.num_processes, recipe.batch_size // recipe.accumulate
    if part % processes:
        raise ValueError(
            f"batch_size: expected a multiple of the {processes} processes that share it, got {part}"
            + (f", which is {recipe.batch_size} in {recipe.accumulate} parts" if recipe.accumulate > 1 else "")
        )
    if (recipe.mixup or recipe.cutmix) and part // processes % 2:
        raise ValueError(
            f"batch_size: mixup pairs images, and {part // processes} at a time is odd; take an even number"
        )
    if is_sharded(accelerator) and recipe.ema_decay is not None:
        raise ValueError("ema_decay: averaged weights are not kept where weights are sharded; --set ema_decay=none")


def _placed(network: nn.Module, accelerator: Accelerator, recipe: Recipe) -> nn.Module:
    if recipe.sync_bn and accelerator.num_processes > 1 and accelerator.device.type == "cuda":
        network = nn.SyncBatchNorm.convert_sync_batchnorm(network)
    if recipe.channels_last:
        network.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]  # torch leaves it untyped
    return network if is_sharded(accelerator) else network.to(accelerator.device)


def _optimizer(network: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    try:
        known = get_optimizer_info(recipe.opt)
    except ValueError as error:
        raise ValueError(f"opt: {error}") from None
    given: dict[str, Any] = {"betas": recipe.betas} if known.has_betas and known.num_betas == 2 else {}
    if known.has_eps:
        given["eps"] = recipe.eps
    return create_optimizer_v2(
        network,
        opt=recipe.opt,
        lr=recipe.lr,
        weight_decay=recipe.weight_decay,
        layer_decay=recipe.layer_decay,
        **given,
    )


def _mixup(recipe: Recipe, classes: int) -> Mixup | None:
    if not recipe.mixup and not recipe.cutmix:
        return None
    return Mixup(
        mixup_alpha=recipe.mixup,
        cutmix_alpha=recipe.cutmix,
        prob=recipe.mixup_prob,
        switch_prob=recipe.mixup_switch_prob,
        label_smoothing=recipe.smoothing,
        num_classes=classes,
    )


def _loss(recipe: Recipe) -> nn.Module:
    if recipe.mixup or recipe.cutmix:
        return SoftTargetCrossEntropy()
    return LabelSmoothingCrossEntropy(recipe.smoothing) if recipe.smoothing else nn.CrossEntropyLoss()
