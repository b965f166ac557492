"""Telling what an image shows: one class for each.

`recipe_for` gives the recipe of a network; `affinear.tasks.evaluate` and `load_trained` use what was trained by it.
"""

from typing import Any

from ...train.task import Setup, chosen_setup
from .predict import predict
from .published import RECIPES
from .settings import ClassifySettings
from .task import TASK

__all__ = ["RECIPES", "TASK", "ClassifySettings", "predict", "recipe_for"]


def recipe_for(model: str, name: str | None = None, **changes: Any) -> Setup:
    """The recipe of a network: its family's published one, or the one of this name, with some fields set.

    Rates are given for the batch that results: the published ones are scaled with it, one that is set here is taken as
    it is. Of a run that is made shorter or longer, the warm-up keeps its share, unless it is set too.

    Args:
        model: Name of the network. The trunks of `affinear compare` get "tiny", networks of others "finetune".
        name: One of `RECIPES`, instead of the family's.
        changes: Fields of `Recipe` and of `ClassifySettings`.

    Raises:
        ValueError: If there is no such recipe or field, or a value will not do; near matches are named.

    Examples:
        >>> recipe_for("mavit_base").settings.drop_path, recipe_for("mavit_base").recipe.lr
        (0.4, 0.001)
        >>> recipe_for("inline_deit_tiny", batch_size=256).recipe.lr
        0.00025
        >>> recipe_for("resnet18") == recipe_for("resnet18", "finetune")
        True
    """
    return chosen_setup(TASK, model, name, changes)
