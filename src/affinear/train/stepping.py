"""One optimizer step, in parts, with everything random in it seeded, and watched for numbers that are none."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from .blame import gradient_at_fault, layer_at_fault, weights_at_fault
from .kit import Kit
from .seeding import seed_step
from .task import Batch

SKIPS = 50  # of float16's scaler in a row; it starts high and halves, which takes a dozen


class Fault(Exception):
    """A step met a number that is not finite.

    Attributes:
        where: What held it first.
        part: Which part of the step.
        batch: As network and loss saw it.
    """

    def __init__(self, where: str, part: int, batch: Batch) -> None:
        super().__init__(where)
        self.where, self.part, self.batch = where, part, batch


class Glance:
    """Reads a loss off a GPU without waiting for more than the loss: backward goes on meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._held = torch.zeros((), pin_memory=self._cuda)
        self._event = torch.cuda.Event() if self._cuda else None

    def take(self, loss: Tensor) -> None:
        """Ask for a value, right after it was computed."""
        self._held.copy_(loss.detach(), non_blocking=self._cuda)
        if self._event is not None:
            self._event.record()

    def value(self) -> float:
        """The value that was asked for."""
        if self._event is not None:
            self._event.synchronize()
        return self._held.item()


class Stepper:
    """Does optimizer steps.

    Args:
        kit: What to train with.
    """

    def __init__(self, kit: Kit) -> None:
        self._kit = kit
        self._glance = Glance(kit.accelerator.device)
        self._skips = 0

    def step(self, batches: Iterator[Any], step: int) -> float:
        """Do one step, the `step`-th from 0, on the next batches, and return its loss.

        Raises:
            Fault: If the loss, a gradient that is about to be clipped, or too many steps in float16, are not finite.
                The weights are then those of before.
        """
        kit, total = self._kit, 0.0
        for part in range(kit.recipe.accumulate):
            batch = self._batch(next(batches), step, part)
            with kit.accelerator.accumulate(kit.called):
                loss = kit.work.loss(kit.called, batch)
                self._glance.take(loss)
                kit.accelerator.backward(loss)
                value = self._glance.value()
                if not math.isfinite(value):
                    raise Fault(self._where(batch, step, part), part, batch)
                self._downhill(part, batch)
            total += value
        kit.schedule.step_update(step + 1)
        if kit.average is not None:
            kit.average.update(kit.network)
        return total / kit.recipe.accumulate

    def _batch(self, batch: Batch, step: int, part: int) -> Batch:
        kit = self._kit
        seed_step(kit.recipe.seed, step, part, kit.context.index, kit.accelerator.device)
        if kit.recipe.channels_last:
            batch = tree_map(_channels_last, batch)
        return kit.work.vary(batch)

    def _downhill(self, part: int, batch: Batch) -> None:
        kit = self._kit
        if kit.accelerator.sync_gradients and kit.recipe.clip_grad is not None:
            norm = kit.accelerator.clip_grad_norm_(kit.called.parameters(), kit.recipe.clip_grad)
            # On a GPU this would wait for the whole of backward; there the next loss, or the next save, finds it.
            if norm is not None and norm.device.type == "cpu" and not math.isfinite(norm.item()):
                raise Fault(self._which_gradient(batch), part, batch)
        kit.optimizer.step()
        if kit.accelerator.sync_gradients and kit.recipe.precision == "fp16":
            self._skips = self._skips + 1 if kit.optimizer.step_was_skipped else 0
            if self._skips >= SKIPS:
                raise Fault(self._which_gradient(batch), part, batch)
        kit.optimizer.zero_grad()

    def _which_gradient(self, batch: Batch) -> str:
        """The bad gradient, from another backward pass: clipping has spread it over all of them."""
        kit = self._kit
        kit.network.zero_grad()
        with kit.accelerator.autocast():
            loss = kit.work.loss(kit.network, batch)
        loss.backward()
        return gradient_at_fault(kit.network) or "norm of the gradient"

    def _where(self, batch: Batch, step: int, part: int) -> str:
        kit = self._kit
        found = weights_at_fault(kit.network)
        if found is not None:
            return found
        seed_step(kit.recipe.seed, step, part, kit.context.index, kit.accelerator.device)
        with kit.accelerator.autocast():
            return layer_at_fault(kit.network, batch, lambda: kit.work.loss(kit.network, batch))


def _channels_last(part: Any) -> Any:
    """Four dimensions are images: (images, channels, height, width)."""
    if isinstance(part, Tensor) and part.ndim == 4:
        return part.contiguous(memory_format=torch.channels_last)
    return part
