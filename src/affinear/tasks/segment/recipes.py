"""Published recipes of segmentation, and one for few photos."""

from __future__ import annotations

from ...train.recipe import Recipe
from .settings import Segmentation

SEMANTIC_FPN_80K = "semantic_fpn_80k"
UPERNET_160K = "upernet_160k"
SMALL = "small"

RECIPES: dict[str, tuple[Recipe, Segmentation]] = {
    # MALA's: AdamW at 1e-4, power 0.9, 8 GPUs with two crops each.
    SEMANTIC_FPN_80K: (
        Recipe(
            steps=80_000,
            batch_size=16,
            lr=1e-4,
            weight_decay=1e-4,
            sched="poly",
            power=0.9,
            warmup_steps=0,
            min_lr=1e-6,
            sync_bn=True,
            eval_steps=4_000,
        ),
        Segmentation(head="semantic_fpn", drop_path=0.1, crop=(512, 512), short_side=512, long_side=2048),
    ),
    # MALA's, which are Swin's: AdamW at 6e-5 after 1,500 steps of warm-up, down to nothing in a straight line.
    UPERNET_160K: (
        Recipe(
            steps=160_000,
            batch_size=16,
            lr=6e-5,
            weight_decay=0.01,
            sched="poly",
            power=1.0,
            warmup_steps=1_500,
            warmup_lr=6e-11,
            min_lr=0.0,
            sync_bn=True,
            eval_steps=8_000,
        ),
        Segmentation(head="upernet", drop_path=0.1, crop=(512, 512), short_side=512, long_side=2048),
    ),
    # For some hundred photos and fresh weights, which two thousand steps leave far from fitted: nothing that slows
    # learning (no stochastic depth), the photos' own scale inside of those that are learned, as it is what they are
    # judged at, and averaged weights, since so few photos make the last ones noisy. At 1e-3, a rate of batches of a
    # thousand, scores of softmax grow until each token looks at one other, and what was learned is lost.
    SMALL: (
        Recipe(
            steps=2_000,
            batch_size=16,
            lr=3e-4,
            weight_decay=0.05,
            sched="cosine",
            warmup_steps=200,
            warmup_lr=1e-6,
            min_lr=1e-6,
            clip_grad=1.0,
            ema_decay=0.99,
            eval_steps=500,
        ),
        Segmentation(head="semantic_fpn", drop_path=0.0, zoom=(0.9, 1.6)),
    ),
}
