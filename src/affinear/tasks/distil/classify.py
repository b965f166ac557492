"""Distilling classifiers of images: classification's data and scores, the teacher's answers as the target."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from ...models.making import MOST_NUMBERS
from ...train.checkpoint import BEST
from ...train.page import Section
from ...train.settings import Check
from ...train.task import Job
from ..classify.samples import Batch
from ..classify.settings import ClassifySettings
from ..classify.task import Classify, ClassifyWork
from ..images.batching import as_tensor
from ..images.labelled.images import Images
from ..using import load_trained
from .lesson import Lesson, begin, let_learn, student_of
from .settings import SwapSettings, told_of
from .two_stages import TwoStages

LOOKED_AT = 64  # test images that the report measures layers on
# Rates belong to a batch of 512.
_BOTH: Mapping[str, Any] = {"batch_size": 512, "lr_batch": 512, "warmup_epochs": 0.2, "clip_grad": 1.0}
RECIPES: Mapping[str, Mapping[str, Any]] = {
    "layers": {**_BOTH, "stage": "layers", "epochs": 5, "lr": 1e-3, "weight_decay": 0.0, "augment": "simple"},
    "whole": {**_BOTH, "stage": "whole", "epochs": 25, "lr": 5e-4, "weight_decay": 0.05, "augment": "simple"},
}


@dataclass(frozen=True)
class DistilSettings(ClassifySettings, SwapSettings):
    """Replaced below, by what all its fields are."""

    bound: ClassVar[tuple[str, ...]] = (*SwapSettings.bound, *ClassifySettings.bound)
    checks: ClassVar[Mapping[str, Check]] = {**SwapSettings.checks, **ClassifySettings.checks}


DistilSettings.__doc__ = told_of(
    """How a linearized classifier is made and taught; images are shown as classification shows them.

    Attributes:
""",
    ClassifySettings,
)


class DistilWork(ClassifyWork):
    """Distilling at work on one job."""

    def __init__(self, job: Job[ClassifySettings], data: Images, device: torch.device) -> None:
        super().__init__(job, data, device)
        self.lesson = Lesson(_chosen(job), lambda: teacher_of(job), device)

    def loss(self, network: nn.Module, batch: Batch) -> Tensor:
        """How far the student is from its teacher."""
        images, targets = batch
        return self.lesson.loss(network, lambda model: model(images), targets)

    def report(self, network: nn.Module) -> list[Section]:
        """Each swapped layer's error before and after, and what classification shows."""
        count = min(LOOKED_AT, len(self.data.test))
        pixels = torch.stack([as_tensor(self.data.test[number][0], self.batching) for number in range(count)])
        images = pixels.to(self.device)
        fresh = Distil().network(self.job)
        layers = self.lesson.section(fresh, network, lambda model: model(images), f"{count} test images")
        return [layers, *super().report(network)]


class Distil(TwoStages, Classify):
    """Making a classifier linear: swapped layers learn from the network they were made of."""

    name: ClassVar[str] = "distil"
    about: ClassVar[str] = "a linearized classifier learns from its softmax teacher"
    settings = DistilSettings
    stages: ClassVar[Mapping[str, Mapping[str, Any]]] = RECIPES

    def settle(self, job: Job[ClassifySettings], data: Images) -> Job[ClassifySettings]:
        """What the teacher was trained with, and which teacher it is."""
        chosen = _chosen(job)
        file = _file(chosen.teacher)
        trained = load_trained(file, job.model, model_args=job.model_args)
        theirs = trained.job.settings
        shown = ("image_size", "mean", "std", "interpolation", "crop_pct")
        told = {name: getattr(theirs, name) for name in shown if getattr(chosen, name) is None}
        args = {**trained.job.model_args, **job.model_args}
        settled = super().settle(dataclasses.replace(job, settings=chosen.changed(**told), model_args=args), data)
        # Hooks hand the teacher's inputs to the student's layers, which a compiled graph has no place for.
        recipe = dataclasses.replace(settled.recipe, compile=False)
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        facts = {**settled.facts, "teacher_sha256": digest}
        return dataclasses.replace(settled, recipe=recipe, facts=facts)

    def network(self, job: Job[ClassifySettings], *, room: int = MOST_NUMBERS) -> nn.Module:
        """The teacher's network with its attention swapped; what its stage does not teach cannot learn."""
        network = student_of(super().network(job, room=room), _chosen(job))
        let_learn(network, _chosen(job))
        return network

    def begin(self, network: nn.Module, job: Job[ClassifySettings]) -> None:
        """The teacher's weights."""
        begin(network, teacher_of(job).state_dict(), str(_chosen(job).teacher))

    def work(self, job: Job[ClassifySettings], data: Images, device: torch.device) -> DistilWork:
        """A settled job at work."""
        return DistilWork(job, data, device)


def teacher_of(job: Job[ClassifySettings]) -> nn.Module:
    """The softmax network of a settled job."""
    return load_trained(_file(_chosen(job).teacher), job.model, model_args=job.model_args).network


def _chosen(job: Job[ClassifySettings]) -> DistilSettings:
    return cast(DistilSettings, job.settings)


def _file(teacher: str | None) -> Path:
    """The teacher's weights."""
    if not teacher:
        raise ValueError("teacher: expected the folder of a run or a file of weights, got none; --set teacher=PATH")
    path = Path(teacher)
    path = path / BEST if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"teacher: expected the folder of a run or a file of weights, got no such: {teacher}")
    return path


TASK = Distil()
