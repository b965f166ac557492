"""Trainings of seconds: the engine's own steps over batches that lie on the device, judged once, without a folder.

What the engine keeps so that nothing is ever lost takes longer than such a training, and so does its loader: here all
batches of a training are brought to the device before its first step, and a step is one CUDA graph. One that is cut
short begins anew.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from affinear.train import Run
from affinear.train.devices import accelerated, device
from affinear.train.engine import scored, settled
from affinear.train.seeding import kept_random_state, seed_of
from affinear.train.task import Data, Job, Score, Setup, Work
from running.learning import Learner, Pace, half, learn, step_seconds_of

SHOWN = 40  # losses that are kept of a training

WorkOf = Callable[[Job[Any], Any, torch.device], Work[Any, Any]]


@dataclass(frozen=True)
class Brief:
    """What a training came to.

    Attributes:
        score: Of the weights after the last step.
        pace: Of its steps; losses are means of stretches of `stretch` steps.
        stretch: See there.
        parameters: Trained weights.
        per_second: Units of the task, after the first stretch.
        recipe: With nothing left open.
        settings: Likewise.
    """

    score: Score
    pace: Pace
    stretch: int
    parameters: int
    per_second: float
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


@lru_cache(maxsize=1)
def laid_out(model: str, spec: str, setup: Setup) -> Any:
    """The batches of all steps, each part of them a tensor (steps, ...) on the device.

    They are the same for all that differ in the network alone, and are made once where those come one after the other.

    Args:
        model: Whose settings they are made by.
        spec: See `opened`.
        setup: With a number of steps.
    """
    data = opened(spec, setup)
    job = settled(Run(model, spec, Path(), setup), data)
    work, steps = setup.task.work(job, data, device()), job.recipe.steps
    assert steps is not None
    loader = work.train_loader()
    sampler: Any = loader.batch_sampler
    batches: list[Any] = []
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        batches += itertools.islice(loader, steps - len(batches))
        if len(batches) == steps:
            return tree_map(lambda *parts: torch.stack(parts).to(device()), *batches)


def train_briefly(
    run: Run, data: Data, work_of: WorkOf | None = None, told: Callable[[str], None] = lambda _: None
) -> Brief:
    """Take all steps of a run and judge what came out; its output folder is not touched.

    Args:
        run: What to train, a number of steps among it.
        data: Open.
        work_of: Makes what has loss and score, where it is not the task's own.
        told: Is given a line now and then.

    Raises:
        RuntimeError: If a loss is not finite.
    """
    with kept_random_state():
        learner, work = _made(run, data, work_of)
        stretch = max(1, learner.steps // SHOWN)
        pace = learn(learner, told, part=stretch)
        learner.network.eval()
        with accelerated(work.job.recipe) as accelerator:
            batches = accelerator.prepare(work.test_loader())
            score = scored(work, learner.network, batches, accelerator)
    parameters = sum(one.numel() for one in learner.network.parameters() if one.requires_grad)
    rate = work.per_step / pace.step_seconds
    return Brief(score, pace, stretch, parameters, rate, learner.recipe.as_dict(), work.job.settings.as_dict())


def seconds_of_a_step(run: Run, data: Data, work_of: WorkOf | None = None, *, building: int, timed: int) -> float:
    """What one of its steps takes beside whatever runs at the same time, after some that build kernels and a graph."""
    with kept_random_state():
        return step_seconds_of(_made(run, data, work_of)[0], building, timed)


def _made(run: Run, data: Data, work_of: WorkOf | None) -> tuple[Learner, Work[Any, Any]]:
    """What learns, its weights as the engine begins with them, and what has loss and score."""
    job, task = settled(run, data), run.setup.task
    batches = laid_out(run.model, run.data, run.setup)
    torch.manual_seed(seed_of(job.recipe.seed, 0))
    network = task.network(job)
    task.begin(network, job)
    network.to(device())
    work = (work_of or task.work)(job, data, device())

    def loss(at: Tensor) -> Tensor:
        def of_this_step(every: Tensor) -> Tensor:
            return every.index_select(0, at)[0]

        with half(device()):
            return work.loss(network, work.ready(tree_map(of_this_step, batches)))

    return Learner(network, job.recipe, loss, device()), work
