"""Published recipes of speech, and one for few hours."""

from __future__ import annotations

from ...train.recipe import Recipe
from .settings import Hearing

CONFORMER_960H = "conformer_960h"
CTC_100H = "ctc_100h"
SMALL = "small"

# Batches differ in length, and a compiler would look at each anew.
RECIPES: dict[str, tuple[Recipe, Hearing]] = {
    # The Conformer's: Adam with a peak of 0.05 / sqrt(C), here for the small one, after 10,000 steps of warm-up. The
    # paper goes on with one over the square root of the step; a cosine is the nearest that there is here.
    CONFORMER_960H: (
        Recipe(
            epochs=150,
            batch_size=256,
            opt="adam",
            lr=0.05 / 12,
            weight_decay=1e-6,
            betas=(0.9, 0.98),
            eps=1e-9,
            warmup_steps=10_000,
            warmup_lr=1e-7,
            min_lr=1e-6,
            clip_grad=5.0,
            ema_decay=0.9999,
            compile=False,
        ),
        Hearing(tokens="bpe", vocabulary=1024, batch_seconds=3200.0, speeds=(1.0,)),
    ),
    # ESPnet's for a hundred hours and CTC alone.
    CTC_100H: (
        Recipe(
            epochs=60,
            batch_size=128,
            opt="adam",
            lr=2e-3,
            weight_decay=1e-6,
            betas=(0.9, 0.98),
            warmup_steps=15_000,
            warmup_lr=1e-7,
            min_lr=1e-6,
            clip_grad=5.0,
            ema_decay=0.999,
            compile=False,
        ),
        Hearing(tokens="bpe", vocabulary=300, batch_seconds=1600.0, time_masks=5),
    ),
    # For about ten hours from fresh weights.
    SMALL: (
        Recipe(
            epochs=60,
            batch_size=64,
            opt="adamw",
            lr=1.5e-3,
            weight_decay=0.01,
            betas=(0.9, 0.98),
            warmup_steps=1_000,
            warmup_lr=1e-6,
            min_lr=1e-6,
            clip_grad=2.0,
            ema_decay=0.999,
            eval_every=5,
            compile=False,
        ),
        Hearing(batch_seconds=320.0),
    ),
}
