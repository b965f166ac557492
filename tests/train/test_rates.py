"""A task may give some weights a learning rate of their own."""

from __future__ import annotations

import pytest
from torch import nn

from affinear.train.kit import _optimizer, make_schedule
from affinear.train.recipe import Recipe


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3))


def test_weights_with_a_rate_of_their_own_keep_it_through_the_schedule():
    recipe = Recipe(steps=10, warmup_steps=0, lr=1e-3, min_lr=0.0)
    optimizer = _optimizer(network(), recipe, lambda name: 10.0 if name.startswith("1.") else 1.0)
    rates = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    assert rates == [(1e-3, 0.0), (1e-2, 0.0), (1e-3, 0.05), (1e-2, 0.05)]  # biases do not decay, as timm has it
    make_schedule(optimizer, recipe, 5).step_update(5)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([5e-4, 5e-3, 5e-4, 5e-3])


def test_where_all_rates_are_one_groups_are_those_of_timm():
    groups = _optimizer(network(), Recipe(), lambda _: 1.0).param_groups
    assert [group["weight_decay"] for group in groups] == [0.0, 0.05]
    assert not any("lr_scale" in group for group in groups)


def test_rates_by_layer_and_rates_of_a_task_do_not_go_together():
    with pytest.raises(ValueError, match="layer_decay: expected none"):
        _optimizer(network(), Recipe(layer_decay=0.9), lambda name: 2.0 if name == "0.bias" else 1.0)
