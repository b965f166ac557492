"""Recipes of any task: by the name of a network, or out of JSON."""

from __future__ import annotations

from typing import Any

from ..train.before import split
from ..train.recipe import Recipe
from ..train.settings import read_object
from ..train.task import Setup, Task, chosen_setup
from .registry import find


def recipe_for(task: str | Task[Any, Any], model: str, name: str | None = None, **changes: Any) -> Setup:
    """The recipe of a network: its published one, or the one of this name, with some fields set.

    Rates are given for the batch that results: the published ones are scaled with it, one that is set here is taken as
    it is. Of a run that is made shorter or longer, warm-up and milestones keep their share, unless they are set too.

    Args:
        task: Its name, or the task itself.
        model: Name of the network.
        name: One of the task's recipes, instead of the network's own.
        changes: Fields of `Recipe` and of the task's settings.

    Raises:
        ValueError: If there is no such task, recipe or field, or a value will not do; near matches are named.

    Examples:
        >>> setup = recipe_for("classify", "mavit_base", steps=1000)
        >>> setup.settings.drop_path, setup.recipe.lr, setup.recipe.warmup_steps
        (0.4, 0.001, 17)
        >>> recipe_for("classify", "mavit_tiny", "tyni")
        Traceback (most recent call last):
        ValueError: recipe: expected one of mavit, ..., got 'tyni'; did you mean 'tiny'?
    """
    chosen = find(task) if isinstance(task, str) else task
    return chosen_setup(chosen, model, name, changes)


def read_setup(text: str) -> Setup:
    """The recipe that `Setup.to_json` wrote, or a flat one from before there were tasks.

    Raises:
        ValueError: If it is not JSON, or a field is unknown or holds what it may not.

    Examples:
        >>> setup = recipe_for("classify", "mavit_tiny")
        >>> read_setup(setup.to_json()) == setup
        True
        >>> read_setup('{"epochs": 3, "mixup": 0.5}').settings.mixup
        0.5
    """
    told = read_object(text, "recipe")
    if "recipe" in told:
        task = find(str(told.get("task", "classify")))
        recipe, settings = told["recipe"], told.get("settings", {})
    else:
        task = find("classify")
        recipe, settings = split(told)
    return Setup(task, Recipe().changed(**recipe), task.settings().changed(**settings))
