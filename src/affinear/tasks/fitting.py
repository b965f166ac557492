"""A recipe over few samples: batch, length and learning rate that fit them, and a sentence that says so."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..train.task import Data, Setup, Task, chosen_setup

STEPS = 300  # of a run over few samples, at least; its recipe's own epochs at most
EPOCHS = 10  # at least
AVERAGED = 10  # times that averaged weights must be able to forget their fresh ones


def fitted(
    task: Task[Any, Any], model: str, name: str | None, changes: Mapping[str, Any], data: Data
) -> tuple[Setup, str]:
    """The recipe of a network; where the samples do not fill its batch, one that a user did not set, with less of it.

    A batch is then a quarter of the samples at most, and a power of two. The run has some hundred steps, or the
    recipe's own epochs if these are fewer, and the learning rate goes with the root of the batch, as Adam's does.

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
    if "lr" not in changes:
        found["lr"] = recipe.lr * math.sqrt(batch / recipe.batch_size)
    fitting = chosen_setup(task, model, name, {**found, **changes})
    steps = fitting.recipe.total_steps(count // batch)
    if recipe.ema_decay is not None and "ema_decay" not in changes and steps * (1 - recipe.ema_decay) < AVERAGED:
        fitting = fitting.changed(ema_decay=None)
    return fitting, _told(task, data, setup, fitting)


def _told(task: Task[Any, Any], data: Data, before: Setup, now: Setup) -> str:
    one, other = before.recipe, now.recipe
    chosen = [f"batches of {other.batch_size}"]
    if other.epochs != one.epochs:
        chosen.append(f"{other.epochs} epochs in place of {one.epochs}")
    if other.lr != one.lr:
        chosen.append(f"a learning rate of {other.lr:.1e} in place of {one.lr:.1e}")
    if other.ema_decay != one.ema_decay:
        chosen.append("no averaged weights")
    return (
        f"{data.name}: {data.sizes[0]} training {task.samples} do not fill the recipe's batch of {one.batch_size:,}. "
        f"Chosen: {', '.join(chosen)}; --batch-size, --epochs and --lr choose others."
    )
