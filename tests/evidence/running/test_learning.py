"""A network that learns by a recipe, with all its numbers on the device."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from affinear.train import Recipe

CPU = torch.device("cpu")


@pytest.fixture
def learning(script: Any) -> Any:
    return script("running.learning")


def recipe(**changes: Any) -> Recipe:
    given: dict[str, Any] = {"steps": 6, "warmup_steps": 2, "lr": 0.01, "weight_decay": 0.1, **changes}
    return Recipe(**given)


def learner_of(learning: Any, by: Recipe) -> Any:
    """A line that learns as many numbers as there are steps."""
    network = nn.Linear(3, 1)
    inputs, wanted = torch.randn(by.steps or 0, 5, 3), torch.randn(by.steps or 0, 5, 1)

    def loss(at: Tensor) -> Tensor:
        given, right = (every.index_select(0, at)[0] for every in (inputs, wanted))
        return (network(given) - right).square().mean()

    return learning.Learner(network, by, loss, CPU)


def test_a_step_is_adamw_at_its_own_rate_on_its_own_numbers(learning: Any) -> None:
    learner, expected = learner_of(learning, recipe()), nn.Linear(3, 1)
    expected.load_state_dict(learner.network.state_dict())
    groups = [{"params": [expected.bias], "weight_decay": 0.0}, {"params": [expected.weight], "weight_decay": 0.1}]
    optimizer = torch.optim.AdamW(groups, lr=0.0)
    for step, rate in enumerate(learning.rates(recipe())):
        loss = learner.loss_of(torch.tensor([step]))  # of the same weights, up to here
        for group in optimizer.param_groups:
            group["lr"] = rate
        gradients = torch.autograd.grad(loss, list(learner.network.parameters()))
        for mine, gradient in zip(expected.parameters(), gradients, strict=True):
            mine.grad = gradient
        optimizer.step()
        learner()
        for mine, found in zip(expected.parameters(), learner.network.parameters(), strict=True):
            assert torch.allclose(mine, found, rtol=1e-6, atol=1e-7)


def test_the_weights_that_are_left_are_the_averaged_ones(learning: Any) -> None:
    learner = learner_of(learning, recipe(ema_decay=0.5))
    seen = [[one.detach().clone() for one in learner.every]]
    for _ in range(3):
        learner()
        seen.append([one.detach().clone() for one in learner.every])
    learner.keep_mean()
    for index, found in enumerate(learner.every):
        mean = seen[0][index]
        for after in seen[1:]:
            mean = mean.lerp(after[index], 0.5)
        assert torch.allclose(found, mean, atol=1e-6)


def test_without_an_average_the_last_weights_are_left(learning: Any) -> None:
    learner = learner_of(learning, recipe())
    learner()
    last = learner.network.weight.detach().clone()
    learner.keep_mean()
    assert torch.equal(learner.network.weight, last)


def test_rates_are_the_engine_s(learning: Any) -> None:
    rates = learning.rates(recipe(steps=40, warmup_steps=10))
    assert len(rates) == 40
    assert rates[10] == pytest.approx(0.01, rel=0.2)
    assert rates[0] < rates[5] < rates[10] > rates[25] > rates[39]


def test_losses_are_means_of_stretches_and_the_last_may_be_shorter(learning: Any) -> None:
    learner = learner_of(learning, recipe(steps=7))
    each = list[float]()

    def told(loss: Tensor) -> Tensor:
        each.append(loss.item())
        return loss

    of = learner.loss_of
    learner.loss_of = lambda at: told(of(at))
    pace = learning.learn(learner, lambda _: None, part=4)
    assert pace.losses == pytest.approx([sum(each[:4]) / 4, sum(each[4:]) / 3])
    assert pace.steps == 7
    assert pace.why == "no GPU"


def test_what_goes_on_until_the_time_is_over_has_rates_by_the_time_warm_up_too(learning: Any) -> None:
    learner = learner_of(learning, recipe(steps=20_000, warmup_steps=2_000, warmup_lr=0.0, min_lr=0.0))
    for first, share, wanted in ((0, 0.05, 0.005), (50, 0.1, 0.01), (100, 0.5, 0.005), (150, 1.0, 0.0)):
        learner.follow(first, 50, share)
        assert learner.rates[first : first + 50].tolist() == pytest.approx([wanted] * 50, rel=0.05, abs=1e-6)
    assert learner.rates[200] == learner.planned[200]
    assert 0 < learning.learn(learner, lambda _: None, time.time() + 0.3, by_time=True).steps < 20_000
    assert learner.rates[50] > learner.planned[50]


def test_a_call_goes_on_where_another_ended(learning: Any) -> None:
    torch.manual_seed(0)
    parts = learner_of(learning, recipe(ema_decay=0.5))
    torch.manual_seed(0)
    whole = learner_of(learning, recipe(ema_decay=0.5))
    expected = learning.learn(whole, lambda _: None, part=2)
    first = learning.learn(parts, lambda _: None, part=2, last=3)
    second = learning.learn(parts, lambda _: None, part=2)
    assert (first.steps, second.steps) == (3, 6)
    assert [len(one.losses) for one in (first, second)] == [2, 2]  # 2 + 1 steps, and 1 + 2
    sums = [
        a * b for one in (first, second) for a, b in zip(one.losses, (2, 1) if one is first else (1, 2), strict=True)
    ]
    assert sum(sums) == pytest.approx(2 * sum(expected.losses))
    for mine, other in zip(parts.every, whole.every, strict=True):
        assert torch.equal(mine, other)


def test_a_loss_that_is_no_number_ends_it(learning: Any) -> None:
    learner = learner_of(learning, recipe())
    with torch.no_grad():
        learner.network.weight.fill_(float("inf"))
    with pytest.raises(RuntimeError, match="the loss is nan after 6 steps"):
        learning.learn(learner, lambda _: None)


@pytest.mark.parametrize("changes", [{"steps": None}, {"opt": "sgd"}, {"accumulate": 2}])
def test_what_it_cannot_do_is_said(learning: Any, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="recipe: expected steps of AdamW, each a whole batch, got steps="):
        learning.Learner(nn.Linear(2, 1), recipe(**changes), lambda _: torch.zeros(()), CPU)


def test_a_step_is_timed(learning: Any) -> None:
    assert learning.step_seconds_of(learner_of(learning, recipe(steps=5)), building=2, timed=3) > 0
