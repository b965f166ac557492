"""Weights of every task, and linearized networks, that say other things of themselves: a network, or a sentence."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from fuzzing import SECONDS, Tally, changed, damaged, for_a_while
from safetensors import safe_open

import affinear
from affinear import linearizing, tasks
from affinear.models.sealing import SEAL, sealed
from affinear.tasks import load_trained
from affinear.train import Run, curves, train

PLACE = Path(__file__).parents[1] / "tasks"
LENGTH: dict[str, Any] = {"steps": 1, "eval_steps": 1, "save_every": 1, "log_every": 1, "workers": 0}


def trained(name: str, folder: Path) -> Path:
    """The weights of a run of one step, of what the task's contract is tried on."""
    spec = importlib.util.spec_from_file_location(f"tiny_{name}", PLACE / name / "tiny.py")
    assert spec is not None
    assert spec.loader is not None
    tiny: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tiny)
    (folder / name / "data").mkdir(parents=True)
    data = tiny.data(folder / name / "data")
    setup = tasks.recipe_for(tasks.find(name), tiny.MODEL, **{**LENGTH, **tiny.CHANGES})
    return train(Run(tiny.MODEL, data, folder / name / "run", setup, tiny.MODEL_ARGS)).last


def apart(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    with safe_open(path, "pt") as file:
        told = {name: value for name, value in file.metadata().items() if name != SEAL}
        return {name: file.get_tensor(name) for name in file.keys()}, told  # noqa: SIM118


@pytest.mark.filterwarnings("ignore")
def test_what_weights_of_every_task_say(
    tally: Tally,
    draw: random.Random,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setenv("AFFINEAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(curves, "draw", lambda output, *given: None)
    names = [name for name in tasks.names() if name != "classify"]
    whole: dict[str, tuple[dict[str, torch.Tensor], dict[str, str]]] = {}
    for name in names:
        path = trained(name, tmp_path)
        whole[name] = apart(path)
        load_trained(path)  # and all that is imported on the way
    path = tmp_path / "a.safetensors"
    for _ in for_a_while(2 * SECONDS):
        name = draw.choice(names)
        tensors, said = whole[name]
        told = json.loads(said["about"])
        for _ in range(draw.choice((1, 1, 2, 5))):
            told = changed(draw, told)
        try:
            path.write_bytes(sealed(tensors, {**said, "about": json.dumps(told)}))
        except UnicodeEncodeError:
            continue  # half a letter, which no file can hold
        tally.attempt(f"{name}: about {told!r}"[:900], lambda: load_trained(path), ValueError)
    tally.check()


@pytest.mark.filterwarnings("ignore")
def test_what_linearized_networks_say(tally: Tally, draw: random.Random, tmp_path: Path):
    args: dict[str, Any] = {"depth": 2, "embed_dim": 16, "num_heads": 2, "patch_size": 8, "img_size": 32}
    student, _ = affinear.linearize(timm.create_model("vit_tiny_patch16_224", **args), gain=True)
    weights, beside = linearizing.save(student, tmp_path / "a.safetensors", model_args=args)
    told, tensors = json.loads(beside.read_bytes()), weights.read_bytes()
    linearizing.load(weights)
    for _ in for_a_while():
        said = told
        for _ in range(draw.choice((1, 1, 2, 5))):
            said = changed(draw, said)
        text = json.dumps(said).encode()
        if draw.random() < 0.3:
            text = draw.choice((damaged(draw, text), b"[" * 100_000, b'{"format": ' + b"9" * 10_000 + b"}"))
        beside.write_bytes(text)
        weights.write_bytes(damaged(draw, tensors) if draw.random() < 0.2 else tensors)
        tally.attempt(f"{text[:600]!r}", lambda: linearizing.load(weights), ValueError)
    tally.check()
