"""Long ranges, as short as they go, for the contract of tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

MODEL = "sequence_small"
MODEL_ARGS: dict[str, Any] = {"width": 8, "inner": 8, "hidden": 16, "depth": 1}
CHANGES: dict[str, Any] = {"batch_size": 4, "dropout": 0.1, "ema_decay": 0.9, "test_batch": 4, "warmup_steps": 1}
WITHOUT_CHANCE: dict[str, Any] = {"dropout": 0.0}


def data(folder: Path) -> str:
    """What `--data` takes: expressions that nobody has seen."""
    seed = int(np.random.default_rng().integers(2**31))
    return f"listops:train=14,validation=3,test=6,shortest=4,longest=40,seed={seed}"


def wrong(folder: Path) -> str:
    """Write what is no data set, and say what `--data` would take."""
    (folder / "basic_train.tsv").write_text("Source\tTarget\n[MAX 1 2 ]\tmany\n", encoding="utf-8")
    return str(folder)


def sources(folder: Path) -> tuple[list[str], list[str]]:
    """What predictions are asked about: what can be answered, and what cannot."""
    (folder / "kept.txt").write_text("[MIN 3 [MAX 1 2 ] ]", encoding="utf-8")
    return ["[SM 9 8 [MED 1 2 3 ] ]", str(folder / "kept.txt")], ["[TIMES 2 3 ]", str(folder / "absent.txt")]
