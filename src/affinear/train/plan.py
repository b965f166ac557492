"""What a run would do, before it does it: steps, learning rate, memory."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .engine import Run, ready, settled
from .kit import make_schedule, steps_per_epoch
from .recipe import Recipe
from .seeding import kept_random_state, seed_step
from .task import Data, Job

SIGNS = "▁▂▃▄▅▆▇█"
WIDTH = 60  # signs of the curve
BYTES = {"no": 4, "bf16": 2, "fp16": 2}
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Plan:
    """What a run would do.

    Attributes:
        run: The run.
        job: The same with nothing left open.
        data: The data set in a line.
        steps_per_epoch: Optimizer steps.
        rates: The learning rate at `WIDTH` moments, evenly from first to last step.
        parameters: Weights of the network.
        fixed_bytes: Of weights, gradients, optimizer and averaged weights.
        sample_bytes: What one sample leaves behind for the backward pass.
        processes: That share a batch.
    """

    run: Run
    job: Job[Any]
    data: str
    steps_per_epoch: int
    rates: tuple[float, ...]
    parameters: int
    fixed_bytes: int
    sample_bytes: int
    processes: int

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.job.recipe.total_steps(self.steps_per_epoch)

    @property
    def memory(self) -> int:
        """Bytes that each process would need, about."""
        recipe = self.job.recipe
        return self.fixed_bytes + self.sample_bytes * (recipe.batch_size // recipe.accumulate // self.processes)

    def to_json(self) -> str:
        """Task, recipe and settings with nothing left open."""
        return dataclasses.replace(self.run.setup, recipe=self.job.recipe, settings=self.job.settings).to_json()


def plan(run: Run, data: Data | None = None) -> Plan:
    """Work out what a run would do. Nothing is written and nothing trained.

    The memory of activations is counted in a forward pass of two small batches on the CPU, and scaled.

    Args:
        run: What would be trained.
        data: The data set, if it is open already.

    Raises:
        ValueError: If something about the run is not possible.
    """
    task = run.setup.task
    opened: Data = task.open(run.data, run.setup.settings) if data is None else data
    job = settled(run, opened)
    batches = len(task.work(job, opened, CPU).train_loader())
    steps = steps_per_epoch(batches, job.recipe, task.samples)
    with kept_random_state():
        network = task.network(job)
        sample_bytes = _activations(run, job, opened, network)
    count = sum(parameter.numel() for parameter in network.parameters())
    return Plan(
        run=run,
        job=job,
        data=f"{opened.name}: {task.summary(job, opened)}",
        steps_per_epoch=steps,
        rates=_rates(job.recipe, steps),
        parameters=count,
        # Weights, their gradients and two moments of Adam in float32; then the average.
        fixed_bytes=count * 4 * (4 + (job.recipe.ema_decay is not None)),
        sample_bytes=sample_bytes * BYTES[job.recipe.precision or "no"] // 4,
        processes=int(os.environ.get("WORLD_SIZE", "1")),
    )


def in_words(planned: Plan) -> str:
    """A plan for people: what is trained on what, how long, the learning rate as a curve, memory."""
    recipe, run = planned.job.recipe, planned.run
    parts = f" in {recipe.accumulate} parts" if recipe.accumulate > 1 else ""
    length = f"{recipe.epochs} epochs of {planned.steps_per_epoch:,} steps"
    if recipe.steps is not None:
        length = f"{recipe.steps / planned.steps_per_epoch:.1f} epochs, each {planned.steps_per_epoch:,} steps"
    lines = [
        f"network        {run.model}, {planned.parameters / 1e6:.2f} M parameters",
        f"data           {planned.data}",
        f"steps          {planned.steps:,}: {length} of {recipe.batch_size} samples{parts}, in {planned.processes} "
        f"process{'es' if planned.processes > 1 else ''}",
        f"learning rate  {planned.rates[0]:.1e} to {max(planned.rates):.1e} to {planned.rates[-1]:.1e}",
        f"               {curve(planned.rates)}",
        f"memory         about {planned.memory / 2**30:.2f} GiB in each process: {planned.fixed_bytes / 2**20:,.0f} "
        f"MiB for weights and optimizer, {planned.sample_bytes / 2**20:,.1f} MiB for each sample",
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
    last = recipe.total_steps(steps_per_epoch) - 1
    found: list[float] = []
    for moment in range(WIDTH):
        schedule.step_update(round(moment * last / (WIDTH - 1)))
        found.append(optimizer.param_groups[0]["lr"])
    return tuple(found)


def _activations(run: Run, job: Job[Any], data: Data, network: nn.Module) -> int:
    """Bytes in float32 that one more sample leaves behind for backward."""
    network.train()
    counts: list[int] = []
    for batch in (2, 4):
        small = dataclasses.replace(job, recipe=job.recipe.changed(batch_size=batch, accumulate=1, workers=0))
        work = run.setup.task.work(small, data, CPU)
        seed_step(job.recipe.seed, 0, 0, 0, CPU)
        taken = work.vary(next(ready(work.train_loader(), work)))
        with _counted() as seen:
            work.loss(network, taken)
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
