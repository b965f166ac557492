"""Files of weights, damaged and hostile: a network, or a sentence, and nothing is run or written."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import torch
from fuzzing import Tally, changed, damaged, for_a_while

import affinear as af
from affinear.models import checkpoints
from affinear.models.making import make
from affinear.models.sealing import broken, sealed
from affinear.tasks import load_trained
from affinear.tasks.classify import TASK, ClassifySettings
from affinear.train import Recipe, Setup
from affinear.train.about import about

MODEL = "affinear_trunk_micro"
SMALL: dict[str, Any] = {"depth": 1, "embed_dim": 8, "num_heads": 2, "img_size": 8}
SHOWN = ClassifySettings(image_size=(8, 8), mean=(0.5,), std=(0.5,), interpolation="bicubic", crop_pct=1.0)
ABOUT: dict[str, Any] = {
    "model": MODEL,
    "model_args": SMALL,
    "facts": {"class_names": ["cat", "dog"], "channels": 1},
    **json.loads(Setup(TASK, Recipe(), SHOWN).to_json()),
    "epoch": 3,
}


def tensors() -> dict[str, torch.Tensor]:
    return make(MODEL, {**SMALL, "num_classes": 2, "in_chans": 1}).state_dict()


def file_of(told: Any) -> bytes:
    return sealed(tensors(), {"format": "pt", "about": json.dumps(told)})


def test_what_weights_say_about_themselves(tally: Tally, draw: random.Random, tmp_path: Path):
    path = tmp_path / "a.safetensors"
    for _ in for_a_while():
        told = ABOUT
        for _ in range(draw.choice((1, 1, 2, 5))):
            told = changed(draw, told)
        try:
            path.write_bytes(file_of(told))
        except UnicodeEncodeError:
            continue  # half a letter, which no file can hold
        tally.attempt(f"about {told!r}"[:500], lambda: load_trained(path), ValueError)
    tally.check()


def test_damaged_files_of_weights(tally: Tally, draw: random.Random, tmp_path: Path):
    whole = file_of(ABOUT)
    path = tmp_path / "a.safetensors"
    for _ in for_a_while():
        content = damaged(draw, whole)
        path.write_bytes(content)
        tally.attempt(f"about of {content[:80]!r}", lambda: about(path), ValueError)
        told, is_broken = tally.attempt(f"seal of {content[:80]!r}", lambda: broken(path), ValueError, OSError)
        found, _ = tally.attempt(f"weights {content[:80]!r}", lambda: load_trained(path), ValueError)
        if found and content != whole and told and not is_broken and b'"sha256":' in content[:4000]:
            tally.bytes_lost.append(f"a change went unnoticed: {content[:200]!r}")
    tally.check()


def test_damaged_files_of_torch(tally: Tally, draw: random.Random, tmp_path: Path):
    stream, legacy = io.BytesIO(), io.BytesIO()
    content = {"model": tensors(), "epoch": 3, "optimizer": {"state": {}, "lr": 0.1}}
    torch.save(content, stream)
    torch.save(content, legacy, _use_new_zipfile_serialization=False)
    path = tmp_path / "a.pth"
    for _ in for_a_while():
        path.write_bytes(damaged(draw, draw.choice((stream, legacy)).getvalue()))
        tally.attempt("read", lambda: checkpoints.read(path), ValueError, OSError)
        tally.attempt("convert", lambda: checkpoints.convert(path, "inline_deit_tiny"), ValueError, OSError)
        tally.attempt("load", lambda: load_trained(path, MODEL, model_args=SMALL), ValueError, OSError)
    tally.check()


def test_damaged_states(tally: Tally, draw: random.Random, tmp_path: Path):
    whole = af.summarize(torch.randn(1, 5, 2, 4), torch.randn(1, 5, 2, 3)).save(tmp_path / "whole").read_bytes()
    path = tmp_path / "a.safetensors"
    for _ in for_a_while():
        path.write_bytes(damaged(draw, whole))
        tally.attempt(f"state {path.read_bytes()[:300]!r}", lambda: af.State.load(path), ValueError)
    tally.check()
