"""Published recipes of detection, and one for few images."""

from __future__ import annotations

from dataclasses import replace

from ...train.recipe import Recipe
from .settings import Detection

MULTI_SCALE = tuple(range(480, 801, 32))

RETINANET_1X = "retinanet_1x"
MASK_RCNN_1X = "mask_rcnn_1x"
MASK_RCNN_3X = "mask_rcnn_3x"
CASCADE_3X = "cascade_3x"
SMALL = "small"

# MALA's: AdamW at 4e-4 after 500 steps of warm-up, a tenth at two thirds and again near the end; two images on each of
# eight GPUs, which is a guess, as the number of GPUs is not published.
_ONCE = Recipe(
    epochs=12,
    batch_size=16,
    lr=4e-4,
    weight_decay=0.05,
    sched="multistep",
    milestones=(8.0, 11.0),
    warmup_steps=500,
    warmup_lr=4e-7,
    min_lr=0.0,
    sync_bn=True,
)
_THRICE = replace(_ONCE, epochs=36, milestones=(27.0, 33.0))
_PUBLISHED = Detection(head_norm="none", sampling=0, relu_between=False)

RECIPES: dict[str, tuple[Recipe, Detection]] = {
    RETINANET_1X: (replace(_ONCE, weight_decay=1e-4), replace(_PUBLISHED, head="retinanet")),
    MASK_RCNN_1X: (_ONCE, _PUBLISHED),
    MASK_RCNN_3X: (_THRICE, replace(_PUBLISHED, short_sides=MULTI_SCALE, crop_share=0.5)),
    CASCADE_3X: (
        _THRICE,
        replace(
            _PUBLISHED,
            head="cascade",
            box_head="4conv1fc",
            box_norm="batch",
            class_aware=True,
            box_loss="giou",
            short_sides=MULTI_SCALE,
            crop_share=0.5,
        ),
    ),
    # For some hundred images and fresh weights: norms everywhere, images as they are, crops of 512, averaged weights.
    SMALL: (
        Recipe(
            steps=1_500,
            batch_size=8,
            lr=5e-4,
            weight_decay=0.05,
            sched="cosine",
            warmup_steps=100,
            warmup_lr=1e-6,
            min_lr=1e-6,
            clip_grad=1.0,
            ema_decay=0.99,
            eval_steps=500,
        ),
        Detection(short_sides=(), crop=(512, 512), vflip=0.5, photometric=True),
    ),
}
