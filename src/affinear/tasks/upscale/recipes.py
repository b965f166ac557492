"""The published recipe of SwinIR-light, and one for few photos and little time."""

from __future__ import annotations

from ...train.recipe import Recipe
from .settings import Upscaling

SWINIR_LIGHT = "swinir_light"
SMALL = "small"

RECIPES: dict[str, tuple[Recipe, Upscaling]] = {
    # As released: Adam at 2e-4 on DIV2K, halved four times, the average of the weights beside them.
    SWINIR_LIGHT: (
        Recipe(
            steps=500_000,
            batch_size=64,
            opt="adam",
            lr=2e-4,
            weight_decay=0.0,
            sched="multistep",
            milestones=(250_000, 400_000, 450_000, 475_000),
            decay_rate=0.5,
            warmup_steps=0,
            min_lr=0.0,
            ema_decay=0.999,
            eval_steps=5_000,
            log_every=100,
        ),
        Upscaling(drop_path=0.1, patch=64),
    ),
    # Minutes on one GPU: fewer steps at a higher rate that goes down to nothing, no layer left out.
    SMALL: (
        Recipe(
            steps=6_000,
            batch_size=32,
            opt="adam",
            lr=5e-4,
            weight_decay=0.0,
            sched="cosine",
            warmup_steps=200,
            warmup_lr=1e-6,
            min_lr=1e-6,
            clip_grad=1.0,
            ema_decay=0.999,
            eval_steps=2_000,
            log_every=100,
        ),
        Upscaling(),
    ),
}
