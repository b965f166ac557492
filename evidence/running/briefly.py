"""Trainings of seconds: the engine's own steps, judged once, without folder, checkpoints and report.

What the engine keeps so that nothing is ever lost takes longer than such a training. One that is cut short begins anew.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from affinear.bench.timing import synchronize
from affinear.train import Run
from affinear.train.devices import accelerated, peak_memory
from affinear.train.engine import ready, scored, settled
from affinear.train.kit import Kit, build
from affinear.train.seeding import kept_random_state
from affinear.train.stepping import Stepper
from affinear.train.task import Data, Score, Setup

SHOWN = 40  # losses that are kept of a training


@dataclass(frozen=True)
class Brief:
    """What a training came to.

    Attributes:
        score: Of the weights after the last step.
        losses: Means of stretches of steps, with the step each ends at.
        parameters: Trained weights.
        seconds: Of all steps, with what ran beside them.
        per_second: Units of the task.
        peak_memory: Bytes.
        recipe: With nothing left open.
        settings: Likewise.
    """

    score: Score
    losses: tuple[tuple[int, float], ...]
    parameters: int
    seconds: float
    per_second: float
    peak_memory: int
    recipe: dict[str, Any]
    settings: dict[str, Any]


@cache
def opened(spec: str, setup: Setup) -> Any:
    """The data of a task, which a process opens once, however many trainings it does.

    Args:
        spec: As `affinear train --data` takes it.
        setup: Of the task, its settings among them.
    """
    return setup.task.open(spec, setup.settings)


def train_briefly(run: Run, data: Data) -> Brief:
    """Take all steps of a run and judge what came out; its output folder is not touched.

    Args:
        run: What to train, a number of steps among it.
        data: Open.

    Raises:
        RuntimeError: If a loss is not finite.
    """
    with _kit(run, data) as kit:
        stepper, losses, sums = Stepper(kit), list[tuple[int, float]](), list[float]()
        every, device = max(1, kit.steps // SHOWN), kit.accelerator.device
        synchronize(device)
        began = time.perf_counter()
        for step, batches in enumerate(_batches(kit, kit.steps)):
            sums.append(stepper.step(batches, step))
            if not math.isfinite(sums[-1]):
                raise RuntimeError(f"the loss is {sums[-1]} after {step + 1} steps")
            if len(sums) == every or step + 1 == kit.steps:
                losses.append((step + 1, sum(sums) / len(sums)))
                sums.clear()
        synchronize(device)
        seconds = time.perf_counter() - began
        kit.network.eval()
        score = scored(kit.work, kit.network, kit.test_batches, kit.context.counting(kit.accelerator))
        return Brief(
            score,
            tuple(losses),
            kit.parameters,
            seconds,
            kit.steps * kit.work.per_step / seconds,
            peak_memory(device),
            kit.recipe.as_dict(),
            kit.work.job.settings.as_dict(),
        )


def seconds_of_a_step(run: Run, data: Data, warm: int, timed: int) -> float:
    """What one of its steps takes with all that runs beside it, after some that build kernels."""
    with _kit(run, data) as kit:
        stepper, began = Stepper(kit), 0.0
        for step, batches in enumerate(_batches(kit, warm + timed)):
            if step == warm:
                synchronize(kit.accelerator.device)
                began = time.perf_counter()
            stepper.step(batches, step)
        synchronize(kit.accelerator.device)
        return (time.perf_counter() - began) / timed


@contextmanager
def _kit(run: Run, data: Data) -> Generator[Kit]:
    job = settled(run, data)
    with kept_random_state(), accelerated(job.recipe) as accelerator:
        kit = build(accelerator, run.setup.task, job, data)
        kit.network.train()
        kit.called.train()
        yield kit


def _batches(kit: Kit, steps: int) -> Iterator[Iterator[Any]]:
    """The loader of every step's epoch."""
    for epoch in range(-(-steps // kit.steps_per_epoch)):
        kit.train_batches.set_epoch(epoch)
        batches = ready(kit.train_batches, kit.work)
        for _ in range(min(kit.steps_per_epoch, steps - epoch * kit.steps_per_epoch)):
            yield batches
