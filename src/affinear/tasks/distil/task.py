"""Distilling as a task of the engine: classification's data and scores, the teacher's answers as the target."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from ...linearizing.distil import Weights, layer_errors, network_loss, swapped_layers
from ...linearizing.swap import apply, find
from ...models.making import MOST_NUMBERS
from ...train import page
from ...train.checkpoint import BEST
from ...train.page import Section
from ...train.recipe import Recipe
from ...train.task import Job, Setup, unknown_recipe
from ...train.weights import fill
from ..classify.samples import Batch
from ..classify.settings import ClassifySettings
from ..classify.task import Classify, ClassifyWork
from ..images.batching import as_tensor
from ..images.labelled.images import Images
from ..using import load_trained
from .settings import DistilSettings

LOOKED_AT = 64  # test images that the report measures layers on
# Rates belong to a batch of 512.
_BOTH: Mapping[str, Any] = {"batch_size": 512, "lr_batch": 512, "warmup_epochs": 0.2, "clip_grad": 1.0}
RECIPES: Mapping[str, Mapping[str, Any]] = {
    "layers": {**_BOTH, "stage": "layers", "epochs": 5, "lr": 1e-3, "weight_decay": 0.0, "augment": "simple"},
    "whole": {**_BOTH, "stage": "whole", "epochs": 25, "lr": 5e-4, "weight_decay": 0.05, "augment": "simple"},
}


class DistilWork(ClassifyWork):
    """Distilling at work on one job. The teacher is read when the first loss is asked for."""

    def __init__(self, job: Job[ClassifySettings], data: Images, device: torch.device) -> None:
        super().__init__(job, data, device)
        self.chosen = cast(DistilSettings, job.settings)
        self._teacher: nn.Module | None = None

    @property
    def teacher(self) -> nn.Module:
        """The softmax network, in evaluation mode, where batches are."""
        if self._teacher is None:
            found = load_trained(_file(self.chosen.teacher), self.job.model, model_args=self.job.model_args)
            self._teacher = found.network.to(self.device).eval().requires_grad_(False)
        return self._teacher

    def loss(self, network: nn.Module, batch: Batch) -> Tensor:
        """How far the student is from its teacher."""
        images, targets = batch

        def call(model: nn.Module) -> Tensor:
            return model(images)

        if self.chosen.stage == "layers":
            errors = layer_errors(self.teacher, network, call)
            return torch.stack(list(errors.values())).mean()
        chosen = self.chosen
        weights = Weights(chosen.logit_weight, chosen.hidden_weight, chosen.label_weight, chosen.temperature)
        return network_loss(self.teacher, network, call, weights=weights, labels=targets)

    def report(self, network: nn.Module) -> list[Section]:
        """Each swapped layer's error before and after, and what classification shows."""
        return [self._layers(network), *super().report(network)]

    def _layers(self, network: nn.Module) -> Section:
        count = min(LOOKED_AT, len(self.data.test))
        pixels = torch.stack([as_tensor(self.data.test[number][0], self.batching) for number in range(count)])
        images = pixels.to(self.device)
        fresh = student_of(self.job).to(self.device).eval()
        begin(fresh, self.teacher.state_dict(), "teacher")
        with torch.no_grad():
            before = layer_errors(self.teacher, fresh, lambda model: model(images))
            after = layer_errors(self.teacher, network, lambda model: model(images))
        rows = [[name, f"{float(before[name]):.4f}", f"{float(after[name]):.4f}"] for name in after]
        note = (
            "Mean square error over the variance of the teacher's answer, on the teacher's own inputs, of "
            f"{count} test images: 0 is the same, 1 is no better than the mean."
        )
        return Section("Layer by layer", page.table(["layer", "swapped", "distilled"], rows), note)


class Distil(Classify):
    """Making a classifier linear: swapped layers learn from the network they were made of."""

    name: ClassVar[str] = "distil"
    about: ClassVar[str] = "a linearized classifier learns from its softmax teacher"
    settings = DistilSettings

    @property
    def recipes(self) -> Mapping[str, Setup]:
        """The two stages."""
        plain = Setup(self, Recipe(), DistilSettings())
        return {name: plain.changed(**fields) for name, fields in RECIPES.items()}

    def preset(self, model: str, name: str | None) -> Setup:
        """That of the second stage unless the first is named."""
        if (name or "whole") not in RECIPES:
            raise unknown_recipe(name or "", RECIPES)
        return self.recipes[name or "whole"]

    def settle(self, job: Job[ClassifySettings], data: Images) -> Job[ClassifySettings]:
        """What the teacher was trained with, and which teacher it is."""
        chosen = cast(DistilSettings, job.settings)
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
        """The teacher's network with its attention swapped; in stage "layers" nothing else can learn."""
        network = student_of(job, room=room)
        if cast(DistilSettings, job.settings).stage == "layers":
            network.requires_grad_(False)
            for layer in swapped_layers(network).values():
                layer.requires_grad_(True)
        return network

    def start(self, network: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
        """A teacher's weights, or those of a student."""
        begin(network, tensors, source)

    def work(self, job: Job[ClassifySettings], data: Images, device: torch.device) -> DistilWork:
        """A settled job at work."""
        return DistilWork(job, data, device)

    def variants(self, model: str) -> Mapping[str, Mapping[str, Any]]:
        """None: what is compared is a setting here."""
        return {"own": {}}


def student_of(job: Job[ClassifySettings], *, room: int = MOST_NUMBERS) -> nn.Module:
    """The network of a settled job, linearized, with fresh weights."""
    chosen = cast(DistilSettings, job.settings)
    network = Classify().network(job, room=room)
    every = chosen.keep_every
    places = range(len(find(network)))
    layers = "all" if not every else [place for place in places if place % every != every - 1]
    return apply(network, chosen.choices(), layers)[0]


def begin(student: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
    """Load a teacher's weights into a student, whose own additions begin as nothing; or all of a student's.

    Raises:
        ValueError: If they do not fit.
    """
    own = student.state_dict()
    added = {name: tensor for name, tensor in own.items() if ".linearized." in name and name not in tensors}
    fill(student, {**tensors, **added}, source)


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
