"""A run that is asked to be longer than it was: whether it can go on, and what to do if it cannot."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .kit import make_schedule
from .recipe import Recipe

LENGTH = ("epochs", "steps")
GOES_ALONG = ("warmup_epochs", "warmup_steps", "milestones")  # what keeps its share of a length


def goes_on(before: Mapping[str, Any], recipe: Recipe, steps_per_epoch: int, done: int) -> bool:
    """Whether a run of this recipe would have done the same steps as the one that was begun with another length.

    Args:
        before: The recipe that it was begun with, by field, out of a file that anybody may have written.
        recipe: The one it is asked for now.
        steps_per_epoch: Optimizer steps.
        done: Steps that are through.

    Example:
        >>> from affinear.train.longer import goes_on
        >>> from affinear.train.recipe import Recipe
        >>> falling, stairs = Recipe(epochs=6), Recipe(epochs=6, sched="multistep", milestones=(4,))
        >>> [goes_on(one.as_dict(), one.changed(epochs=8), 10, 60) for one in (falling, stairs)]
        [False, True]
    """
    try:
        old = Recipe().changed(**before)
    except (TypeError, ValueError):
        return False
    free = {name: getattr(recipe, name) for name in (*LENGTH, *recipe.free)}
    if dataclasses.replace(old, **free) != recipe or not 0 < done <= recipe.total_steps(steps_per_epoch):
        return False
    return _rates(old, steps_per_epoch, done) == _rates(recipe, steps_per_epoch, done)


def advice(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any], differing: list[str]) -> str:
    """What to do where nothing but the length is another and the run cannot go on; nothing if more is another."""
    names = {sentence.partition(" ")[0].rstrip(":").removeprefix("recipe.") for sentence in differing}
    if not names & {*LENGTH} or not names <= {*LENGTH, *GOES_ALONG}:
        return ""
    unit = "steps" if now.get("steps") is not None else "epochs"
    old, new = before.get(unit), now[unit]
    more = new - old if isinstance(old, int) and 0 < old < new else new
    return (
        f"{folder} holds a run of {old} {unit}, whose learning rate was made for that length; over {new} it "
        f"would have been another. To train its weights on, begin a run with them: --weights {folder} --{unit} {more} "
        "--output FOLDER. To train anew, give --output another folder, or add --no-resume --force."
    )


def _rates(recipe: Recipe, steps_per_epoch: int, count: int) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=recipe.lr)
    schedule = make_schedule(optimizer, recipe, steps_per_epoch)
    found: list[float] = []
    for step in range(count):
        schedule.step_update(step)
        found.append(optimizer.param_groups[0]["lr"])
    return found
