"""`affinear train`, `eval` and `predict`, as a user meets them."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import affinear.train
from affinear.cli import build_app
from affinear.train import Interrupted

NETWORK = (
    "inline_deit_tiny --model-arg depth=1 --model-arg embed_dim=16 --model-arg num_heads=2 --model-arg patch_size=2"
)
TRAIN = f"train {NETWORK} --data digits --recipe tiny --epochs 1 --batch-size 256 --image-size 8 --workers 0"


def run(*arguments: str | Path):
    return CliRunner().invoke(build_app(), [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("cli") / "run"
    result = run(*TRAIN.split(), "--output", output)
    assert result.exit_code == 0, result.output
    assert f"Best weights: {output / 'best.safetensors'}" in result.stdout.replace("\n", "")
    assert "epoch 1 of 1" in result.stderr
    assert "\x1b" not in result.output  # no control characters where it is not a terminal
    return output


def test_a_run_leaves_all_its_files(folder: Path):
    names = {path.name for path in folder.iterdir()}
    assert {
        "run.json",
        "log.jsonl",
        "best.safetensors",
        "last.safetensors",
        "curves.png",
        "report.html",
        "tensorboard",
    } <= names
    assert len([name for name in names if name.startswith("step-")]) == 1


def test_the_same_command_again_changes_nothing_and_another_is_refused(folder: Path):
    assert run(*TRAIN.split(), "--output", folder).exit_code == 0
    other = run(*TRAIN.split(), "--output", folder, "--lr", "0.5")
    assert other.exit_code == 1
    assert "recipe.lr is 0.001 there and 0.5 now" in other.stderr.replace("\n", " ")
    anew = run(*TRAIN.split(), "--output", folder, "--no-resume")
    assert anew.exit_code == 1
    assert "--force to remove it" in anew.stderr


def test_eval_tells_what_training_told(folder: Path):
    result = run("eval", folder, "--data", "digits", "--workers", "0", "--json")
    assert result.exit_code == 0, result.output
    score = json.loads(result.stdout)
    last = json.loads((folder / "log.jsonl").read_text().splitlines()[-1])
    assert (score["top1"], score["top5"], score["images"]) == (last["test"]["top1"], last["test"]["top5"], 359)
    assert [part["name"] for part in score["classes"]] == list("0123456789")
    told = run("eval", folder, "--data", "digits", "--workers", "0")
    assert f"top-1 {score['top1']:.2%}" in told.stdout


def test_predict_answers_what_it_can_and_says_what_it_cannot(folder: Path, tmp_path: Path):
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "null.png")
    (tmp_path / "broken.png").write_bytes(b"\x89PNG and then nothing")
    good = run("predict", tmp_path / "null.png", "--weights", folder)
    assert good.exit_code == 0, good.output
    assert good.stdout.count("%") == 5
    both = run("predict", tmp_path / "broken.png", tmp_path / "null.png", "--weights", folder, "--json", "--top", "3")
    assert both.exit_code == 1
    broken, whole = json.loads(both.stdout)
    assert broken["guesses"] == []
    assert broken["error"]
    assert len(whole["guesses"]) == 3
    lines = run("predict", tmp_path / "broken.png", tmp_path / "null.png", "--weights", folder)
    assert lines.exit_code == 1
    assert "broken.png: cannot be read" in lines.stdout
    assert "null.png: " in lines.stdout
    drawn = run("predict", tmp_path / "null.png", "--class", "7", "--weights", folder)
    assert drawn.exit_code == 1
    assert "--class: --task classify draws no classes; name files or folders" in drawn.output


def test_predict_takes_a_folder_of_images(folder: Path, tmp_path: Path):
    for name in ("b.png", "a.png", "deep/c.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("no image")
    result = run("predict", tmp_path, "--weights", folder, "--json", "--top", "1")
    assert result.exit_code == 0, result.output
    assert [answer["image"] for answer in json.loads(result.stdout)] == [
        str(tmp_path / name) for name in ("a.png", "b.png", "deep/c.png")
    ]
    (tmp_path / "empty").mkdir()
    assert "it is a folder" in run("predict", tmp_path / "empty", "--weights", folder).stdout


def test_fine_tuning_without_weights_says_that_it_starts_from_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def stop(*given: Any, **named: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(affinear.train, "train", stop)
    tuned = run(*TRAIN.replace("--recipe tiny", "--recipe finetune").split(), "--output", tmp_path / "run")
    assert "it starts from nothing" in tuned.stderr
    assert "it starts from nothing" not in run(*TRAIN.split(), "--output", tmp_path / "run").stderr


def test_a_dry_run_plans_and_writes_nothing(tmp_path: Path):
    result = run(*TRAIN.split(), "--output", tmp_path / "run", "--dry-run", "--set", "ema_decay=0.99")
    assert result.exit_code == 0, result.output
    for word in (
        "5: 1 epochs of 5 steps of 256 samples",
        "learning rate",
        "memory",
        '"ema_decay": 0.99',
        "1,438 training",
    ):
        assert word in result.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("train mavit_tinny --data digits", "model: expected a network such as"),
        (f"{TRAIN} --set epoch=3", "no field is called 'epoch'; did you mean 'epochs'"),
        (f"{TRAIN} --set epochs", "expected field=value"),
        (f"{TRAIN} --recipe tyni", "did you mean 'tiny'"),
        (f"{TRAIN} --image-size big", "image_size: expected a side such as 224"),
        (f"{TRAIN} --precision fp12", "precision: expected one of no, bf16, fp16"),
        (f"{TRAIN} --model-arg depth", "--model-arg: expected name=value"),
        (
            f"{TRAIN} --weights nowhere.safetensors",
            "weights: nowhere.safetensors: expected the folder of a run",
        ),
        (f"{TRAIN} --batch-size 5000", "do not fill a batch of 5000"),
        ("eval nowhere --data digits", "got nothing of that name"),
        ("predict a.png --weights nowhere", "got nothing of that name"),
    ],
)
def test_mistakes_are_told_in_a_sentence(
    arguments: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    result = run(*arguments.split())
    assert result.exit_code == 1, result.output
    assert sentence in result.stderr
    assert "Traceback" not in result.output
    assert isinstance(result.exception, SystemExit)


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (Interrupted("Stopped by Ctrl-C, and saved.", signal.SIGINT), 130, "Stopped by Ctrl-C, and saved."),
        (Interrupted("Stopped by a signal, and saved.", signal.SIGTERM), 143, "Stopped by a signal"),
        (KeyboardInterrupt(), 130, "Stopped at once"),
    ],
)
def test_signals_end_with_the_code_a_shell_expects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, sentence: str
):
    def stop(*given: Any, **named: Any) -> None:
        raise error

    monkeypatch.setattr(affinear.train, "train", stop)
    result = run(*TRAIN.split(), "--output", tmp_path / "run")
    assert result.exit_code == code
    assert sentence in result.stderr
