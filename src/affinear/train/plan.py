"""What a run would do, before it does it: steps, learning rate, memory."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..tasks.classify import network as networks
from ..tasks.classify.data import Images, open_data
from .devices import device
from .engine import Run
from .kit import make_schedule
from .recipe import Recipe
from .seeding import kept_random_state

SIGNS = "▁▂▃▄▅▆▇█"
WIDTH = 60  # signs of the curve
BYTES = {"no": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Plan:
    """What a run would do.

    Attributes:
        run: The run, its recipe with nothing left open.
        images: The data set's name.
        train_images: To learn from.
        test_images: To be judged by.
        classes: Classes.
        steps_per_epoch: Optimizer steps.
        rates: The learning rate at `WIDTH` moments, evenly from first to last step.
        parameters: Weights of the network.
        fixed_bytes: Of weights, gradients, optimizer and averaged weights.
        image_bytes: What one image leaves behind for the backward pass.
        processes: That share a batch.
    """

    run: Run
    images: str
    train_images: int
    test_images: int
    classes: int
    steps_per_epoch: int
    rates: tuple[float, ...]
    parameters: int
    fixed_bytes: int
    image_bytes: int
    processes: int

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.steps_per_epoch * self.run.recipe.epochs

    @property
    def memory(self) -> int:
        """Bytes that each process would need, about."""
        recipe = self.run.recipe
        return self.fixed_bytes + self.image_bytes * (recipe.batch_size // recipe.accumulate // self.processes)


def plan(run: Run, images: Images | None = None) -> Plan:
    """Work out what a run would do. Nothing is written and nothing trained.

    The memory of activations is counted in a forward pass of two small batches on the CPU, and scaled.

    Args:
        run: What would be trained.
        images: The data set, if it is open already.

    Raises:
        ValueError: If something about the run is not possible.
    """
    images = open_data(run.data) if images is None else images
    recipe = networks.resolve(run.recipe, run.model, run.model_args, images, device())
    channels = networks.channels_of(run.model_args, images)
    with kept_random_state():
        network = networks.create(run.model, len(images.class_names), channels, recipe, run.model_args)
        image_bytes = _activations(network, recipe, channels)
    steps = len(images.train) // (recipe.batch_size // recipe.accumulate) // recipe.accumulate
    if not steps:
        raise ValueError(
            f"batch_size: {images.name} has {len(images.train)} training images, which do not fill a batch of "
            f"{recipe.batch_size}; choose {len(images.train)} or less"
        )
    count = sum(parameter.numel() for parameter in network.parameters())
    return Plan(
        run=dataclasses.replace(run, recipe=recipe),
        images=images.name,
        train_images=len(images.train),
        test_images=len(images.test),
        classes=len(images.class_names),
        steps_per_epoch=steps,
        rates=_rates(recipe, steps),
        parameters=count,
        # Weights, their gradients and two moments of Adam in float32; then the average.
        fixed_bytes=count * 4 * (4 + (recipe.ema_decay is not None)),
        image_bytes=image_bytes * BYTES[recipe.precision or "no"] // 4,
        processes=int(os.environ.get("WORLD_SIZE", "1")),
    )


def in_words(planned: Plan) -> str:
    """A plan for people: what is trained on what, how long, the learning rate as a curve, memory."""
    recipe, run = planned.run.recipe, planned.run
    assert recipe.image_size is not None
    parts = f" in {recipe.accumulate} parts" if recipe.accumulate > 1 else ""
    lines = [
        f"network        {run.model}, {planned.parameters / 1e6:.2f} M parameters",
        f"data           {planned.images}: {planned.train_images:,} training and {planned.test_images:,} test images, "
        f"{planned.classes} classes, shown at {recipe.image_size[0]} x {recipe.image_size[1]}",
        f"steps          {planned.steps:,}: {recipe.epochs} epochs of {planned.steps_per_epoch:,} steps of "
        f"{recipe.batch_size} images{parts}, in {planned.processes} process{'es' if planned.processes > 1 else ''}",
        f"learning rate  {planned.rates[0]:.1e} to {max(planned.rates):.1e} to {planned.rates[-1]:.1e}",
        f"               {curve(planned.rates)}",
        f"memory         about {planned.memory / 2**30:.2f} GiB in each process: {planned.fixed_bytes / 2**20:,.0f} "
        f"MiB for weights and optimizer, {planned.image_bytes / 2**20:,.1f} MiB for each image",
        f"precision      {recipe.precision}, {'compiled' if recipe.compile else 'not compiled'}",
        f"output         {run.output}",
    ]
    return "\n".join(lines)


def curve(numbers: tuple[float, ...]) -> str:
    """Numbers as a row of bars.

    Examples:
        >>> curve((0.0, 0.5, 1.0))
        '▁▅█'
    """
    top = max(numbers) or 1.0
    return "".join(SIGNS[round(number / top * (len(SIGNS) - 1))] for number in numbers)


def _rates(recipe: Recipe, steps_per_epoch: int) -> tuple[float, ...]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=recipe.lr)
    schedule = make_schedule(optimizer, recipe, steps_per_epoch)
    last = steps_per_epoch * recipe.epochs - 1
    found: list[float] = []
    for moment in range(WIDTH):
        schedule.step_update(round(moment * last / (WIDTH - 1)))
        found.append(optimizer.param_groups[0]["lr"])
    return tuple(found)


def _activations(network: nn.Module, recipe: Recipe, channels: int) -> int:
    """Bytes in float32 that one more image leaves behind for backward."""
    assert recipe.image_size is not None
    network.train()
    counts: list[int] = []
    for batch in (2, 4):
        with _counted() as seen:
            network(torch.zeros(batch, channels, *recipe.image_size))
        counts.append(sum(seen.values()))
    return max(0, (counts[1] - counts[0]) // 2)


@contextmanager
def _counted() -> Generator[dict[int, int]]:
    seen: dict[int, int] = {}
    held: list[Tensor] = []  # or an address would be given out again and counted once for two

    def pack(tensor: Tensor) -> Tensor:
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        held.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield seen
