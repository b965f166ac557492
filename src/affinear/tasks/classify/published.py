"""The recipes by name: those that the papers' networks were trained with, and two for every day."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from ...train.recipe import Recipe, check_fields
from . import trunk

RANDAUGMENT = "rand-m9-mstd0.5-inc1"

# What all three papers share, which is DeiT's recipe: rates belong to a batch of 512.
_PAPERS = Recipe(
    epochs=300,
    batch_size=1024,
    lr=5e-4,
    lr_batch=512,
    weight_decay=0.05,
    smoothing=0.1,
    mixup=0.8,
    cutmix=1.0,
    drop_path=0.1,
    auto_augment=RANDAUGMENT,
    color_jitter=0.4,
    reprob=0.25,
    interpolation="bicubic",
)
_MAVIT = _PAPERS.changed(
    warmup_epochs=5, warmup_lr=1e-6, min_lr=1e-5, ema_decay=0.99996, ema_batch=512, repeats=3, sync_bn=True
)
_INLINE = _PAPERS.changed(warmup_epochs=20, warmup_lr=5e-7, min_lr=5e-6, scale_all_lr=True, clip_grad=5.0)

RECIPES: Mapping[str, Recipe] = {
    "mavit": _MAVIT,
    "nalaformer": _MAVIT,
    "inline_deit": _INLINE.changed(batch_size=4096),
    "inline_pvt": _INLINE.changed(warmup_epochs=5, warmup_lr=1e-6, min_lr=1e-5, clip_grad=None),
    "inline_swin": _INLINE.changed(drop_path=0.2),
    "inline_cswin": _INLINE.changed(drop_path=0.2, clip_grad=None, ema_decay=0.9996, ema_batch=4096),
    # A trained network, or any that has no recipe of its own: small steps, few epochs, nothing a network must know.
    "finetune": Recipe(
        epochs=30,
        batch_size=128,
        lr=1e-4,
        lr_batch=128,
        warmup_epochs=2,
        warmup_lr=1e-6,
        min_lr=1e-6,
        clip_grad=1.0,
        auto_augment=RANDAUGMENT,
        scale=(0.35, 1.0),
    ),
    # Small images and demonstrations; nothing is mirrored, because digits and letters may be among them.
    "tiny": Recipe(
        epochs=20, batch_size=128, lr=1e-3, warmup_epochs=2, warmup_lr=1e-6, clip_grad=1.0, augment="simple", hflip=0.0
    ),
}

# What differs by size within a family.
SIZES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "mavit": {"small": {"drop_path": 0.15}, "base": {"drop_path": 0.4}, "large": {"drop_path": 0.55}},
    "nalaformer": {"small": {"drop_path": 0.15}, "base": {"drop_path": 0.4}, "large": {"drop_path": 0.55}},
    "inline_deit": {"small": {"batch_size": 1024}, "base": {"batch_size": 512}},
    "inline_pvt": {
        "medium": {"drop_path": 0.3, "clip_grad": 1.0},
        "large": {"drop_path": 0.3, "clip_grad": 1.0, "batch_size": 512},
    },
    "inline_swin": {"small": {"drop_path": 0.3}, "base": {"drop_path": 0.5, "batch_size": 512}},
    "inline_cswin": {
        "small": {"drop_path": 0.4},
        "base": {"drop_path": 0.5, "batch_size": 512, "weight_decay": 0.1},
    },
}


def recipe_for(model: str, name: str | None = None, **changes: Any) -> Recipe:
    """The recipe of a network: its family's published one, or the one of this name, with some fields set.

    Rates are given for the batch that results: the published ones are scaled with it, one that is set here is taken as
    it is. Of a run that is made shorter or longer, the warm-up keeps its share, unless it is set too.

    Args:
        model: Name of the network. The trunks of `affinear compare` get "tiny", networks of others "finetune".
        name: One of `RECIPES`, instead of the family's.
        changes: Fields of `Recipe`.

    Raises:
        ValueError: If there is no such recipe or field, or a value will not do; near matches are named.

    Examples:
        >>> recipe_for("mavit_base").drop_path, recipe_for("mavit_base").lr
        (0.4, 0.001)
        >>> recipe_for("inline_deit_tiny", batch_size=256).lr
        0.00025
        >>> recipe_for("resnet18") == recipe_for("resnet18", "finetune")
        True
        >>> recipe_for("mavit_tiny", "tyni")
        Traceback (most recent call last):
        ValueError: recipe: expected one of mavit, ..., got 'tyni'; did you mean 'tiny'?
    """
    check_fields(changes)
    family = family_of(model)
    chosen = name or family or ("tiny" if model in trunk.SIZES else "finetune")
    if chosen not in RECIPES:
        near = get_close_matches(chosen, RECIPES, n=2, cutoff=0.5)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise ValueError(f"recipe: expected one of {', '.join(RECIPES)}, got {chosen!r}{hint}")
    recipe = RECIPES[chosen]
    if family is not None and chosen == family:
        recipe = recipe.changed(**_of_size(model, family))
    if "epochs" in changes and "warmup_epochs" not in changes and isinstance(changes["epochs"], int):
        changes["warmup_epochs"] = recipe.warmup_epochs * changes["epochs"] / recipe.epochs
    for rate, batch in (("lr", "lr_batch"), ("ema_decay", "ema_batch")):
        if rate in changes and batch not in changes:
            changes[batch] = 0
    return recipe.changed(**changes).scaled()


def family_of(model: str) -> str | None:
    """The family that a network belongs to, if it is one of ours.

    Examples:
        >>> family_of("inline_swin_tiny_linear"), family_of("resnet18")
        ('inline_swin', None)
    """
    return next((family for family in SIZES if model.startswith(f"{family}_")), None)


def _of_size(model: str, family: str) -> Mapping[str, Any]:
    size = model.removeprefix(f"{family}_").partition("_")[0]
    return SIZES[family].get(size, {})
