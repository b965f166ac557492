"""Published recipes of generation, and one for small images and little time."""

from __future__ import annotations

from ...train.recipe import Recipe
from .settings import Generation

DIT, SIT, SMALL = "dit", "sit", "small"

# Constant rate, no decay, averaged weights: as both papers train. A schedule that ends where it begins is constant.
_CONSTANT = Recipe(
    steps=400_000,
    batch_size=256,
    lr=1e-4,
    weight_decay=0.0,
    sched="poly",
    min_lr=1e-4,
    warmup_steps=0,
    ema_decay=0.9999,
    eval_steps=50_000,
    log_every=100,
)

RECIPES: dict[str, tuple[Recipe, Generation]] = {
    DIT: (_CONSTANT, Generation(process="ddpm", sampler="ddpm", sample_steps=250, made=50_000)),
    SIT: (_CONSTANT, Generation(process="flow", sampler="euler", sample_steps=250, made=50_000)),
    # For CIFAR and the like: flows need fewer steps, and averages over fewer steps keep up with a short run.
    SMALL: (
        _CONSTANT.changed(
            steps=20_000,
            lr=3e-4,
            min_lr=1e-5,
            sched="cosine",
            warmup_steps=500,
            clip_grad=1.0,
            ema_decay=0.999,
            eval_steps=5_000,
        ),
        Generation(process="flow", sampler="euler", sample_steps=50, made=10_000),
    ),
}
