"""A teacher's linear copy, taught in stages within a given time: rows are kept as they come, stages go on.

What `linearize_dino.py`, `linearize_whisper.py` and `linearize_language.py` have in common.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from affinear.bench.timing import synchronize
from affinear.linearizing.distil import layer_errors, swapped_layers
from running.files import keep
from running.machine import machine

MECHANISMS = ("mala", "nala", "inline", "linear")
SAVE_EVERY = 120.0  # seconds between two savings
WARM = 0.1  # share of a stage in which the rate rises
LOOKS = 20  # how often a stage tells how it goes


class Rows:
    """What came out so far, in a file that is written anew with every row.

    Args:
        path: Of the JSON file.
        settings: What all rows were made with. A file of others is refused.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.told: dict[str, Any] = {"settings": dict(settings), "machine": machine(), "rows": []}
        if path.is_file():
            self.told = json.loads(path.read_text())
            if self.told["settings"] != json.loads(json.dumps(settings)):
                raise ValueError(f"{path}: expected rows of {dict(settings)}, got some of {self.told['settings']}")

    @property
    def rows(self) -> list[dict[str, Any]]:
        """All rows."""
        return self.told["rows"]

    def find(self, **key: Any) -> dict[str, Any] | None:
        """The row with these entries, if it is there."""
        same = (row for row in self.rows if all(row.get(name) == value for name, value in key.items()))
        return next(same, None)

    def add(self, **row: Any) -> None:
        """Keep a row, and say it."""
        self.rows.append(row)
        keep(self.path, self.told)
        print(json.dumps({name: value for name, value in row.items() if name != "losses"}), flush=True)


