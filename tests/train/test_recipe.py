"""Recipes: the published numbers, what may be changed, and what is said when it may not."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest

from affinear.models.catalogue import names
from affinear.tasks import read_setup
from affinear.tasks.classify import RECIPES, ClassifySettings, recipe_for
from affinear.tasks.classify.published import family_of
from affinear.train import Recipe
from affinear.train.spelling import parse
from affinear.train.task import in_proportion


@pytest.mark.parametrize(
    ("model", "batch", "rate", "drop_path", "clip", "decay"),
    [
        ("mavit_tiny", 1024, 1e-3, 0.1, None, 0.05),
        ("mavit_small", 1024, 1e-3, 0.15, None, 0.05),
        ("mavit_base", 1024, 1e-3, 0.4, None, 0.05),
        ("mavit_large_linear", 1024, 1e-3, 0.55, None, 0.05),
        ("nalaformer_xtiny", 1024, 1e-3, 0.1, None, 0.05),
        ("nalaformer_large", 1024, 1e-3, 0.55, None, 0.05),
        ("inline_deit_tiny", 4096, 4e-3, 0.1, 5.0, 0.05),
        ("inline_deit_small", 1024, 1e-3, 0.1, 5.0, 0.05),
        ("inline_deit_base", 512, 5e-4, 0.1, 5.0, 0.05),
        ("inline_pvt_tiny", 1024, 1e-3, 0.1, None, 0.05),
        ("inline_pvt_medium", 1024, 1e-3, 0.3, 1.0, 0.05),
        ("inline_pvt_large", 512, 5e-4, 0.3, 1.0, 0.05),
        ("inline_swin_small", 1024, 1e-3, 0.3, 5.0, 0.05),
        ("inline_swin_base", 512, 5e-4, 0.5, 5.0, 0.05),
        ("inline_cswin_small", 1024, 1e-3, 0.4, None, 0.05),
        ("inline_cswin_base", 512, 5e-4, 0.5, None, 0.1),
    ],
)
def test_families_train_as_published(
    model: str, batch: int, rate: float, drop_path: float, clip: float | None, decay: float
):
    recipe, chosen = recipe_for(model).recipe, recipe_for(model).settings
    assert isinstance(chosen, ClassifySettings)
    assert (recipe.batch_size, chosen.drop_path, recipe.clip_grad, recipe.weight_decay) == (
        batch,
        drop_path,
        clip,
        decay,
    )
    assert recipe.lr == pytest.approx(rate)
    assert (recipe.epochs, chosen.mixup, chosen.cutmix, chosen.smoothing, chosen.reprob) == (300, 0.8, 1.0, 0.1, 0.25)
    assert (chosen.auto_augment, chosen.color_jitter, recipe.opt) == ("rand-m9-mstd0.5-inc1", 0.4, "adamw")


def test_averages_and_rates_follow_the_batch():
    recipe = recipe_for("mavit_tiny").recipe
    assert recipe.ema_decay == pytest.approx(0.99996**2)
    assert (recipe.warmup_epochs, recipe.warmup_lr, recipe.min_lr) == (5, 1e-6, 1e-5)
    assert recipe_for("inline_cswin_tiny").recipe.ema_decay == pytest.approx(0.9996**0.25)
    swin = recipe_for("inline_swin_tiny", batch_size=2048).recipe
    assert (swin.lr, swin.warmup_lr, swin.min_lr) == pytest.approx((2e-3, 2e-6, 2e-5))
    assert recipe_for("inline_swin_tiny", batch_size=2048, lr=1e-4).recipe.lr == 1e-4


def test_every_network_has_a_recipe_of_its_family_and_others_the_documented_default():
    known = {family_of(name) for name in names()} - {None}  # families whose papers' recipes are not ours to know
    assert known == set(RECIPES) - {"finetune", "tiny"}
    assert recipe_for("resnet18") == recipe_for("vit_tiny_patch16_224", "finetune")
    assert recipe_for("affinear_trunk_cifar") == recipe_for("affinear_trunk_cifar", "tiny")


def test_a_shorter_run_warms_up_for_the_same_share():
    assert recipe_for("inline_swin_tiny", epochs=30).recipe.warmup_epochs == pytest.approx(2)
    assert recipe_for("inline_swin_tiny", epochs=30, warmup_epochs=5).recipe.warmup_epochs == 5


@pytest.mark.parametrize("name", RECIPES)
def test_json_brings_every_field_back(name: str):
    recipe = recipe_for("mavit_tiny", name, image_size=(192, 256), betas=(0.9, 0.95), mean=(0.5,), std=(0.5,))
    assert read_setup(recipe.to_json()) == recipe
    assert read_setup(json.dumps(recipe.fields())) == recipe  # flat, as before there were tasks
    assert Recipe.from_json(recipe.recipe.to_json()) == recipe.recipe


@pytest.mark.parametrize("kind", [Recipe, ClassifySettings])
def test_every_field_is_checked_and_documented(kind: type[Recipe | ClassifySettings]):
    known = [field.name for field in fields(kind)]
    assert list(kind.checks) == known
    for name in known:
        assert f"        {name}: " in (kind.__doc__ or "")


def test_a_length_in_steps_takes_warm_up_and_milestones_along():
    steps = recipe_for("inline_swin_tiny", steps=3000).recipe
    assert (steps.steps, steps.warmup_steps) == (3000, 200)
    stairs = Recipe(epochs=12, sched="multistep", milestones=(8, 11), warmup_epochs=1)
    assert in_proportion(stairs, {"epochs": 6}) == {"warmup_epochs": 0.5, "milestones": (4.0, 5.5)}
    long = Recipe(steps=80_000, warmup_steps=1500, eval_steps=8000)
    assert in_proportion(long, {"steps": 800}) == {"warmup_steps": 15}
    assert in_proportion(long, {"epochs": 3})["steps"] is None


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"epoch": 3}, "recipe of classify: no field is called 'epoch'; did you mean 'epochs'"),
        ({"epochs": 0}, "epochs: expected a whole number of at least 1, got 0"),
        ({"epochs": 2.5}, "epochs: expected a whole number"),
        ({"lr": float("nan")}, "lr: expected a number above 0"),
        ({"lr": "fast"}, "lr: expected a number above 0, got 'fast'"),
        ({"precision": "bf61"}, "precision: expected one of no, bf16, fp16 or none"),
        ({"smoothing": 1.0}, "smoothing: expected a number from 0 to 1"),
        ({"image_size": (0, 3)}, "image_size: expected height and width"),
        ({"betas": (0.9,)}, "betas: expected two numbers"),
        ({"accumulate": 3, "batch_size": 64}, "accumulate: expected a divisor of the batch of 64"),
        ({"sched": "cosin"}, "sched: expected one of cosine"),
    ],
)
def test_bad_values_are_named(changes: dict[str, Any], sentence: str):
    with pytest.raises(ValueError, match=sentence):
        recipe_for("mavit_tiny", **changes)


def test_an_unknown_recipe_names_what_comes_near():
    with pytest.raises(ValueError, match="did you mean 'finetune'"):
        recipe_for("mavit_tiny", "fine-tune")


def test_settings_are_read_as_the_command_line_spells_them():
    given = ["clip-grad=none", "precision=no", "compile=false", "scale=0.2,1", "image_size=192x256"]
    found = parse(given, Recipe, ClassifySettings)
    assert found == {
        "clip_grad": None,
        "precision": "no",
        "compile": False,
        "scale": (0.2, 1),
        "image_size": (192, 256),
    }
    assert recipe_for("mavit_tiny", **found).fields()["image_size"] == (192, 256)


@pytest.mark.parametrize("text", ["epochs", "epoch=3"])
def test_bad_settings_are_named(text: str):
    with pytest.raises(ValueError, match="epoch"):
        parse([text], Recipe)


@pytest.mark.parametrize("text", ["0", "big", "1x2x3", "-3", ""])
def test_bad_sizes_are_named(text: str):
    with pytest.raises(ValueError, match="image_size: expected a side such as 224"):
        parse([f"image_size={text}"], ClassifySettings)
