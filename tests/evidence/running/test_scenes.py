"""A segmenter that learns from scenes on the device."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from affinear import tasks
from affinear.tasks.segment.opening import open_scenes
from affinear.train.task import Job

from ..scenes import folder


@pytest.fixture
def scenes(script: Any) -> Any:
    return script("running.scenes")


@pytest.fixture
def step_of(script: Any, scenes: Any) -> Callable[..., Any]:
    def made(data: Any, job: Any) -> Any:
        torch.manual_seed(job.recipe.seed)
        device, network = torch.device("cpu"), tasks.find("segment").network(job)
        return scenes.Step(network, job, script("running.crops").kept(data.train, job.settings, device), device)

    return made


@pytest.fixture
def data(tmp_path: Path) -> Any:
    root = folder(tmp_path / "data", (64, 96), 6)
    return open_scenes(str(root), zero_is_class=False, test_split="test", memory=True)


def job_for(data: Any, **changes: Any) -> Any:
    small = {"steps": 6, "batch_size": 2, "warmup_steps": 2, "crop": (32, 32), "zoom": (1.0, 1.5), **changes}
    setup = tasks.recipe_for("segment", "resnet18", "small", **small)
    return tasks.find("segment").settle(Job("resnet18", {}, setup.recipe, setup.settings), data)


def test_the_same_seed_learns_the_same(scenes: Any, step_of: Any, data: Any) -> None:
    def learned(seed: int) -> Any:
        step = step_of(data, job_for(data, seed=seed))
        pace = scenes.learn(step, lambda _: None)
        assert pace.steps == 6
        return torch.cat([weight.detach().flatten() for weight in step.network.parameters()])

    first = learned(3)
    assert torch.equal(first, learned(3))
    assert not torch.equal(first, learned(4))


def test_the_weights_that_are_left_are_the_averaged_ones(scenes: Any, step_of: Any, data: Any) -> None:
    step = step_of(data, job_for(data, ema_decay=0.5))
    seen = [[one.detach().clone() for one in step.every]]
    for _ in range(3):
        step()
        seen.append([one.detach().clone() for one in step.every])
    step.keep_mean()
    for index, found in enumerate(step.every):
        mean = seen[0][index]
        for after in seen[1:]:
            mean = mean.lerp(after[index], 0.5)
        assert torch.allclose(found, mean, atol=1e-6)


def test_rates_are_the_engine_s(scenes: Any, step_of: Any, data: Any) -> None:
    job = job_for(data, steps=40, warmup_steps=10, lr=0.01)
    rates = scenes.rates(job.recipe)
    assert len(rates) == 40
    assert rates[10] == pytest.approx(0.01, rel=0.2)
    assert rates[0] < rates[5] < rates[10] > rates[25] > rates[39]


def test_what_goes_on_until_the_time_is_over_slows_down_with_the_time(scenes: Any, step_of: Any, data: Any) -> None:
    job = job_for(data, steps=400, warmup_steps=0, lr=0.01)
    step = step_of(data, job)
    step.slow_down(100, 50, 0.5)
    half = job.recipe.min_lr + (0.01 - job.recipe.min_lr) / 2
    assert step.rates[100:150].max() <= half + 1e-9
    assert step.rates[99] > half
    pace = scenes.learn(step, lambda _: None, time.time() + 1.0, slowing=True)
    assert 0 < pace.steps < 400


def test_a_segmenter_is_judged_as_the_library_judges_it(scenes: Any, step_of: Any, data: Any) -> None:
    job = job_for(data)
    task, device = tasks.find("segment"), torch.device("cpu")
    network = task.network(job)
    score, maps = scenes.judge(network, job, data, device, at_once=3)
    work = task.work(replace(job, settings=replace(job.settings, test_batch=2)), data, device)
    expected = work.score(network.eval(), (work.ready(batch) for batch in work.test_loader()), cast(Any, _Alone()))
    assert score.count == len(maps) == len(data.test)
    for name, number in expected.numbers.items():
        assert math.isclose(score.numbers[name], number, rel_tol=1e-6)


class _Alone:
    """What a task needs of an accelerator."""

    device = torch.device("cpu")

    def autocast(self) -> Any:
        return torch.autocast("cpu", enabled=False)

    def reduce(self, tensor: Any) -> Any:
        return tensor
