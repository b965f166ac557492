"""Generation, as small as it goes, for the contract of tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

MODEL = "dit_s_2"
MODEL_ARGS: dict[str, Any] = {"embed_dim": 16, "depth": 2, "num_heads": 2, "mechanism": "mala"}
CHANGES: dict[str, Any] = {
    "batch_size": 4,
    "image_size": (8, 8),
    "ema_decay": 0.5,
    "sampler": "ddim",
    "sample_steps": 3,
    "made": 6,
    "judge_batch": 4,
}
SAME_IN_TWO = False  # noise is drawn by each process for itself


def data(folder: Path) -> str:
    """Write a data set, and say what `--data` takes."""
    chance = np.random.default_rng()
    for half, count in (("train", 4), ("val", 2)):
        for name in ("circle", "cross"):
            place = folder / half / name
            place.mkdir(parents=True)
            for number in range(count):
                Image.fromarray(chance.integers(0, 256, (10, 8, 3), np.uint8)).save(place / f"{number}.png")
    return str(folder)


def wrong(folder: Path) -> str:
    """Write what is no data set, and say what `--data` would take."""
    np.savez(folder / "train.npz", latents=np.zeros((3, 4, 8)), labels=np.zeros(3, np.int64))
    return str(folder)


def sources(folder: Path) -> tuple[list[str], list[str]]:
    """What predictions are asked about: what can be answered, and what cannot."""
    return ["cross", "0", "any"], ["7", "triangle"]
