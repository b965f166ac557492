"""The two stages as recipes, whatever is distilled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...train.recipe import Recipe
from ...train.task import Setup, Task, unknown_recipe


def stages(task: Task[Any, Any], fields: Mapping[str, Mapping[str, Any]]) -> dict[str, Setup]:
    """A setup for each stage, with its fields of recipe and settings."""
    plain = Setup(task, Recipe(), task.settings())
    return {name: plain.changed(**changes) for name, changes in fields.items()}


def stage(recipes: Mapping[str, Setup], name: str | None) -> Setup:
    """That of the second stage unless the first is named.

    Raises:
        ValueError: If another is.
    """
    chosen = name or "whole"
    if chosen not in recipes:
        raise unknown_recipe(chosen, recipes)
    return recipes[chosen]
