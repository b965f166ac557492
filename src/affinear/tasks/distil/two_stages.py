"""What all tasks that distil have in common: two stages as recipes, and a rate for what the swap added."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, cast

from torch import Tensor, nn

from ...train.recipe import Recipe
from ...train.task import Job, Setup, Task, unknown_recipe
from . import lesson

# Of both stages of a network of transformers', whatever it is for.
OF_TRANSFORMERS: Mapping[str, Any] = {
    "weight_decay": 0.0,
    "betas": (0.9, 0.95),
    "sched": "cosine",
    "warmup_lr": 0.0,
    "clip_grad": 1.0,
    "compile": False,
    "channels_last": False,
    "gain": True,
    "convolution": 5,
}


class TwoStages:
    """The part of a task that is the same whatever is distilled; it stands before the kind of task that it is put into.

    Attributes:
        stages: Fields of recipe and settings, of "layers" and "whole".
    """

    stages: ClassVar[Mapping[str, Mapping[str, Any]]]

    @property
    def recipes(self) -> Mapping[str, Setup]:
        """The two stages."""
        task = cast("Task[Any, Any]", self)
        plain = Setup(task, Recipe(), task.settings())
        return {name: plain.changed(**fields) for name, fields in self.stages.items()}

    def preset(self, model: str, name: str | None) -> Setup:
        """That of the second stage unless the first is named."""
        known = self.recipes
        chosen = name or "whole"
        if chosen not in known:
            raise unknown_recipe(chosen, known)
        return known[chosen]

    def start(self, network: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
        """A teacher's weights, or those of a student."""
        lesson.begin(network, tensors, source)

    def rate_of(self, name: str, job: Job[Any]) -> float:
        """Its own for what the swap added."""
        return lesson.rate_of(name, job.settings)

    def variants(self, model: str) -> Mapping[str, Mapping[str, Any]]:
        """None: what is compared is a setting here."""
        return {"own": {}}

    def variant(self, model: str, name: str) -> Mapping[str, Any]:
        """The network as it is."""
        if name != "own":
            raise ValueError(f"variant: expected 'own', as the mechanism is a setting here, got {name!r}")
        return {}
