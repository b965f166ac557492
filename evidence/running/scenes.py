"""A segmenter that learns by a recipe from scenes that stay on the device, a step being one CUDA graph."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from timm.optim import param_groups_weight_decay
from torch import Tensor, nn

from affinear.bench.timing import synchronize
from affinear.tasks.segment.balance import class_weights
from affinear.tasks.segment.looking import labels_of
from affinear.tasks.segment.metric import confusion, score_of, showing
from affinear.tasks.segment.pairs import UNLABELLED, Scenes
from affinear.tasks.segment.samples import as_bytes
from affinear.tasks.segment.settings import Segmentation
from affinear.tasks.segment.work import Normalize, look_of, pixel_loss
from affinear.train import Recipe
from affinear.train.kit import make_schedule
from affinear.train.task import Job, Score
from running.captured import Captured
from running.crops import DRAWS, Kept, cut

PART = 50  # steps between looks at the clock
BUILDING, TIMED = 20, 80  # steps that build kernels and a graph, and steps that are timed


@dataclass(frozen=True)
class Pace:
    """How a training went.

    Attributes:
        steps: That were done.
        seconds: In all.
        images_per_second: After the first part of it.
        peak: Bytes, of the most memory.
        losses: A mean over each part.
        why: Why there was no CUDA graph; empty where there was one.
    """

    steps: int
    seconds: float
    images_per_second: float
    peak: int
    losses: list[float]
    why: str


class Step:
    """One step of a recipe, all of whose numbers lie on the device: which photos, how they are varied, which rate."""

    def __init__(self, network: nn.Module, job: Job[Segmentation], some: Kept, device: torch.device) -> None:
        self.network, self.some, self.device = network.train(), some, device
        self.settings, self.recipe = job.settings, job.recipe
        self.normalize = Normalize(job.settings, device)
        self.weights = self._class_weights(len(job.facts["classes"]))
        self.picked, self.draws = _chances(len(some.images), job.recipe, device)
        self.rates = torch.tensor(rates(job.recipe), device=device)
        self.at, self.loss = torch.zeros(1, dtype=torch.long, device=device), torch.zeros((), device=device)
        self.cuda = device.type == "cuda"
        self.rate: Any = torch.zeros((), device=device) if self.cuda else 0.0
        groups = param_groups_weight_decay(
            network, job.recipe.weight_decay, no_weight_decay_list=sorted(_undecayed(network))
        )
        given: dict[str, Any] = {"betas": job.recipe.betas, "eps": job.recipe.eps, "fused": self.cuda}
        self.optimizer = torch.optim.AdamW(groups, lr=self.rate, capturable=self.cuda, **given)
        self.every = [one for one in (*network.parameters(), *network.buffers()) if one.is_floating_point()]
        self.mean = [one.detach().clone() for one in self.every]

    def __call__(self) -> None:
        """Crops, forward, backward, AdamW, and the mean of weights."""
        picked, draws, rate = (one.index_select(0, self.at)[0] for one in (self.picked, self.draws, self.rates))
        images, labels = cut(self.some, picked, draws, self.settings)
        images = (255 * images - self.normalize.shift) / self.normalize.spread
        images = images.contiguous(memory_format=torch.channels_last)
        self._set(rate)
        with half(self.device):
            logits = self.network(images)
        losses = [pixel_loss(found, labels, self.weights) for found in logits]
        loss = losses[0] if len(losses) == 1 else losses[0] + self.settings.helper_weight * losses[1]
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if self.recipe.clip_grad is not None:
            nn.utils.clip_grad_norm_(self.network.parameters(), self.recipe.clip_grad, foreach=True)
        self.optimizer.step()
        with torch.no_grad():
            share = 1 - (self.recipe.ema_decay or 0.0)
            torch._foreach_lerp_(self.mean, self.every, share)  # pyright: ignore[reportPrivateUsage]
            self.loss += loss.detach()
            self.at += 1

    def slow_down(self, first: int, count: int, share: float) -> None:
        """Have some steps go at the rates that a cosine has at this share of the time, after the warm-up's."""
        wanted = self.recipe.min_lr + (self.recipe.lr - self.recipe.min_lr) * (1 + math.cos(math.pi * share)) / 2
        some = self.rates[first : first + count]
        torch.minimum(some, torch.full_like(some, wanted), out=some)

    def keep_mean(self) -> None:
        """Take the averaged weights from now on."""
        with torch.no_grad():
            torch._foreach_copy_(self.every, self.mean)  # pyright: ignore[reportPrivateUsage]

    def _set(self, rate: Tensor) -> None:
        if self.cuda:
            self.rate.copy_(rate)
            return
        for group in self.optimizer.param_groups:
            group["lr"] = rate.item()

    def _class_weights(self, classes: int) -> Tensor | None:
        labels = self.some.labels
        counts = torch.bincount(labels[labels != UNLABELLED].long(), minlength=classes).cpu()
        return class_weights(counts, self.settings.balance).to(self.device) if self.settings.balance else None


