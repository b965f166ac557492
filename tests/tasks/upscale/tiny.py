"""Super-resolution, as small as it goes, for the contract of tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

MODEL = "upscaler_light"
MODEL_ARGS: dict[str, Any] = {"dim": 16, "depths": (2, 1), "num_heads": 2, "alternate": True, "window": 4}
CHANGES: dict[str, Any] = {
    "batch_size": 4,
    "crops": 2,
    "patch": 12,
    "scale": 3,
    "lr": 1e-3,
    "drop_path": 0.2,
    "ema_decay": 0.9,
    "test_batch": 2,
    "sched": "cosine",
}
WITHOUT_CHANCE: dict[str, Any] = {"drop_path": 0.0}


def data(folder: Path) -> str:
    """Write a data set, and say what `--data` takes."""
    random = np.random.default_rng()
    for name, count in (("train", 6), ("Set5", 2), ("Set14", 1)):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            height, width = (int(side) for side in random.integers(40, 60, 2))
            pixels = random.integers(0, 256, (height, width, 3), np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i}.png")
    return str(folder)


def wrong(folder: Path) -> str:
    """Write what is no data set, and say what `--data` would take."""
    (folder / "train").mkdir()
    (folder / "train" / "notes.txt").write_text("no photo")
    return str(folder)


def sources(folder: Path) -> tuple[list[str], list[str]]:
    """What predictions are asked about: what can be answered, and what cannot."""
    Image.new("RGB", (7, 5), "red").save(folder / "red.png")
    Image.new("RGBA", (1, 1), (9, 9, 9, 9)).save(folder / "dot.png")
    (folder / "broken.png").write_bytes(b"\x89PNG and then nothing")
    good = [str(folder / name) for name in ("red.png", "dot.png")]
    return good, [str(folder / "broken.png"), str(folder / "absent.png")]
