"""A network that learns by a recipe, a step being one CUDA graph all of whose numbers lie on the device."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from timm.optim import param_groups_weight_decay
from torch import Tensor, nn

from affinear.bench.timing import synchronize
from affinear.train import Recipe
from affinear.train.kit import make_schedule
from running.captured import Captured

PART = 50  # steps between looks at the clock
BUILDING, TIMED = 20, 80  # steps that build kernels and a graph, and steps that are timed


@dataclass(frozen=True)
class Pace:
    """How a training went.

    Attributes:
        steps: That were done, by earlier calls too.
        seconds: In all.
        step_seconds: Of a step, after the first part of them.
        peak: Bytes, of the most memory.
        losses: A mean over each part.
        why: Why there was no CUDA graph; empty where there was one.
    """

    steps: int
    seconds: float
    step_seconds: float
    peak: int
    losses: list[float]
    why: str


class Learner:
    """One step of a recipe: its loss, backward, AdamW, and the mean of weights.

    Attributes:
        every: What the mean is of: weights and what else of the network is no whole number.
        mean: Of these; empty where the recipe has none.
        rates: The learning rate of every step.

    Args:
        network: On the device, put into training mode.
        recipe: With a number of steps, for AdamW.
        loss: Of a step, by its number (1,), int64, on the device. What else it needs lies there as well.
        device: Where.
    """

    def __init__(self, network: nn.Module, recipe: Recipe, loss: Callable[[Tensor], Tensor], device: torch.device):
        if recipe.steps is None or recipe.opt != "adamw" or recipe.accumulate != 1:
            asked = f"steps={recipe.steps}, opt={recipe.opt}, accumulate={recipe.accumulate}"
            raise ValueError(f"recipe: expected steps of AdamW, each a whole batch, got {asked}")
        self.network, self.recipe, self.steps, self.device = network.train(), recipe, recipe.steps, device
        self.loss_of = loss
        self.planned = rates(recipe)
        self.rates = torch.tensor(self.planned, dtype=torch.float64, device=device)
        self.at, self.loss = torch.zeros(1, dtype=torch.long, device=device), torch.zeros((), device=device)
        self.cuda = device.type == "cuda"
        self.rate: Any = torch.zeros((), device=device) if self.cuda else 0.0
        groups = param_groups_weight_decay(
            network, recipe.weight_decay, no_weight_decay_list=sorted(_undecayed(network))
        )
        given: dict[str, Any] = {"betas": recipe.betas, "eps": recipe.eps, "fused": self.cuda}
        self.optimizer = torch.optim.AdamW(groups, lr=self.rate, capturable=self.cuda, **given)
        self.every = [one for one in (*network.parameters(), *network.buffers()) if one.is_floating_point()]
        self.mean = [one.detach().clone() for one in self.every if recipe.ema_decay is not None]

    def __call__(self) -> None:
        """Forward, backward, AdamW, and the mean of weights."""
        self._set(self.rates.index_select(0, self.at)[0])
        loss = self.loss_of(self.at)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if self.recipe.clip_grad is not None:
            nn.utils.clip_grad_norm_(self.network.parameters(), self.recipe.clip_grad, foreach=True)
        self.optimizer.step()
        with torch.no_grad():
            if self.mean:
                share = 1 - (self.recipe.ema_decay or 0.0)
                torch._foreach_lerp_(self.mean, self.every, share)  # pyright: ignore[reportPrivateUsage]
            self.loss += loss.detach()
            self.at += 1

    def follow(self, first: int, count: int, share: float) -> None:
        """Have some steps go at the rate that the recipe has after this share of its steps, be it of its warm-up."""
        self.rates[first : first + count] = self.planned[min(int(share * self.steps), self.steps - 1)]

    def keep_mean(self) -> None:
        """Take the averaged weights from now on, where there are some."""
        with torch.no_grad():
            if self.mean:
                torch._foreach_copy_(self.every, self.mean)  # pyright: ignore[reportPrivateUsage]

    def _set(self, rate: Tensor) -> None:
        if self.cuda:
            self.rate.copy_(rate)
            return
        for group in self.optimizer.param_groups:
            group["lr"] = rate.item()


def learn(
    learner: Learner,
    told: Callable[[str], None],
    until: float = math.inf,
    by_time: bool = False,
    part: int = PART,
    last: int | None = None,
) -> Pace:
    """Do all steps of the recipe that are not done, and take the averaged weights.

    Args:
        learner: Of a network.
        told: Is given a line now and then.
        until: When to end (`time.time`), whatever was done by then.
        by_time: Whether the rate goes with the share of the time that is over, and not with the steps.
        part: Steps between two looks at the clock and the loss.
        last: How many are done in the end, if another call goes on with those that are left, of another shape.

    Raises:
        RuntimeError: If the loss is no number.
    """
    device = learner.device
    if learner.cuda:
        torch.cuda.reset_peak_memory_stats()
    call, losses, began, warm = Captured(learner, device), list[float](), time.time(), (0, 0.0)
    number, end = int(learner.at.item()), learner.steps if last is None else last
    looked = first = number
    while number < end and time.time() < until:
        if by_time and number % part == 0:
            learner.follow(number, part, (time.time() - began) / max(until - began, 1e-9))
        call()
        number += 1
        if number % part == 0 or number == end:
            losses.append(learner.loss.item() / (number - looked))
            learner.loss.zero_()
            looked = number
            if not math.isfinite(losses[-1]):
                raise RuntimeError(f"the loss is {losses[-1]} after {number} steps")
            warm = warm if warm[0] else (number, time.time())
            told(f"step {number}, {time.time() - began:.1f} s, loss {losses[-1]:.3f} {call.why}")
    synchronize(device)
    ended = time.time()
    if end == learner.steps:
        learner.keep_mean()
    done, since = (number - warm[0], warm[1]) if number > warm[0] > 0 else (max(number - first, 1), began)
    peak = torch.cuda.max_memory_allocated() if learner.cuda else 0
    return Pace(number, ended - began, (ended - since) / done, peak, losses, call.why)


def step_seconds_of(learner: Learner, building: int = BUILDING, timed: int = TIMED) -> float:
    """Seconds of a step beside whatever runs at the same time; the network is of no use afterwards."""
    call = Captured(learner, learner.device)
    for _ in range(building):
        call()
    synchronize(learner.device)
    began = time.time()
    for _ in range(timed):
        call()
    synchronize(learner.device)
    return (time.time() - began) / timed


def half(device: torch.device) -> torch.autocast:
    """bfloat16 on a GPU; graphs do not get along with its cache of weights."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False)


def rates(recipe: Recipe) -> list[float]:
    """The learning rate of every step."""
    assert recipe.steps is not None
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=recipe.lr)
    schedule, found = make_schedule(optimizer, recipe, 1), list[float]()
    for step in range(recipe.steps):
        schedule.step_update(step)
        found.append(optimizer.param_groups[0]["lr"])
    return found


def _undecayed(network: nn.Module) -> set[str]:
    told: Any = getattr(network, "no_weight_decay", set[str])
    return told()
