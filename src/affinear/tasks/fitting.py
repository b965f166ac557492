"""A recipe over few samples: batch, length and learning rate that fit them, and a sentence that says so."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..train.task import Data, Setup, Task, chosen_setup

STEPS = 300  # of a run over few samples, at least; its recipe's own epochs at most
COUNTED = 1_000  # steps where a recipe counts steps and not epochs; its own at most
WARM = 10  # at most one step in so many is of the warm-up
EPOCHS = 10  # at least
AVERAGED = 10  # times that averaged weights must be able to forget their fresh ones


def fitted(
    task: Task[Any, Any], model: str, name: str | None, changes: Mapping[str, Any], data: Data
) -> tuple[Setup, str]:
    """The recipe of a network; where the samples do not fill its batch, one that a user did not set, with less of it.

    A batch is then a quarter of the samples at most, and a power of two. The run has some hundred steps, or the
    recipe's own epochs or steps if these are fewer, the learning rate goes with the root of the batch, as Adam's does,
    and the warm-up with the length.

    Args:
        task: What is trained.
        model: Name of the network.
        name: One of the task's recipes, instead of the network's own.
        changes: Fields that the user sets; none of them is changed.
        data: Open.

    Returns:
        The recipe, and what was chosen, in a sentence; an empty one where nothing had to be.

    Example:
        >>> from affinear.tasks import find
        >>> from affinear.tasks.images.labelled.digits import digits
        >>> from affinear.tasks.fitting import fitted
        >>> few = find("classify").limited(digits(), 45)
        >>> setup, told = fitted(find("classify"), "mavit_tiny", None, {"seed": 3}, few)
        >>> setup.recipe.batch_size, setup.recipe.epochs
        (8, 60)
    """
    setup = chosen_setup(task, model, name, changes)
    count, recipe = data.sizes[0], setup.recipe
    if not task.fits_few or not 2 <= count < recipe.batch_size or "batch_size" in changes:
        return setup, ""
    batch = 2 ** int(math.log2(max(2, count // 4)))
    found: dict[str, Any] = {"batch_size": batch, "accumulate": 1}
    if recipe.steps is None and "epochs" not in changes:
        found["epochs"] = min(recipe.epochs, max(EPOCHS, -(-STEPS // (count // batch))))
    if recipe.steps is not None and not {"steps", "epochs"} & changes.keys():
        found["steps"] = min(recipe.steps, COUNTED)
        if recipe.eval_steps is not None:
            found["eval_steps"] = min(recipe.eval_steps, found["steps"] // 2)
    if "lr" not in changes:
        found["lr"] = recipe.lr * math.sqrt(batch / recipe.batch_size)
    fitting = chosen_setup(task, model, name, {**found, **changes})
    steps = fitting.recipe.total_steps(count // batch)
    if (fitting.recipe.warmup_steps or 0) > steps // WARM and "warmup_steps" not in changes:
        fitting = fitting.changed(warmup_steps=steps // WARM)
    if recipe.ema_decay is not None and "ema_decay" not in changes and steps * (1 - recipe.ema_decay) < AVERAGED:
        fitting = fitting.changed(ema_decay=None)
    return fitting, _told(task, data, setup, fitting)


def _told(task: Task[Any, Any], data: Data, before: Setup, now: Setup) -> str:
    one, other = before.recipe, now.recipe
    chosen = [f"batches of {other.batch_size}"]
    if other.epochs != one.epochs:
        chosen.append(f"{other.epochs} epochs in place of {one.epochs}")
    if other.steps is not None and other.steps != one.steps:
        chosen.append(f"{other.steps:,} steps in place of {one.steps:,}")
    if other.lr != one.lr:
        chosen.append(f"a learning rate of {other.lr:.1e} in place of {one.lr:.1e}")
    if other.ema_decay != one.ema_decay:
        chosen.append("no averaged weights")
    length = "epochs" if other.steps is None else "steps"
    return (
        f"{data.name}: {data.sizes[0]} training {task.samples} do not fill the recipe's batch of {one.batch_size:,}. "
        f"Chosen: {', '.join(chosen)}; --batch-size, --{length} and --lr choose others."
    )
