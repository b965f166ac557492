"""Generation: images are drawn as the library draws them, and a cell is trained, judged and told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from affinear.tasks.generate.drawing import as_bytes
from affinear.tasks.generate.process import Flow
from affinear.tasks.generate.sampling import Way, sample

SMALL = ("embed_dim=16", "depth=1", "num_heads=2")


@pytest.fixture
def generate(script: Any) -> Any:
    found = script("generate")
    found.opened.cache_clear()
    return found


@pytest.fixture
def sheets(script: Any, tmp_path: Path) -> Path:
    """Two sheets of training images, and one of test images, which nobody learns from."""
    packing, random = script("packing.pack_cifar10"), np.random.default_rng()
    for name in ("data_batch_1", "data_batch_2", "test_batch"):
        rows = random.integers(0, 256, (50, 3073), np.uint8)
        rows[:, 0] %= 10
        (tmp_path / f"{name}.webp").write_bytes(packing.packed(rows))
    return tmp_path


def given(generate: Any, sheets: Path, *more: str) -> Any:
    told = ["--data", str(sheets), "--output", str(sheets / "out"), "--features", "random", "--batch", "5"]
    told += [word for one in SMALL for word in ("--model-arg", one)]
    return generate.parsed([*told, "--made", "12", "--sample-steps", "4", "--sample-batch", "6", *more])


def test_images_are_made_as_the_library_makes_them(generate: Any, sheets: Path):
    asked, device = given(generate, sheets), torch.device("cpu")
    network = generate.network_of("mala", asked)
    for parameter in network.parameters():  # or what ends would be nothing
        torch.nn.init.normal_(parameter, std=0.3)
    sampler = generate.Sampler(network, 7, 5, device)
    for _ in range(2):
        noise = torch.randn(7, 3, 32, 32)
        with torch.no_grad():
            wanted = sample(network, Flow(), Way("euler", 5), noise, torch.arange(7) % 10)
        assert (as_bytes(wanted).int() - sampler(noise).int()).abs().max() <= 1


def test_every_image_comes_as_often_as_any_other(generate: Any):
    order, flips, untold = generate.draws(40, 200, 4, 0, torch.device("cpu"))
    assert torch.bincount(order.flatten(), minlength=40).tolist() == [20] * 40
    assert 0.4 < flips.float().mean() < 0.6
    assert 0.05 < untold.float().mean() < 0.15


def test_images_and_noise_are_the_same_in_all_arms(generate: Any, sheets: Path):
    asked = given(generate, sheets)
    pictures = generate.opened(sheets, None)
    assert pictures.sheets == (50, 50)
    losses: list[float] = []
    for arm in ("softmax", "none"):
        learner = generate.learner_of(arm, 3, 2, pictures, asked)
        torch.nn.init.zeros_(learner.network.head.weight)
        losses.append(learner.loss_of(learner.at).item())
    assert losses[0] == losses[1]


def test_a_cell_is_trained_judged_and_told(generate: Any, sheets: Path, monkeypatch: pytest.MonkeyPatch):
    asked = given(generate, sheets, "--steps", "3", "--seeds", "2", "--arms", "nala", "--cell", "nala-2")
    monkeypatch.setattr("sys.argv", ["generate"])
    generate.cell(asked)
    (one,) = cells = generate.cells_of(asked, ["nala"], 3, 0.0)
    found = one.read()
    assert (found["arm"], found["seed"], found["steps"], found["images"]) == ("nala", 2, 3, 100)
    assert found["score"]["frechet"] > 0
    check = json.loads((sheets / "out" / "check.json").read_text())
    assert check["images"] == [50, 50]
    assert 0 < check["frechet"] < found["score"]["frechet"]
    assert "| nala | 1 |" in generate.tell(cells, asked)
    assert (sheets / "out" / "samples.png").is_file()
    told = json.loads((sheets / "out" / "generate.json").read_text())
    assert told["losses"] == [{"arm": "nala", "seed": 2, "loss": found["losses"], "at": [3]}]


def test_all_arms_are_trained_for_as_many_steps_as_there_is_time_for(
    generate: Any, sheets: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(generate, "BESIDE", 0.0)
    monkeypatch.setattr(
        generate, "seconds_of", lambda asked, arm: {"none": 100.0, "mala": 400.0, "linear": 5000.0}[arm]
    )
    told = ["generate", "--data", str(sheets), "--output", str(sheets / "out"), "--features", "random", "--batch", "5"]
    told += [word for one in SMALL for word in ("--model-arg", one)]
    told += ["--made", "12", "--sample-steps", "4", "--sample-batch", "6", "--arms", "none,mala,linear"]
    monkeypatch.setattr("sys.argv", [*told, "--minutes", "100", "--least", "5"])
    assert generate.main() == 0
    found = json.loads((sheets / "out" / "generate.json").read_text())["cells"]
    assert [one["arm"] for one in found] == ["none", "mala"]
    assert {one["steps"] for one in found} == {10}  # in 85 minutes
    assert "| mala | 1 |" in capsys.readouterr().out


def test_nothing_is_told_of_a_cell_that_was_cut_off(generate: Any, sheets: Path):
    generate.cell(given(generate, sheets, "--steps", "3", "--until", "0", "--cell", "none-0"))
    assert not (sheets / "out" / "cells" / "none-0.json").exists()
