"""Weights that tell what they are, handed to every command that takes weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from affinear.cli import build_app
from affinear.tasks import find, load_trained
from affinear.tasks.networks import open_network

# A network that is not the default of its name: other depth, width and mechanism.
MADE = ("depth=2", "embed_dim=16", "num_heads=2", "patch_size=8", "mechanism=nala")
ARGS = [word for made in MADE for word in ("--model-arg", made)]
LEARN = ["--recipe", "tiny", "--epochs", "1", "--batch-size", "8", "--image-size", "32x48", "--workers", "0"]


STILL = ["--lr", "1e-12", "--set", "min_lr=0", "--set", "warmup_lr=0", "--set", "warmup_epochs=0"]


def run(*arguments: str | Path):
    return CliRunner().invoke(build_app(), [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    noise = np.random.default_rng()
    for name in ("cat", "dog"):
        (folder / name).mkdir()
        for number in range(12):
            pixels = noise.integers(0, 256, (32, 48, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def folder(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("weights") / "run"
    result = run("train", "inline_deit_tiny", "--data", photos, *ARGS, *LEARN, "--output", output)
    assert result.exit_code == 0, result.output
    return output


def test_a_network_is_opened_as_its_weights_tell(folder: Path):
    pixels = torch.randn(2, 3, 32, 48)
    truth = load_trained(folder).network
    for weights in (folder, folder / "best.safetensors"):
        opened = open_network(None, weights)
        config: Any = opened.network.pretrained_cfg
        assert (opened.name, config["input_size"], config["label_names"]) == (
            "inline_deit_tiny",
            (3, 32, 48),
            ["cat", "dog"],
        )
        with torch.inference_mode():
            assert torch.equal(opened.network(pixels), truth(pixels))


def test_what_contradicts_the_weights_is_refused(folder: Path):
    with pytest.raises(ValueError, match="these weights are of inline_deit_tiny, not of mavit_tiny"):
        open_network("mavit_tiny", folder)
    with pytest.raises(ValueError, match="tells 2 classes apart, not 1000"):
        open_network("inline_deit_tiny", folder, num_classes=1000)
    with pytest.raises(ValueError, match="trained with mechanism='nala', not with mechanism='mala'"):
        load_trained(folder, model_args={"mechanism": "mala"})
    with pytest.raises(ValueError, match="trained with no mlp_ratio set, not with mlp_ratio=2"):
        load_trained(folder, model_args={"mlp_ratio": 2})


def test_converted_weights_tell_their_name(tmp_path: Path):
    saved = open_network("inline_deit_tiny", num_classes=3).network
    save_file(dict(saved.state_dict()), tmp_path / "bare.safetensors")
    converted = tmp_path / "converted.safetensors"
    result = run("convert", tmp_path / "bare.safetensors", "--model", "inline_deit_tiny", "-o", converted)
    assert result.exit_code == 0, result.output
    assert open_network(None, converted).name == "inline_deit_tiny"
    with pytest.raises(ValueError, match="these weights are of inline_deit_tiny, not of inline_deit_small"):
        open_network("inline_deit_small", converted)
    with pytest.raises(ValueError, match="name it with --model"):
        open_network(None, tmp_path / "bare.safetensors")


def test_lens_report_looks_into_the_network_that_was_trained(folder: Path, photos: Path, tmp_path: Path):
    page = tmp_path / "report.html"
    result = run("lens", "report", "--weights", folder, "--data", photos, "--rows", "4", "--limit", "2", "-o", page)
    assert result.exit_code == 0, result.output
    told = page.read_text()
    assert "nala" in told
    assert "blocks.1.attn" in told
    assert "blocks.2.attn" not in told
    assert "inline_deit_tiny" in told
    other = run("lens", "report", "--model", "mavit_tiny", "--checkpoint", folder, "--data", photos, "-o", page)
    assert other.exit_code == 1
    assert "these weights are of inline_deit_tiny, not of mavit_tiny" in other.stderr


def test_the_microscope_opens_the_network_that_was_trained(folder: Path, monkeypatch: pytest.MonkeyPatch):
    from affinear.lens import microscope

    seen: list[Any] = []
    monkeypatch.setattr(microscope, "serve", lambda *given, **named: seen.append(given[2]))
    result = run("lens", "--weights", folder, "--no-browser")
    assert result.exit_code == 0, result.output
    assert len(seen[0].model.blocks) == 2
    assert seen[0].model.pretrained_cfg["input_size"] == (3, 32, 48)


def test_training_begins_with_the_network_that_the_weights_tell(folder: Path, photos: Path, tmp_path: Path):
    command = ("train", "inline_deit_tiny", "--data", photos, *LEARN, "--weights", folder)
    result = run(*command, "--output", tmp_path / "a", *STILL)
    assert result.exit_code == 0, result.output
    about = json.loads((tmp_path / "a" / "run.json").read_text())
    assert about["model_args"]["mechanism"] == "nala"
    before, after = (load_file(path / "best.safetensors") for path in (folder, tmp_path / "a"))
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=1e-5, atol=1e-7)
    again = run(*command, "--output", tmp_path / "b", "--model-arg", "mechanism=mala")
    assert again.exit_code == 1
    assert "trained with mechanism='nala', not with mechanism='mala'" in again.stderr


def test_export_takes_the_folder_of_a_run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[Any] = []

    def asks(name: str | None, weights: Path | None, **_: Any) -> Any:
        asked.append((name, weights))
        raise ValueError("that is all")

    monkeypatch.setattr("affinear.tasks.networks.open_network", asks)
    result = run("export", folder, "--output", tmp_path / "a.onnx")
    assert (result.exit_code, asked) == (1, [(None, folder)])
    run("export", "mavit_tiny", "--output", tmp_path / "a.onnx")
    assert asked[1:] == [("mavit_tiny", None)]


def test_weights_of_a_run_need_no_converting(folder: Path, tmp_path: Path):
    result = run(
        "convert", folder / "last.safetensors", "--model", "mavit_base", "--output", tmp_path / "a.safetensors"
    )
    assert result.exit_code == 1
    assert "is of affinear train: predict, eval and train --weights take it as it is." in result.output


def test_a_question_ends_with_its_own_sign():
    result = run(
        "train", "sequence_smal", "--task", "ranges", "--data", "listops:train=4,test=2,validation=2", "--dry-run"
    )
    assert result.exit_code == 1
    assert result.output.rstrip().endswith("did you mean 'sequence_small'?")


def test_a_network_of_another_task_is_told(photos: Path):
    find("speech")  # which registers its networks
    result = run("train", "conformer_small", "--data", photos, "--dry-run")
    assert result.exit_code == 1
    assert (
        "model: expected a network that tells images apart, such as mavit_tiny, got 'conformer_small'." in result.output
    )


@pytest.mark.exhaustive  # tests/models/test_export.py has ONNX, and the fixtures here what weights tell
def test_export_compares_with_the_network_that_was_trained(folder: Path, tmp_path: Path):
    pytest.importorskip("onnxruntime")
    onnx = pytest.importorskip("onnx")
    result = run("export", "--weights", folder, "--fixed-size", "-o", tmp_path / "a.onnx")
    assert result.exit_code == 0, result.output
    import onnxruntime

    pixels = torch.randn(2, 3, 32, 48)
    session = onnxruntime.InferenceSession(tmp_path / "a.onnx")
    with torch.inference_mode():
        truth = load_trained(folder).network(pixels)
    found = torch.as_tensor(session.run(["logits"], {"image": pixels.numpy()})[0])
    torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-5)
    facts = {entry.key: entry.value for entry in onnx.load(tmp_path / "a.onnx").metadata_props}
    assert json.loads(facts["class_names"]) == ["cat", "dog"]
    assert json.loads(facts["input_size"]) == [3, 32, 48]
    assert json.loads(facts["mean"]) == pytest.approx(load_trained(folder).job.settings.mean)


def test_eval_of_class_folders_takes_all_images_and_says_so(folder: Path, photos: Path):
    every = run("eval", folder, "--data", photos, "--workers", "0")
    assert every.exit_code == 0, every.output
    assert ", 24 images" in every.stdout
    assert f"Measured on all images in {photos}." in every.stdout
    some = run("eval", folder, "--data", photos, "--workers", "0", "--held-out", "--json")
    assert some.exit_code == 0, some.output
    told = json.loads(some.stdout)
    assert told["images"] == 2
    assert "held out for testing" in told["data"]
