"""How well a teacher does by itself: what its student is to be measured by."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from accelerate.utils import broadcast_object_list

from ...train.context import context_of
from ...train.devices import accelerated
from ...train.engine import Run, scored, settled
from ...train.progress import Progress
from ...train.settings import is_number, read_object
from ...train.task import Data, Job, Task
from .lesson import Lesson
from .notes import keep
from .settings import SwapSettings

FILE = "teacher.json"


def teacher_score(run: Run, folder: Path, *, progress: Progress | None = None) -> Mapping[str, float]:
    """The numbers of a teacher on the test set of its student, judged as the student is.

    All processes measure together. What they found is kept in `teacher.json`, and measured anew only for another
    teacher, other data or other settings.

    Args:
        run: A stage of the distilling.
        folder: Where the file is kept.
        progress: Who listens; nobody if None.
    """
    task = run.setup.task
    data: Data = task.open(run.data, run.setup.settings)
    job = settled(run, data)
    asked = _asked(task, job, data.fingerprint)
    path = folder / FILE
    with accelerated(job.recipe) as accelerator:
        known = [_known(path, asked, task.metric.name)]
        broadcast_object_list(known)  # the folder may be that of the first process alone
        if known[0] is not None:
            return known[0]
        if progress is not None and accelerator.is_main_process:
            progress.say("Measuring the teacher on the same test set.")
        # Its own weights in float32 below autocast, as those of a student; a lesson may be given in half of that.
        plain = dataclasses.replace(job, recipe=dataclasses.replace(job.recipe, precision="no"))
        work: Any = task.work(plain, data, accelerator.device)
        context = context_of(accelerator, job.recipe.context_parallel)
        batches = context.loader(accelerator, work.test_loader())
        found = scored(work, cast(Lesson, work.lesson).teacher, batches, context.counting(accelerator))
        numbers = {name: float(value) for name, value in found.numbers.items()}
        if accelerator.is_main_process:
            keep(path, {"asked": asked, "score": numbers, "count": found.count})
        return numbers


def _asked(task: Task[Any, Any], job: Job[Any], data: str) -> dict[str, Any]:
    """All that a teacher's score depends on, for JSON; how its student is made is not among it."""
    others = {*SwapSettings.names(), *job.settings.free}
    facts = {name: fact for name, fact in job.facts.items() if name not in ("teacher", "teacher_sha256")}
    told = {
        "task": task.name,
        "teacher": job.facts["teacher_sha256"],
        "data": data,
        "model": job.model,
        "model_args": dict(job.model_args),
        "settings": {name: value for name, value in job.settings.as_dict().items() if name not in others},
        "facts": hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest(),
        "precision": job.recipe.precision,
    }
    return json.loads(json.dumps(told))


def _known(path: Path, asked: Mapping[str, Any], metric: str) -> dict[str, float] | None:
    """What the file tells, if it was found for the same."""
    try:
        told = read_object(path.read_text(encoding="utf-8"), str(path))
    except (OSError, ValueError):
        return None
    score: Any = told.get("score")
    if told.get("asked") != asked or not isinstance(score, dict):
        return None
    numbers = cast("dict[str, Any]", score)
    return numbers if metric in numbers and all(map(is_number, numbers.values())) else None
