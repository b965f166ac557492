"""`affinear distil` on a tiny classifier."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from accelerate import PartialState
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import affinear.linearizing
from affinear import tasks
from affinear.cli import build_app
from affinear.tasks.distil.judging import teacher_score
from affinear.tasks.networks import open_network
from affinear.train import Run, devices, train


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
    own = tasks.evaluate(teacher, data)["top1"]
    student = tasks.evaluate(folder / "out" / "whole" / "last.safetensors", data)["top1"]
    assert f"Teacher: top-1 {own:.2%}. Student: top-1 {student:.2%}." in result.output
    assert json.loads((folder / "out" / "teacher.json").read_text())["score"]["top1"] == own
    opened = open_network(None, folder / "out" / "whole")  # what `affinear export` and `affinear lens` take
    assert affinear.linearizing.report_of(opened.network).swapped
    assert opened.network.pretrained_cfg["input_size"] == (3, 32, 32)  # pyright: ignore


def test_a_teacher_that_is_not_there_is_named(tiny: tuple[Any, str, Path], tmp_path: Path):
    made, data, _ = tiny
    for teacher, said in ((None, "got none"), ("nowhere", "got no such: nowhere")):
        setup = tasks.recipe_for("distil", made.MODEL, steps=1, batch_size=4, workers=0, teacher=teacher)
        with pytest.raises(ValueError, match=f"teacher: expected the folder of a run or a file of weights, {said}"):
            train(Run(made.MODEL, data, tmp_path / str(teacher), setup, made.MODEL_ARGS))


def judged(tiny: tuple[Any, str, Path], **changes: Any) -> Run:
    """A run whose teacher is to be measured."""
    made, data, folder = tiny
    told: dict[str, Any] = {"steps": 1, "batch_size": 4, "workers": 0, "image_size": (32, 32)}
    told["teacher"] = made.CHANGES["teacher"]
    setup = tasks.recipe_for("distil", made.MODEL, **{**told, **changes})
    return Run(made.MODEL, data, folder / "judged", setup, made.MODEL_ARGS)


def test_a_teacher_is_measured_once_and_another_anew(tiny: tuple[Any, str, Path], tmp_path: Path):
    found = teacher_score(judged(tiny), tmp_path)
    kept = tmp_path / "teacher.json"
    told = json.loads(kept.read_text())
    assert (told["score"], told["count"]) == (found, 6)
    told["score"]["top1"] = 0.125  # what no six images give: it is not measured again
    kept.write_text(json.dumps(told))
    for changes in ({}, {"mechanism": "linear", "stage": "layers"}):
        assert teacher_score(judged(tiny, **changes), tmp_path)["top1"] == 0.125
    other = tmp_path / "other.safetensors"
    tensors = load_file(tiny[0].CHANGES["teacher"])
    save_file({name: 2 * tensor for name, tensor in tensors.items()}, other)
    for changes in ({"crop_pct": 0.5}, {"teacher": str(other)}):
        kept.write_text(json.dumps(told))
        assert teacher_score(judged(tiny, **changes), tmp_path)["top1"] != 0.125
    told["score"]["top1"] = "most"
    for damaged in ("{", "[]", json.dumps({**told, "score": {}}), json.dumps(told)):
        kept.write_text(damaged)
        assert teacher_score(judged(tiny), tmp_path) == found
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.safetensors", "teacher.json"]


def test_processes_measure_a_teacher_together(
    tiny: tuple[Any, str, Path], tmp_path: Path, in_ranks: Callable[..., list[Any]]
):
    def measured() -> Any:
        PartialState._reset_state()  # pyright: ignore[reportPrivateUsage]  # what this process was before it was forked
        found = dict(teacher_score(judged(tiny), tmp_path))
        processes = PartialState().num_processes
        devices.part()
        return [found, processes]

    first, second = in_ranks(2, measured)
    assert first == second
    assert first[1] == 2
    kept = json.loads((tmp_path / "teacher.json").read_text())
    assert (kept["score"], kept["count"]) == (first[0], 6)
    alone = teacher_score(judged(tiny), tmp_path / "alone")
    assert alone == pytest.approx(first[0], rel=1e-5)
