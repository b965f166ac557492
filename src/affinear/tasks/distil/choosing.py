"""Which layers a student leaves softmax, found on the task's own data before anything is learned."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import send_to_device

from ...linearizing.leaving import AMONG, Left, choose, twin
from ...linearizing.swap import report_of
from ...train.devices import device
from ...train.engine import Run, ready, settled
from ...train.faults import RunError
from ...train.progress import Outline, Progress
from ...train.settings import read_object
from ...train.task import Job
from .lesson import Lesson, swapped
from .notes import keep
from .settings import SwapSettings

FILE = "left.json"


def layers_left(run: Run, count: int, samples: int, *, progress: Progress | None = None) -> tuple[Left, ...]:
    """The layers that are worth leaving as they are, by number, the most worth first.

    A trial is the teacher with all but some layers swapped, judged by the loss of stage "whole" on training samples.
    What each trial found is kept in `left.json` in the run's folder, so that the same command goes on where it stopped.

    Args:
        run: What would be distilled; its folder is that of both stages.
        count: How many layers.
        samples: On how many training samples.
        progress: Who listens; nobody if None.

    Raises:
        ValueError: If there are not as many layers.
        RunError: If the folder has a choice that was made for something else.
    """
    setup = run.setup
    recipe = dataclasses.replace(setup.recipe, batch_size=samples, accumulate=1, workers=0)
    setup = dataclasses.replace(setup, recipe=recipe, settings=setup.settings.changed(stage="whole"))
    data = setup.task.open(run.data, setup.settings)
    job = settled(dataclasses.replace(run, setup=setup), data)
    kept = _Kept(run.output / FILE, _asked(job, data.fingerprint))
    place = device()
    work: Any = setup.task.work(job, data, place)
    loaded = (send_to_device(batch, place) for batch in work.train_loader())
    [batch] = islice(ready(loaded, work), 1)
    lesson, chosen = cast(Lesson, work.lesson), cast(SwapSettings, job.settings)

    @torch.no_grad()
    def cost(left: Sequence[str]) -> float:
        student = swapped(twin(lesson.teacher), chosen, [*chosen.left(), *map(int, left)])
        return float(work.loss(student.eval(), batch))

    listener = progress or Progress()
    names = [str(place) for place in _free(lesson, chosen)]
    among = max(AMONG, count)

    def told(done: int, all_: int) -> None:
        if done == 1:
            which = "which layer to leave" if count == 1 else f"which {count} layers to leave"
            listener.begin(Outline(which, all_, 0, 1, "trials"))
        listener.step(done, kept.latest, 1.0)

    try:
        return choose(names, count, lambda left: kept.get(left, cost), among=among, told=told)
    finally:
        listener.end()


def _free(lesson: Lesson, chosen: SwapSettings) -> list[int]:
    """The layers that would be swapped, by number."""
    report = report_of(swapped(twin(lesson.teacher), chosen, chosen.left()))
    return [place for place, layer in enumerate(report.layers) if layer.swapped]


def _asked(job: Job[Any], data: str) -> dict[str, Any]:
    """All that a trial depends on, for JSON."""
    recipe = job.recipe
    told = {"settings": job.settings.as_dict(), "samples": recipe.batch_size, "seed": recipe.seed, "data": data}
    return json.loads(json.dumps({**told, "teacher": job.facts.get("teacher_sha256", "")}))


class _Kept:
    """What trials found, in a file that grows with each.

    Args:
        path: Of the file.
        asked: What they depend on.
    """

    def __init__(self, path: Path, asked: Mapping[str, Any]) -> None:
        self.path, self.asked, self.latest = path, asked, 0.0
        self.costs: dict[str, float] = {}
        if path.is_file():
            told = read_object(path.read_text(encoding="utf-8"), str(path))
            if told.get("asked") != asked:
                raise RunError(
                    f"{path}: layers were chosen there for another teacher, data or settings; use another --output, or "
                    "remove it to choose anew"
                )
            self.costs = {str(left): float(cost) for left, cost in dict(told.get("costs", {})).items()}

    def get(self, left: Sequence[str], cost: Callable[[Sequence[str]], float]) -> float:
        """What leaving these costs, found now if it is not known."""
        key = ",".join(left)
        if key not in self.costs:
            self.costs[key] = cost(left)
            keep(self.path, {"asked": self.asked, "costs": self.costs})
        self.latest = self.costs[key]
        return self.latest
