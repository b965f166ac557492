"""Latents and weights of generators, damaged and hostile: a data set, a network, or a sentence."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
from fuzzing import Tally, changed, damaged, for_a_while, hostile
from safetensors.numpy import save

from affinear.models.making import make
from affinear.models.sealing import sealed
from affinear.tasks import load_trained
from affinear.tasks.generate import TASK
from affinear.tasks.generate.opening import open_pictures
from affinear.tasks.generate.settings import Generation
from affinear.train import Recipe, Setup

MODEL = "dit_s_2"
SMALL: dict[str, Any] = {"depth": 1, "embed_dim": 8, "num_heads": 2}
SETTINGS = Generation(process="flow", sampler="euler", image_size=(8, 8))
ABOUT: dict[str, Any] = {
    "model": MODEL,
    "model_args": SMALL,
    "facts": {"class_names": ["cat", "dog"], "channels": 3, "latent": False},
    **json.loads(Setup(TASK, Recipe(), SETTINGS).to_json()),
    "epoch": 3,
}


def arrays(draw: random.Random) -> dict[str, Any]:
    """Latents and labels, of which one may be anything."""
    found: dict[str, Any] = {"latents": np.zeros((3, 4, 2, 2), np.float32), "labels": np.arange(3)}
    if draw.random() < 0.5:
        kind = draw.choice((np.float16, np.float64, np.int64, np.uint8, np.complex64, bool))
        shape = tuple(draw.randint(0, 3) for _ in range(draw.randint(0, 5)))
        found[draw.choice(("latents", "labels", "other"))] = np.full(shape, draw.choice((0, 1, 200))).astype(kind)
    return found


def test_hostile_latents(tally: Tally, draw: random.Random, tmp_path: Path):
    for number in for_a_while(4):
        folder = tmp_path / str(number)
        folder.mkdir()
        for half in ("train", "test")[: draw.randint(1, 2)]:
            content, ending = arrays(draw), draw.choice(("npz", "safetensors"))
            file = io.BytesIO()
            if ending == "npz":
                if draw.random() < 0.1:
                    content["other"] = np.array([hostile(draw)], dtype=object)
                np.savez(file, **content)
            else:
                file.write(
                    save({name: np.atleast_1d(part) for name, part in content.items() if part.dtype != np.complex64})
                )
            whole = file.getvalue()
            (folder / f"{half}.{ending}").write_bytes(damaged(draw, whole) if draw.random() < 0.4 else whole)
        if draw.random() < 0.3:
            (folder / "classes.txt").write_bytes(draw.randbytes(20))
        tally.attempt(f"latents {number}", lambda folder=folder: open_pictures(str(folder)).fingerprint, ValueError)
    tally.check()


def test_what_weights_of_generators_say_about_themselves(tally: Tally, draw: random.Random, tmp_path: Path):
    tensors = make(MODEL, {**SMALL, "num_classes": 2, "in_chans": 3, "learn_sigma": False}).state_dict()
    path = tmp_path / "a.safetensors"
    for _ in for_a_while():
        told = ABOUT
        for _ in range(draw.choice((1, 1, 2, 5))):
            told = changed(draw, told)
        try:
            path.write_bytes(sealed(tensors, {"format": "pt", "about": json.dumps(told)}))
        except UnicodeEncodeError:
            continue  # half a letter, which no file can hold
        tally.attempt(f"about {told!r}"[:500], lambda: load_trained(path), ValueError)
    tally.check()
