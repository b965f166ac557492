"""`affinear distil` on a tiny classifier."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from affinear import tasks
from affinear.cli import build_app
from affinear.train import Run, train


@pytest.fixture(scope="module")
def tiny(module_at: Callable[[Path], Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str, Path]:
    made = module_at(Path(__file__).with_name("tiny.py"))
    folder = tmp_path_factory.mktemp("distil")
    (folder / "data").mkdir()
    return made, made.data(folder / "data"), folder


def test_both_stages_run_and_the_first_changes_swapped_layers_alone(tiny: tuple[Any, str, Path]):
    made, data, folder = tiny
    changes = {"epochs": 1, "steps": 2, "batch_size": 4, "workers": 0, "image_size": (32, 32)}
    setup = tasks.recipe_for("classify", made.MODEL, "finetune", **changes, augment="simple")
    teacher = folder / "teacher"
    train(Run(made.MODEL, data, teacher, setup, {k: v for k, v in made.MODEL_ARGS.items() if k != "img_size"}))
    told = [
        "distil",
        str(teacher),
        "--data",
        data,
        "-o",
        str(folder / "out"),
        "--layer-epochs",
        "1",
        "--epochs",
        "1",
        "--no-timing",
    ]
    told += ["--set", "batch_size=4", "--set", "workers=0", "--set", "gain=true"]
    result = CliRunner().invoke(build_app(), told)
    assert result.exit_code == 0, result.output
    before = load_file(teacher / "best.safetensors")
    for stage in ("layers", "whole"):
        after = load_file(folder / "out" / stage / "last.safetensors")
        changed = {name for name, tensor in before.items() if not tensor.equal(after[name])}
        assert changed
        assert all(".attn." in name for name in changed) == (stage == "layers")
        assert "Layer by layer" in (folder / "out" / stage / "report.html").read_text()
    assert "blocks.0.attn.linearized.gain" in after
    score = tasks.evaluate(folder / "out" / "whole", data)
    assert score.count == 6


def test_a_teacher_that_is_not_there_is_named(tiny: tuple[Any, str, Path], tmp_path: Path):
    made, data, _ = tiny
    for teacher, said in ((None, "got none"), ("nowhere", "got no such: nowhere")):
        setup = tasks.recipe_for("distil", made.MODEL, steps=1, batch_size=4, workers=0, teacher=teacher)
        with pytest.raises(ValueError, match=f"teacher: expected the folder of a run or a file of weights, {said}"):
            train(Run(made.MODEL, data, tmp_path / str(teacher), setup, made.MODEL_ARGS))
