"""Trained weights of any task: loaded, and measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object

from ..models.checkpoints import read, room_for
from ..models.sealing import broken
from ..train.about import About, about, check_asked, named
from ..train.devices import accelerated
from ..train.engine import scored
from ..train.folder import weights_in
from ..train.recipe import Recipe
from ..train.settings import tidy
from ..train.task import Data, Job, Score, Task, Trained
from ..train.weights import fill
from .registry import find


def load_trained(
    source: Path,
    model: str | None = None,
    *,
    task: str | None = None,
    model_args: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Trained[Any, Any]:
    """A trained network from the folder of a run, whose best weights are taken, or from a file of weights.

    Args:
        source: The folder or the file.
        model: Name of the network, for files that do not tell.
        task: Name of the task, for files that do not tell; classify if not given.
        model_args: What it is made with beside that, for files that do not tell; what a file tells is not
            contradicted.
        changes: Fields of the task's settings, if not those it was trained with, such as `image_size`.

    Raises:
        ValueError: If there are no such weights, or they are of another network or task.
    """
    path = weights_in(source)
    told = about(path) if path.suffix == ".safetensors" else None
    if told is None:
        return find(task or "classify").bare(path, named(path, model), model_args or {}, changes)
    if task is not None and task != told.task:
        raise ValueError(f"{path}: these weights are of {told.task}, not of {task}")
    check_asked(told, path, model, model_args or {})
    if broken(path):
        raise ValueError(f"{path}: the file is not what was written: a bit of it has changed; get a whole copy of it")
    chosen = find(told.task)
    job = _job(chosen, told, path)
    asked = _asked(chosen, job, path, changes)
    tuned = {name: getattr(asked.settings, name) for name in changes if name in asked.settings.tuned}
    tensors = read(path).tensors
    # Made as it was trained, but for what weights do not depend on: some fields mean another thing to the network.
    network = chosen.network(dataclasses.replace(job, settings=job.settings.changed(**tuned)), room=room_for(tensors))
    fill(network, tensors, str(path))
    return Trained(chosen, asked, network.eval())


def evaluate(
    source: Path | Trained[Any, Any],
    data: str | Data,
    *,
    task: str | None = None,
    model: str | None = None,
    batch_size: int | None = None,
    workers: int = 0,
    **changes: Any,
) -> Score:
    """How well trained weights do on the test half of a data set, or on all of what has no halves.

    Args:
        source: The folder of a run, a file of weights, or what `load_trained` gave.
        data: What `--data` takes, or an open data set, whose test half is taken.
        task: Name of the task, for bare weights.
        model: Name of the network, for bare weights.
        batch_size: Samples at a time; that of training if not given.
        workers: Processes that read samples.
        changes: Fields of the task's settings, if not those it was trained with.

    Raises:
        ValueError: If the weights cannot be used, or do not go with the data.
        TooManyCorrupt: If more test samples cannot be read than the recipe of training allows.
    """
    trained = load_trained(source, model, task=task, **changes) if isinstance(source, Path) else source
    chosen, job = trained.task, trained.job
    opened: Any = chosen.open_to_judge(data, job.settings)[0] if isinstance(data, str) else data
    chosen.check_data(trained, opened)
    size = batch_size or job.recipe.batch_size // job.recipe.accumulate
    recipe = job.recipe.changed(workers=workers, batch_size=size, accumulate=1)
    with accelerated() as accelerator:
        work = chosen.work(dataclasses.replace(job, recipe=recipe), opened, accelerator.device)
        loader = accelerator.prepare(work.test_loader())
        found = scored(work, trained.network.to(accelerator.device), loader, accelerator)
        work.skipped.absorb(gather_object(work.skipped.state()))
    return dataclasses.replace(found, skipped=work.skipped.names)


def _job(task: Task[Any, Any], told: About, path: Path) -> Job[Any]:
    """What weights were trained with, every field of it checked."""
    try:
        recipe = Recipe().changed(**told.recipe)
        settings = task.settings().changed(**told.settings)
        job = Job(told.model, told.model_args, recipe, settings, told.facts)
        task.check_job(job)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return job


def _asked(task: Task[Any, Any], job: Job[Any], path: Path, changes: Mapping[str, Any]) -> Job[Any]:
    """The job with settings of the user's; those that the weights were trained for stay."""
    for name in job.settings.bound:
        was, now = getattr(job.settings, name), tidy(changes.get(name, getattr(job.settings, name)))
        if was != now:
            raise ValueError(f"{name}: expected {was!r}, as the weights of {path} were trained with, got {now!r}")
    asked = dataclasses.replace(job, settings=job.settings.changed(**changes))
    if changes:
        task.check_job(asked)
    return asked
