"""What distilling is, whatever is distilled: how a student is made of a network, and what it learns from its teacher.

Another kind of network needs a task beside this file: it inherits from `TwoStages`, and from another task whose data
and scores it has; settings that inherit from `SwapSettings` too; and a `Lesson` in its work. It says how a teacher is
read, and how a network is called on a batch; `classify.py` is the shortest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ...linearizing.distil import layer_errors, network_loss, swapped_layers
from ...linearizing.low_rank import DOWN, UP, add_low_rank
from ...linearizing.swap import apply, find
from ...train import page
from ...train.page import Section
from ...train.weights import fill
from .settings import ATTENTION, SwapSettings

HIGHEST_RANK = 4096
Call = Callable[[nn.Module], Any]
M = TypeVar("M", bound=nn.Module)


def student_of(network: nn.Module, chosen: SwapSettings) -> nn.Module:
    """A softmax network with its attention swapped, in place, and low-rank updates where they are asked for."""
    student = swapped(network, chosen, chosen.left())
    if chosen.low_rank > HIGHEST_RANK:
        raise ValueError(f"low_rank: expected at most {HIGHEST_RANK}, got {chosen.low_rank}")
    if chosen.low_rank:
        add_low_rank(student, chosen.low_rank, _places(student, chosen.low_rank_on))
    return student


def swapped(network: M, chosen: SwapSettings, leave: Sequence[int | str]) -> M:
    """A softmax network with its attention swapped, in place, and these layers left beside those of `keep_every`."""
    every = chosen.keep_every
    places = range(len(find(network)))
    layers = "all" if not every else [place for place in places if place % every != every - 1]
    return apply(network, chosen.choices(), layers, leave)[0]


def _places(student: nn.Module, where: str) -> list[str]:
    if where != ATTENTION:
        return [part.strip() for part in where.split(",")]
    return [f"{name}.*" for name in swapped_layers(student)]


def let_learn(student: nn.Module, chosen: SwapSettings) -> None:
    """Freeze what a stage does not teach: in "layers" all but the swapped ones; with low-rank updates all but these."""
    if chosen.stage == "whole" and not chosen.low_rank:
        return
    student.requires_grad_(False)
    for layer in swapped_layers(student).values():
        own = layer.get_submodule("linearized") if chosen.low_rank else layer
        own.requires_grad_(True)
    for name, parameter in student.named_parameters():
        if name.endswith((DOWN, UP)) and (chosen.stage == "whole" or _is_in_swapped(student, name)):
            parameter.requires_grad_(True)
    if not any(parameter.requires_grad for parameter in student.parameters()):
        raise ValueError("low_rank_on: expected linear layers that this stage teaches, got none of them")


def _is_in_swapped(student: nn.Module, name: str) -> bool:
    return any(name.startswith(f"{layer}.") for layer in swapped_layers(student))


def begin(student: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
    """Load a teacher's weights into a student, whose own additions begin as nothing; or all of a student's.

    Raises:
        ValueError: If they do not fit.
    """
    own = student.state_dict()
    added = {n: tensor for n, tensor in own.items() if n not in tensors and (".linearized." in n or _is_update(n))}
    fill(student, {**tensors, **added}, source)


def rate_of(name: str, chosen: SwapSettings) -> float:
    """What the learning rate of a parameter is multiplied with: what the swap added has a rate of its own."""
    return chosen.added_rate if ".linearized." in name else 1.0


def _is_update(name: str) -> bool:
    return name.endswith((DOWN, UP))


class Lesson:
    """What a student learns from its teacher.

    Args:
        chosen: Stage and weights.
        read: Reads the teacher; done when the first loss is asked for.
        device: Where batches are.
    """

    def __init__(self, chosen: SwapSettings, read: Callable[[], nn.Module], device: torch.device) -> None:
        self.chosen, self._read, self.device = chosen, read, device
        self._teacher: nn.Module | None = None

    @property
    def teacher(self) -> nn.Module:
        """The softmax network, in evaluation mode, where batches are."""
        if self._teacher is None:
            self._teacher = self._read().to(self.device).eval().requires_grad_(False)
        return self._teacher

    def loss(self, student: nn.Module, call: Call, labels: Tensor | None = None) -> Tensor:
        """How far the student is from its teacher on a batch.

        Args:
            student: As the engine calls it, wrapped or not.
            call: Calls a network on the batch and gives its logits.
            labels: Classes, where there are any.
        """
        if self.chosen.stage == "layers":
            return self.layers(student, call)
        return network_loss(self.teacher, student, call, weights=self.chosen.weights(), labels=labels)

    def layers(self, student: nn.Module, call: Call) -> Tensor:
        """The mean of the swapped layers' relative errors."""
        return torch.stack(list(layer_errors(self.teacher, student, call).values())).mean()

    @torch.no_grad()
    def section(self, fresh: nn.Module, student: nn.Module, call: Call, about: str) -> Section:
        """For a report: each swapped layer's error before and after.

        Args:
            fresh: Another student, with any weights; it gets the teacher's.
            student: The one that learned.
            call: Calls a network on test samples.
            about: What these are, in words.
        """
        fresh = fresh.to(self.device).eval()
        begin(fresh, self.teacher.state_dict(), "teacher")
        dtype = next(self.teacher.parameters()).dtype
        with torch.autocast(self.device.type, dtype, enabled=dtype in (torch.bfloat16, torch.float16)):
            before, after = (layer_errors(self.teacher, network, call) for network in (fresh, student))
        rows = [[name, f"{float(before[name]):.4f}", f"{float(after[name]):.4f}"] for name in after]
        means = [float(torch.stack(list(errors.values())).mean()) for errors in (before, after)]
        rows.append(["all, on average", *(f"{mean:.4f}" for mean in means)])
        note = (
            "Mean square error over the variance of the teacher's answer, on the teacher's own inputs, of "
            f"{about}: 0 is the same, 1 is no better than the mean."
        )
        return Section("Layer by layer", page.table(["layer", "swapped", "distilled"], rows), note)
