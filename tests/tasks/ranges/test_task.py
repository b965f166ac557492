"""Long ranges as a task: what it settles, answers, compares and refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from affinear import tasks
from affinear.cli import build_app
from affinear.tasks.ranges.samples import NO_CLASS, Sequences
from affinear.tasks.ranges.sequences import Ranges, split_of
from affinear.train import Recipe
from affinear.train.draws import NOTHING, Draw
from affinear.train.task import Job, Setup, Trained

TASK = tasks.find("ranges")


def pairs() -> Ranges:
    random = np.random.default_rng()

    def split(title: str):
        columns = [[random.integers(0, 256, random.integers(3, 9), np.uint8) for _ in range(4)] for _ in range(2)]
        return split_of(columns, [0, 1, 0, 1], title)

    return Ranges("pairs", "retrieval", split("train"), split("val"), split("test"), ("no", "yes"), 256, 6)


def job(data: Ranges, **changes: Any) -> Job[Any]:
    setup = Setup(TASK, Recipe(batch_size=2), TASK.settings()).changed(**changes)
    return TASK.settle(Job("sequence_small", {}, setup.recipe, setup.settings), data)


def test_every_kind_of_data_has_its_published_recipe():
    assert {name: (s.recipe.batch_size, s.recipe.lr) for name, s in TASK.recipes.items() if name != "ranges"} == {
        "listops": (32, 1e-4),
        "text": (32, 1e-4),
        "retrieval": (16, 2e-4),
        "image": (256, 1e-4),
        "pathfinder": (128, 2e-4),
    }
    assert TASK.trial("sequence_small", pairs()).recipe == TASK.recipes["retrieval"].recipe


def test_pairs_are_cut_padded_and_learnt_from():
    data = pairs()
    settled = job(data)
    work = TASK.work(settled, data, torch.device("cpu"))
    batch = work.ready(Sequences(data.train, 6).__getitems__([Draw(1, 0), Draw(NOTHING, 0)]))
    assert batch.tokens.shape == (2, 2, 6)
    assert batch.labels.tolist() == [1, NO_CLASS]
    row = data.train.rows[1][1][:6]
    assert batch.tokens[0, 1, : len(row)].tolist() == [int(token) + 1 for token in row]
    assert batch.tokens[0, 1, len(row) :].tolist() == [0] * (6 - len(row))
    loss = work.loss(TASK.network(settled), batch._replace(labels=torch.tensor([1, 0])))
    assert loss.isfinite()


def test_a_picture_is_never_cut():
    train, validation, test = (split_of([[np.zeros(16, np.uint8)]], [0], title) for title in "abc")
    data = Ranges("p", "image", train, validation, test, ("x",), 256, 16)
    with pytest.raises(ValueError, match="length: expected 16, every pixel of a picture, got 9; leave it out"):
        job(data, length=9)


def test_the_part_to_be_judged_by_can_be_chosen():
    spec = "listops:train=9,validation=2,test=3,shortest=4,longest=50"
    assert TASK.open(spec, TASK.settings()).sizes == (9, 3)
    assert TASK.open(spec, TASK.settings(judged_by="validation")).sizes == (9, 2)


def test_data_of_another_kind_is_refused():
    data = pairs()
    settled = job(data)
    other = TASK.open("listops:train=9,validation=2,test=3,shortest=4,longest=50", TASK.settings())
    with pytest.raises(ValueError, match=r"data: expected retrieval with 2 classes, .* got listops with 10"):
        TASK.check_data(Trained(TASK, settled, torch.nn.Identity()), other)


@pytest.mark.parametrize("change", [{"classes": "many"}, {"symbols": 10**9}, {"data_kind": "sounds"}, {"pairs": 1}])
def test_facts_out_of_a_file_are_checked(change: dict[str, object]):
    settled = job(pairs())
    with pytest.raises(ValueError, match="expected"):
        TASK.check_job(Job("sequence_small", {}, settled.recipe, settled.settings, {**settled.facts, **change}))


@pytest.mark.exhaustive
def test_a_comparison_tells_milliseconds_of_a_step(tmp_path: Path):
    command = ["compare", "--task", "ranges", "--model", "sequence_small", "--seeds", "1", "--jobs", "0"]
    command += ["--data", "listops:train=16,validation=2,test=4,shortest=4,longest=40", "--mechanisms", "none,mala"]
    command += ["--set=steps=2", "--set=eval_steps=2", "--set=batch_size=4", "--set=workers=0"]
    done = CliRunner().invoke(build_app(), [*command, "--output", str(tmp_path / "c")])
    assert done.exit_code == 0, done.output
    page = (tmp_path / "c" / "report.html").read_text(encoding="utf-8")
    assert "ms/step: one training step" in page
    assert "<th>ms/step</th>" in page
