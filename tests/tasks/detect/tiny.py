"""Detection, as small as it goes, for the contract of tasks."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

MODEL = "mavit_tiny"
MODEL_ARGS: dict[str, Any] = {
    "embed_dims": (8, 8, 16, 16),
    "depths": (1, 1, 1, 1),
    "num_heads": (1, 1, 2, 2),
}
CHANGES: dict[str, Any] = {
    "batch_size": 2,
    "crop": (64, 64),  # smaller images stay smaller, so that padding is there too
    "short_sides": (),
    "test_side": 64,
    "channels": 32,
    "rois": 12,
    "detections": 4,
    "drop_path": 0.2,
    "ema_decay": 0.9,
    "test_batch": 2,
    "sync_bn": False,
}
WITHOUT_CHANCE: dict[str, Any] = {"drop_path": 0.0}
SAME_IN_TWO = False  # batch norms see half of a batch, and regions are drawn on the device


def data(folder: Path) -> str:
    """Write a data set, and say what `--data` takes."""
    spec = importlib.util.spec_from_file_location("shapes", Path(__file__).with_name("conftest.py"))
    assert spec is not None
    assert spec.loader is not None
    shapes = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(shapes)
    seed = int(np.random.default_rng().integers(2**31))
    return str(shapes.make_coco(folder, train=4, test=3, seed=seed))


def wrong(folder: Path) -> str:
    """Write what is no data set, and say what `--data` would take."""
    (folder / "annotations").mkdir(parents=True)
    return str(folder)


def sources(folder: Path) -> tuple[list[str], list[str]]:
    """What predictions are asked about: what can be answered, and what cannot."""
    Image.new("RGB", (70, 50), "red").save(folder / "red.png")
    (folder / "broken.png").write_bytes(b"\x89PNG and then nothing")
    return [str(folder / "red.png")], [str(folder / "broken.png"), str(folder / "absent.png")]
