"""A recipe over few samples fits them, says so, and leaves alone what the user set."""

from __future__ import annotations

from typing import Any

import pytest

from affinear.tasks import find, recipe_for
from affinear.tasks.fitting import fitted
from affinear.tasks.images.labelled.digits import digits
from affinear.train.task import Data

TASK = find("classify")


def few(count: int) -> Data:
    return TASK.limited(digits(), count)


def test_enough_samples_leave_a_recipe_as_it_is():
    assert fitted(TASK, "mavit_tiny", None, {}, digits()) == (recipe_for("classify", "mavit_tiny"), "")


def test_fifty_photos_get_batches_epochs_and_a_rate_that_fit_and_a_sentence():
    setup, told = fitted(TASK, "mavit_tiny", None, {}, few(45))
    recipe = setup.recipe
    assert (recipe.batch_size, recipe.epochs, recipe.ema_decay) == (8, 60, None)
    assert recipe.lr == pytest.approx(1e-3 * (8 / 1024) ** 0.5)
    assert recipe.warmup_epochs == pytest.approx(5 * 60 / 300)
    for words in ("45 training images do not fill the recipe's batch of 1,024", "batches of 8", "60 epochs", "8.8e-05"):
        assert words in told


@pytest.mark.parametrize("count", [2, 3, 7, 8, 100])
def test_a_batch_is_there_however_few_samples_there_are(count: int):
    recipe = fitted(TASK, "mavit_tiny", None, {}, few(count))[0].recipe
    assert 2 <= recipe.batch_size <= count
    assert recipe.batch_size % 2 == 0  # mixup pairs images
    assert 10 <= recipe.epochs <= 300


@pytest.mark.parametrize("changes", [{"batch_size": 16}, {"epochs": 3}, {"lr": 0.1}, {"ema_decay": 0.9}])
def test_what_the_user_sets_stays(changes: dict[str, Any]):
    fields = fitted(TASK, "mavit_tiny", None, changes, few(45))[0].fields()
    assert {name: fields[name] for name in changes} == changes


def test_fine_tuning_keeps_its_own_epochs():
    assert fitted(TASK, "resnet18", None, {}, few(45))[0].recipe.epochs == 30


class Few:
    """What a recipe is fitted to: how much there is of it."""

    name, sizes = "scenes", (6, 3)


@pytest.mark.parametrize(("task", "recipe"), [("segment", "upernet_160k"), ("detect", "small")])
def test_recipes_that_count_steps_get_fewer_of_them(task: str, recipe: str):
    before = recipe_for(task, "mavit_tiny", recipe).recipe
    setup, told = fitted(find(task), "mavit_tiny", recipe, {}, Few())  # pyright: ignore[reportArgumentType]
    now = setup.recipe
    assert (now.batch_size, now.steps, now.eval_steps) == (2, 1000, 500)
    assert now.warmup_steps == round((before.warmup_steps or 0) * 1000 / (before.steps or 1))
    assert now.lr == pytest.approx(before.lr * (2 / before.batch_size) ** 0.5)
    assert "1,000 steps in place of" in told
    assert "--steps" in told
    assert fitted(find(task), "mavit_tiny", recipe, {"steps": 7}, Few())[0].recipe.steps == 7  # pyright: ignore[reportArgumentType]


def test_a_warm_up_told_in_steps_does_not_outlast_the_run():
    setup, _ = fitted(find("detect"), "mavit_tiny", "mask_rcnn_1x", {}, Few())  # pyright: ignore[reportArgumentType]
    recipe = setup.recipe
    steps = recipe.total_steps(6 // recipe.batch_size)
    assert recipe.warmup_steps is not None
    assert recipe.warmup_steps <= steps // 10
