"""A brief training takes the steps that the engine takes, and leaves no folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from affinear import tasks
from affinear.tasks.language.work import LanguageWork
from affinear.train import Run, train

SPEC = "recall:length=16,pairs=2,symbols=8,train=64,test=32"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    setup = tasks.recipe_for(
        "language", "affinear_tiny", "recall", steps=5, batch_size=4, warmup_steps=1, seed=3, workers=0, test_batch=8
    )
    args = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "conv_size": 2}
    return Run("affinear_tiny", SPEC, tmp_path / "run", setup, args)


@pytest.fixture
def data(run: Run) -> Any:
    return run.setup.task.open(run.data, run.setup.settings)


def test_it_comes_to_what_the_engine_comes_to(script: Any, run: Run, data: Any):
    brief = script("running.briefly").train_briefly(run, data)
    assert not run.output.exists()
    whole = train(run, data=data)
    assert dict(brief.score.numbers) == dict(whole.score)
    assert brief.parameters == whole.parameters
    assert brief.recipe["steps"] == 5
    assert (brief.pace.steps, brief.stretch, len(brief.pace.losses)) == (5, 1, 5)


def test_epochs_follow_each_other_in_orders_of_their_own(script: Any, run: Run):
    few = SPEC.replace("train=64", "train=8")  # two steps in an epoch
    batches = script("running.briefly").laid_out(run.model, few, run.setup)
    assert batches.tokens.shape[:2] == (5, 4)
    first, second, third = (batches.tokens[at : at + 2].flatten(0, 1) for at in (0, 2, 3))
    assert not torch.equal(first, second)
    assert sorted(first.tolist()) == sorted(second.tolist()) != sorted(third.tolist())


def test_networks_that_differ_learn_from_the_same_batches(script: Any, run: Run, data: Any):
    briefly = script("running.briefly")
    batches = briefly.laid_out(run.model, run.data, run.setup)
    other = dataclasses.replace(run, model_args={**run.model_args, "mechanism": "softmax"})
    briefly.train_briefly(other, data)
    assert briefly.laid_out(run.model, run.data, run.setup) is batches


def test_an_experiment_may_have_a_loss_of_its_own(script: Any, run: Run, data: Any):
    losses = list[float]()

    class Told(LanguageWork):
        def loss(self, network: nn.Module, batch: Any) -> Tensor:
            loss = super().loss(network, batch)
            losses.append(loss.item())
            return loss

    pace = script("running.briefly").train_briefly(run, data, Told).pace
    assert pace.losses == pytest.approx(losses)


def test_a_step_is_timed(script: Any, run: Run, data: Any):
    assert script("running.briefly").seconds_of_a_step(run, data, building=1, timed=2) > 0
