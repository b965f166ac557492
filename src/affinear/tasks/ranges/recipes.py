"""Recipes of the Long Range Arena: the protocol that papers on linear attention compare in, for each kind of data."""

from __future__ import annotations

from ...train.recipe import Recipe
from .settings import RangesSettings

USUAL = "ranges"


def _recipe(batch: int, lr: float, warmup: int) -> tuple[Recipe, RangesSettings]:
    """Skyformer's: Adam without weight decay, down to nothing in a straight line after the warm-up, 50,000 steps."""
    recipe = Recipe(
        steps=50_000,
        batch_size=batch,
        lr=lr,
        weight_decay=0.0,
        sched="poly",
        power=1.0,
        warmup_steps=warmup,
        warmup_lr=0.0,
        min_lr=0.0,
        eval_steps=2_500,
        log_every=100,
    )
    return recipe, RangesSettings()


RECIPES: dict[str, tuple[Recipe, RangesSettings]] = {
    USUAL: _recipe(32, 1e-4, 1_000),
    "listops": _recipe(32, 1e-4, 1_000),
    "text": _recipe(32, 1e-4, 80),
    "retrieval": _recipe(16, 2e-4, 800),
    "image": _recipe(256, 1e-4, 175),
    "pathfinder": _recipe(128, 2e-4, 312),
}
