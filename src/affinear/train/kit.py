"""All that a run trains with, made and prepared: network, optimizer, schedule, loaders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from timm.optim import create_optimizer_v2, get_optimizer_info, param_groups_weight_decay
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from .context import Context, context_of
from .devices import is_sharded
from .freezing import freeze
from .recipe import Recipe
from .seeding import seed_of
from .task import Data, Job, Task, Work

Batches = Any  # a loader that accelerate prepared, which has no type to speak of


@dataclass(frozen=True)
class Kit:
    """All that a run trains with.

    Attributes:
        accelerator: Knows devices and processes.
        context: Which of them share images.
        recipe: With nothing left open.
        work: The task at work: loss and score.
        network: As it was made; its weights are those that are trained, unless they are sharded.
        called: The same, wrapped for many processes, mixed precision and compilation.
        optimizer: Prepared.
        schedule: Sets the learning rate for each step.
        average: The averaged weights, or None.
        train_batches: Prepared loader.
        test_batches: Prepared loader.
        steps_per_epoch: Optimizer steps.
    """

    accelerator: Accelerator
    context: Context
    recipe: Recipe
    work: Work[Any, Any]
    network: nn.Module
    called: nn.Module
    optimizer: Any
    schedule: Scheduler
    average: ModelEmaV3 | None
    train_batches: Batches
    test_batches: Batches
    steps_per_epoch: int
    still: tuple[nn.Module, ...] = ()

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.recipe.total_steps(self.steps_per_epoch)

    @property
    def epochs(self) -> int:
        """Passes over the training samples; the last may be cut short."""
        return -(-self.steps // self.steps_per_epoch)

    @property
    def parameters(self) -> int:
        """How many weights are trained."""
        return sum(parameter.numel() for parameter in self.network.parameters() if parameter.requires_grad)


def build(
    accelerator: Accelerator,
    task: Task[Any, Any],
    job: Job[Any],
    data: Data,
    start: Mapping[str, Tensor] | None = None,
    source: str = "",
) -> Kit:
    """Make and prepare everything.

    Args:
        accelerator: Made for the job's recipe.
        task: What is trained.
        job: With nothing left open.
        data: Open.
        start: Weights to begin with; None for fresh ones.
        source: What `start` came from, for errors.
    """
    recipe = job.recipe
    context = context_of(accelerator, recipe.context_parallel)
    check_processes(task, job, accelerator, context)
    torch.manual_seed(seed_of(recipe.seed, 0))
    network = task.network(job)
    if start is not None:
        task.start(network, start, source)
    else:
        task.begin(network, job)
    still = freeze(network, recipe.freeze)
    network = context.spread(_placed(network, accelerator, recipe))
    average = None if recipe.ema_decay is None else ModelEmaV3(network, decay=recipe.ema_decay)
    work = task.work(job, data, accelerator.device)
    train, test = work.train_loader(), work.test_loader()
    made = _optimizer(network, recipe, lambda name: task.rate_of(name, job))
    called, optimizer = accelerator.prepare(network, made)
    steps = steps_per_epoch(len(train), recipe, task.samples)
    return Kit(
        accelerator=accelerator,
        context=context,
        recipe=recipe,
        work=work,
        network=network,
        called=called,
        optimizer=optimizer,
        schedule=make_schedule(optimizer.optimizer, recipe, steps),
        average=average,
        train_batches=context.loader(accelerator, train),
        test_batches=context.loader(accelerator, test),
        steps_per_epoch=steps,
        still=still,
    )


def steps_per_epoch(batches: int, recipe: Recipe, samples: str) -> int:
    """Optimizer steps in so many batches of a loader.

    Raises:
        ValueError: If there is not one.
    """
    if batches < recipe.accumulate:
        raise ValueError(
            f"accumulate: the training {samples} do not fill {recipe.accumulate} parts of a batch; take fewer"
        )
    return batches // recipe.accumulate


def make_schedule(optimizer: torch.optim.Optimizer, recipe: Recipe, steps_per_epoch: int) -> Scheduler:
    """What sets the learning rate after each step."""
    # Length and milestones are counted in epochs or in steps; the warm-up may be counted otherwise.
    length, unit = (recipe.epochs, steps_per_epoch) if recipe.steps is None else (recipe.steps, 1)
    if recipe.warmup_steps is not None:
        warmup = recipe.warmup_steps / unit
    else:
        warmup = recipe.warmup_epochs if recipe.steps is None else recipe.warmup_epochs * steps_per_epoch
    schedule, _ = create_scheduler_v2(
        optimizer,
        sched=recipe.sched,
        num_epochs=length,
        decay_epochs=max(1, length // 3),
        decay_milestones=list(recipe.milestones or ()),  # pyright: ignore[reportArgumentType]  # become steps
        decay_rate=recipe.power if recipe.sched == "poly" else recipe.decay_rate,  # timm has one argument for both
        min_lr=recipe.min_lr,
        warmup_lr=recipe.warmup_lr,
        warmup_epochs=warmup,  # pyright: ignore[reportArgumentType]  # becomes steps, whole or not
        step_on_epochs=False,
        updates_per_epoch=unit,
    )
    assert schedule is not None  # the recipe lets no other name through
    return schedule


def check_processes(task: Task[Any, Any], job: Job[Any], accelerator: Accelerator, context: Context) -> None:
    """Raise ValueError for what so many processes cannot share."""
    recipe = job.recipe
    processes, part = context.parts, recipe.batch_size // recipe.accumulate
    if part % processes:
        raise ValueError(
            f"batch_size: expected a multiple of the {processes} {context.sharers} that share it, got {part}"
            + (f", which is {recipe.batch_size} in {recipe.accumulate} parts" if recipe.accumulate > 1 else "")
        )
    task.check_parts(job, part // processes)
    if is_sharded(accelerator) and recipe.ema_decay is not None:
        raise ValueError("ema_decay: averaged weights are not kept where weights are sharded; --set ema_decay=none")


def _placed(network: nn.Module, accelerator: Accelerator, recipe: Recipe) -> nn.Module:
    if recipe.checkpointing:
        _checkpointed(network)
    if recipe.sync_bn and accelerator.num_processes > 1 and accelerator.device.type == "cuda":
        network = nn.SyncBatchNorm.convert_sync_batchnorm(network)
    if recipe.channels_last:
        network.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]  # torch leaves it untyped
    return network if is_sharded(accelerator) else network.to(accelerator.device)


def _checkpointed(network: nn.Module) -> None:
    switch = getattr(network, "set_grad_checkpointing", None) or getattr(network, "gradient_checkpointing_enable", None)
    if switch is None:
        raise ValueError(f"checkpointing: {type(network).__name__} cannot; --set checkpointing=false")
    switch()


def _optimizer(network: nn.Module, recipe: Recipe, rate_of: Callable[[str], float]) -> torch.optim.Optimizer:
    try:
        known = get_optimizer_info(recipe.opt)
    except ValueError as error:
        raise ValueError(f"opt: {error}") from None
    given: dict[str, Any] = {"betas": recipe.betas} if known.has_betas and known.num_betas == 2 else {}
    if known.has_eps:
        given["eps"] = recipe.eps
    rates = {name: rate_of(name) for name, parameter in network.named_parameters() if parameter.requires_grad}
    alike = all(rate == 1 for rate in rates.values())
    return create_optimizer_v2(
        network if alike else _groups(network, recipe, rates),
        opt=recipe.opt,
        lr=recipe.lr,
        weight_decay=recipe.weight_decay,
        layer_decay=recipe.layer_decay if alike else None,
        **given,
    )


def _groups(network: nn.Module, recipe: Recipe, rates: Mapping[str, float]) -> list[dict[str, Any]]:
    """Parameters by the factor of their learning rate; timm says which of them decay."""
    if recipe.layer_decay is not None:
        raise ValueError("layer_decay: expected none, as this task has rates of its own for some weights")
    names = {parameter: name for name, parameter in network.named_parameters()}
    exempt: Any = getattr(network, "no_weight_decay", set[str])
    found: list[dict[str, Any]] = []
    for group in param_groups_weight_decay(network, recipe.weight_decay, no_weight_decay_list=exempt()):
        for rate in sorted(set(rates.values())):
            chosen = [parameter for parameter in group["params"] if rates[names[parameter]] == rate]
            own = {"lr": recipe.lr * rate, "initial_lr": recipe.lr, "lr_scale": rate}
            found += [{**group, **own, "params": chosen}] if chosen else []
    return found
