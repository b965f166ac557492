"""Which class is taken for which: counted once for each image, in the table, the JSON and the report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from typer.testing import CliRunner

from affinear import cli
from affinear.tasks.classify.samples import NO_IMAGE, Batch
from affinear.tasks.classify.score import score
from affinear.train import confused

NAMES = ("cat", "dog", "cow")


def test_every_image_is_counted_at_its_class_and_what_it_was_taken_for():
    targets = torch.randint(-1, 3, (40,))
    targets[targets < 0] = NO_IMAGE
    logits = torch.randn(40, 3)
    batches = [Batch(logits[:25], targets[:25]), Batch(logits[25:], targets[25:])]
    found = score(lambda images: images, batches, NAMES, Accelerator(cpu=True))
    expected = [
        [int(((targets == row) & (logits.argmax(1) == column)).sum()) for column in range(3)] for row in range(3)
    ]
    assert found.confusion == tuple(map(tuple, expected))
    assert sum(map(sum, found.confusion)) == found.count


def test_many_classes_are_told_by_their_worst_pairs():
    names = [f"class {number}" for number in range(40)]
    taken = [[0] * 40 for _ in range(40)]
    taken[3][7], taken[1][2], taken[5][5] = 9, 4, 99
    assert confused.lines(names, taken) == [
        "Most often taken for another: class 3 for class 7 (9), class 1 for class 2 (4)."
    ]
    assert "<li>class 3 for class 7: 9</li>" in confused.html(names, taken)
    assert confused.lines(names, []) == []


def test_names_are_escaped_on_the_page():
    assert "<script>" not in confused.html(["<script>", "b"], [[1, 2], [3, 4]])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("confused") / "run"
    words = f"train affinear_trunk_micro --data digits --epochs 1 --set workers=0 --model-arg depth=1 -o {output}"
    done = CliRunner().invoke(cli.build_app(), words.split())
    assert done.exit_code == 0, done.output
    return output


def test_eval_and_the_report_show_it(run: Path):
    words = ["eval", str(run), "--data", "digits", "--workers", "0"]
    shown = CliRunner().invoke(cli.build_app(), words).stdout
    assert "Rows are what they are, columns what they were taken for:" in shown
    told = json.loads(CliRunner().invoke(cli.build_app(), [*words, "--json"]).stdout)
    assert sum(map(sum, told["confusion"])) == told["images"]
    assert sum(told["confusion"][i][i] for i in range(10)) == pytest.approx(told["top1"] * told["images"])
    assert "What is taken for what" in (run / "report.html").read_text()