class Clock:
    """When to stop.

    Args:
        minutes: From now on.
    """

    def __init__(self, minutes: float) -> None:
        self.began = time.monotonic()
        self.ends = self.began + 60 * minutes

    @property
    def left(self) -> float:
        """Seconds until the time is up."""
        return self.ends - time.monotonic()

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        return self.left < 0


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
        name: "layers" or "whole".
        steps: How many; nobody counts them where there are seconds.
        lr: Peak of the learning rate, of the teacher's weights.
        new_lr: The same of what linearizing added.
        seconds: How long, where the pace is not known: as many steps as fit, and the rate goes by the time.
    """

    name: str
    steps: int
    lr: float
    new_lr: float
    seconds: float | None = None

    def done(self, step: int, took: float) -> float:
        """What share of it is done after so many steps and seconds; one or more: all."""
        return step / self.steps if self.seconds is None else took / self.seconds

    def rate(self, done: float) -> float:
        """Share of the peak where so much is done: it rises in a line and falls as a cosine to a hundredth."""
        if done < WARM:
            return max(done, 1e-3) / WARM
        return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, (done - WARM) / (1 - WARM))))


def taught(
    student: nn.Module,
    stage: Stage,
    learned: Sequence[str],
    loss_of: Callable[[int], Tensor],
    kept: Path,
    clock: Clock,
    look: Callable[[], float] | None = None,
) -> dict[str, Any] | None:
    """Teach a student through a stage, from where it was left; None if the time is over before its end.

    Args:
        student: What learns, in place. Afterwards it has the stage's weights, whether they were made now or before.
        stage: How long and how fast.
        learned: Names of the parameters that learn; all others stay.
        loss_of: The loss of a step, which is to depend on its number alone.
        kept: Where the stage is kept.
        clock: When to stop.
        look: What else is to be told of the student on the way, a number.

    Returns:
        Steps, seconds, and some losses; with `look`, what it found after so many steps.
    """
    optimizer = _optimizer(student, stage, learned)
    step, took, losses, seen = 0, 0.0, list[float](), list[tuple[int, float]]()
    if kept.is_file():
        state = torch.load(kept, map_location=next(student.parameters()).device, weights_only=True)
        student.load_state_dict(state["student"])
        step, took, losses, seen = state["step"], state["took"], state["losses"], state["seen"]
        if "optimizer" in state:
            optimizer.load_state_dict(state["optimizer"])

    began = saved = time.monotonic()
    before = took

    def save(done: float) -> None:
        state = {"student": student.state_dict(), "step": step, "took": took, "losses": losses, "seen": seen}
        if done < 1:
            state["optimizer"] = optimizer.state_dict()
        kept.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, kept.with_suffix(".part"))
        kept.with_suffix(".part").replace(kept)

    while (done := stage.done(step, took)) < 1:
        if clock.over:
            save(done)
            return None
        rate = stage.rate(stage.done(step + 1, took) if stage.seconds is None else done)
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * rate
        optimizer.zero_grad()
        loss = loss_of(step)
        loss.backward()
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
        optimizer.step()
        step += 1
        took = before + time.monotonic() - began
        if step == 1 or int(LOOKS * stage.done(step, took)) > int(LOOKS * done):
            losses.append(round(loss.item(), 4))
            said = f"  {kept.stem}: step {step}, {stage.done(step, took):.0%}, loss {losses[-1]}, {took:.0f} s"
            if look is not None:
                seen.append((step, round(look(), 4)))
                said += f", {seen[-1][1]}"
            print(said, flush=True)
        if time.monotonic() - saved > SAVE_EVERY:
            save(stage.done(step, took))
            saved = time.monotonic()
    save(1.0)
    told = {"steps": step, "seconds": round(took, 1), "losses": losses}
    return told if look is None else {**told, "seen": seen}


def _optimizer(student: nn.Module, stage: Stage, learned: Sequence[str]) -> torch.optim.AdamW:
    """Two rates: what the teacher had, and what linearizing added."""
    groups: dict[bool, list[nn.Parameter]] = {False: [], True: []}
    chosen = set(learned)
    for name, parameter in student.named_parameters():
        parameter.requires_grad_(name in chosen)
        if name in chosen:
            groups[".linearized." in name].append(parameter)
    peaks = {False: stage.lr, True: stage.new_lr}
    made = [{"params": found, "peak": peaks[new], "lr": peaks[new]} for new, found in groups.items() if found]
    return torch.optim.AdamW(made, weight_decay=0.0, betas=(0.9, 0.98))


def layers_of(student: nn.Module) -> list[str]:
    """Names of the parameters of the layers that are linear: what the first stage teaches."""
    prefixes = tuple(f"{name}." for name in swapped_layers(student))
    return [name for name, _ in student.named_parameters() if name.startswith(prefixes)]


def layer_loss(teacher: nn.Module, student: nn.Module, call: Callable[[nn.Module], Any]) -> Tensor:
    """The first stage's loss: the mean over layers."""
    return torch.stack(list(layer_errors(teacher, student, call).values())).mean()


@torch.no_grad()
def layers_apart(teacher: nn.Module, student: nn.Module, call: Callable[[nn.Module], Any]) -> list[float]:
    """The relative error of every layer, in order."""
    return [round(float(error), 4) for error in layer_errors(teacher, student, call).values()]


def stages_of(
    steps: Sequence[int], rates: Sequence[float], new_rates: Sequence[float], seconds: float | None = None
) -> tuple[Stage, Stage]:
    """Layers first, then the whole network: steps, rate and rate of what the swap added, of each.

    With seconds both share them as they would have shared the steps.
    """
    first, second = (None if seconds is None else seconds * one / sum(steps) for one in steps)
    layers = Stage("layers", steps[0], rates[0], new_rates[0], first)
    return layers, Stage("whole", steps[1], rates[1], new_rates[1], second)


def probed(title: str, stage: Stage, loss: Callable[[int], Tensor], device: torch.device) -> float:
    """Seconds that a stage would take, from four steps of it, which are told.

    Args:
        title: Whose stage it is.
        stage: Which.
        loss: Of a step, by its number.
        device: Where.
    """
    times: list[float] = []
    for step in range(4):
        synchronize(device)
        began = time.monotonic()
        loss(step).backward()
        synchronize(device)
        times.append(time.monotonic() - began)
    print(f"{title} {stage.name}: {1e3 * min(times):.0f} ms a step, first {times[0]:.1f} s", flush=True)
    return stage.steps * min(times)
