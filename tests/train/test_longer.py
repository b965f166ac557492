"""A finished run that is asked to be longer goes on where that is the same run, or says what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from affinear.tasks.classify import recipe_for
from affinear.tasks.images.labelled.digits import digits
from affinear.tasks.images.labelled.some import first_of
from affinear.train import OtherRun, Run, train

STAIRS = {"sched": "multistep", "milestones": (1,), "warmup_epochs": 0.0}


def run_of(output: Path, **changes: Any) -> Run:
    plain = {"batch_size": 16, "workers": 0, "eval_every": 1}
    setup = recipe_for("affinear_trunk_micro", "tiny", **{**plain, **changes})
    return Run("affinear_trunk_micro", "digits", output, setup, {"depth": 1})


def test_a_run_whose_past_is_the_same_goes_on(tmp_path: Path):
    data = first_of(digits(), 48)
    train(run_of(tmp_path / "grown", epochs=2, **STAIRS), data=data)
    grown = train(run_of(tmp_path / "grown", epochs=3, **STAIRS), data=data)
    whole = train(run_of(tmp_path / "whole", epochs=3, **STAIRS), data=data)
    assert [record.epoch for record in grown.records] == [1, 2, 3]
    one, other = load_file(grown.last), load_file(whole.last)
    assert all(torch.equal(one[name], other[name]) for name in other)
    train(run_of(tmp_path / "grown", epochs=3, **STAIRS), data=data)  # it is that run now


def test_one_whose_rate_would_have_been_another_says_what_to_do(tmp_path: Path):
    data = first_of(digits(), 48)
    train(run_of(tmp_path / "a", epochs=1), data=data)
    said = rf"a run of 1 epochs, .* over 3 it would .*--weights {tmp_path / 'a'} --epochs 2 --output FOLDER"
    with pytest.raises(OtherRun, match=said):
        train(run_of(tmp_path / "a", epochs=3), data=data)
    with pytest.raises(OtherRun, match=r"holds another run: recipe.epochs is 1 there and 3 now; .*recipe.lr is"):
        train(run_of(tmp_path / "a", epochs=3, lr=0.5), data=data)
    with pytest.raises(OtherRun, match=r"a run of 1 epochs"):
        train(run_of(tmp_path / "a", epochs=3, warmup_epochs=0.0), data=data)