def learn(step: Step, told: Callable[[str], None], until: float = math.inf, slowing: bool = False) -> Pace:
    """Do all steps of the recipe, and take the averaged weights.

    Args:
        step: Of a network.
        told: Is given a line now and then.
        until: When to end (`time.time`), whatever was done by then.
        slowing: Whether the rate goes down with the time, and not with the steps.
    """
    device, (steps, batch) = step.device, step.draws.shape[:2]
    if step.cuda:
        torch.cuda.reset_peak_memory_stats()
    call, losses, began, number, warm = Captured(step, device), list[float](), time.time(), 0, (0, 0.0)
    while number < steps and time.time() < until:
        if slowing and number % PART == 0:
            step.slow_down(number, PART, (time.time() - began) / max(until - began, 1e-9))
        call()
        number += 1
        if number % PART == 0:
            losses.append(step.loss.item() / PART)
            step.loss.zero_()
            warm = warm if warm[0] else (number, time.time())
            told(f"step {number}, {time.time() - began:.1f} s, loss {losses[-1]:.3f} {call.why}")
    synchronize(device)
    ended = time.time()
    step.keep_mean()
    done, since = (number - warm[0], warm[1]) if number > warm[0] > 0 else (number, began)
    rate, peak = batch * done / (ended - since), torch.cuda.max_memory_allocated() if step.cuda else 0
    return Pace(number, ended - began, rate, peak, losses, call.why)


def step_seconds_of(network: nn.Module, job: Job[Segmentation], some: Kept, device: torch.device) -> float:
    """Seconds of a step beside whatever runs at the same time; the network is of no use afterwards."""
    brief = dataclasses.replace(job, recipe=job.recipe.changed(steps=BUILDING + TIMED))
    call = Captured(Step(network, brief, some, device), device)
    for _ in range(BUILDING):
        call()
    synchronize(device)
    began = time.time()
    for _ in range(TIMED):
        call()
    synchronize(device)
    return (time.time() - began) / TIMED


@torch.no_grad()
def judge(
    network: nn.Module, job: Job[Segmentation], data: Scenes, device: torch.device, at_once: int = 16
) -> tuple[Score, list[Tensor]]:
    """The score on whole photos of the half to be judged by, and the classes found in each (H, W), uint8."""
    normalize, look, classes = Normalize(job.settings, device), look_of(job.settings), len(data.classes)
    counts = torch.zeros(classes, classes, dtype=torch.int64, device=device)
    shown, maps = torch.zeros(classes, dtype=torch.int64, device=device), list[Tensor]()
    network.eval()
    for first in range(0, len(data.test), at_once):
        pairs = [data.test[i] for i in range(first, min(first + at_once, len(data.test)))]
        photos = [as_bytes(photo, job.settings.short_side, job.settings.long_side) for photo, _ in pairs]
        images = normalize(torch.stack(photos).to(device)).contiguous(memory_format=torch.channels_last)
        truth = torch.stack([torch.from_numpy(labels) for _, labels in pairs]).to(device)
        with half(device):
            found = labels_of(network, images, look, (truth.shape[1], truth.shape[2]))
        counts += confusion(truth, found, classes)
        shown += showing(truth, classes)
        maps += found.to(torch.uint8).cpu().unbind()
    return score_of(counts.cpu(), shown.cpu(), len(data.test), data.classes, ()), maps


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


def _chances(photos: int, recipe: Recipe, device: torch.device) -> tuple[Tensor, Tensor]:
    """Photos (steps, batch), every one as often as any other, and uniform numbers (steps, batch, DRAWS)."""
    assert recipe.steps is not None
    random = torch.Generator().manual_seed(recipe.seed)
    wanted = recipe.steps * recipe.batch_size
    order = torch.cat([torch.randperm(photos, generator=random) for _ in range(-(-wanted // photos))])[:wanted]
    draws = torch.rand(recipe.steps, recipe.batch_size, DRAWS, generator=random)
    return order.view(recipe.steps, recipe.batch_size).to(device), draws.to(device)


def _undecayed(network: nn.Module) -> set[str]:
    told: Any = getattr(network, "no_weight_decay", set[str])
    return told()
