"""A brief training takes the steps that the engine takes, and leaves no folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from affinear import tasks
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
    assert [step for step, _ in brief.losses] == [1, 2, 3, 4, 5]


def test_epochs_follow_each_other(script: Any, run: Run):
    few = SPEC.replace("train=64", "train=8")  # two steps in an epoch
    data = run.setup.task.open(few, run.setup.settings)
    brief = script("running.briefly").train_briefly(Run(run.model, few, run.output, run.setup, run.model_args), data)
    assert brief.losses[-1][0] == 5


def test_a_step_is_timed(script: Any, run: Run, data: Any):
    assert script("running.briefly").seconds_of_a_step(run, data, warm=1, timed=2) > 0


def test_a_loss_that_is_no_number_ends_it(script: Any, run: Run, data: Any, monkeypatch: pytest.MonkeyPatch):
    briefly = script("running.briefly")
    monkeypatch.setattr(briefly.Stepper, "step", lambda *_: float("inf"))
    with pytest.raises(RuntimeError, match="the loss is inf after 1 steps"):
        briefly.train_briefly(run, data)
