"""A segmenter that learns from scenes on the device."""

from __future__ import annotations

import math
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
def learning(script: Any) -> Any:
    return script("running.learning")


@pytest.fixture
def learner_of(script: Any, scenes: Any) -> Callable[..., Any]:
    def made(data: Any, job: Any) -> Any:
        torch.manual_seed(job.recipe.seed)
        device, network = torch.device("cpu"), tasks.find("segment").network(job)
        return scenes.learner_of(network, job, script("running.crops").kept(data.train, job.settings, device), device)

    return made


@pytest.fixture
def data(tmp_path: Path) -> Any:
    root = folder(tmp_path / "data", (64, 96), 6)
    return open_scenes(str(root), zero_is_class=False, test_split="test", memory=True)


def job_for(data: Any, **changes: Any) -> Any:
    small = {"steps": 6, "batch_size": 2, "warmup_steps": 2, "crop": (32, 32), "zoom": (1.0, 1.5), **changes}
    setup = tasks.recipe_for("segment", "resnet18", "small", **small)
    return tasks.find("segment").settle(Job("resnet18", {}, setup.recipe, setup.settings), data)


def test_the_same_seed_learns_the_same(learning: Any, learner_of: Any, data: Any) -> None:
    def learned(seed: int) -> Any:
        learner = learner_of(data, job_for(data, seed=seed))
        pace = learning.learn(learner, lambda _: None)
        assert pace.steps == 6
        return torch.cat([weight.detach().flatten() for weight in learner.network.parameters()])

    first = learned(3)
    assert torch.equal(first, learned(3))
    assert not torch.equal(first, learned(4))


def test_a_segmenter_is_judged_as_the_library_judges_it(scenes: Any, data: Any) -> None:
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
