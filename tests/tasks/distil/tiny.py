"""Distilling, as small as it goes, for the contract of tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import timm
from PIL import Image
from safetensors.torch import save_file
from torch import nn

MODEL = "vit_tiny_patch16_224"
MODEL_ARGS: dict[str, Any] = {"depth": 2, "embed_dim": 16, "num_heads": 2, "patch_size": 8, "img_size": 32}
CHANGES: dict[str, Any] = {"batch_size": 4, "image_size": (32, 32), "gain": True, "ema_decay": 0.9}
WITHOUT_CHANCE: dict[str, Any] = {}


def data(folder: Path) -> str:
    """Write a data set and a teacher, and say what `--data` takes."""
    draw = np.random.default_rng()
    for half, count in (("train", 5), ("val", 3)):
        for name in ("cat", "dog"):
            (folder / half / name).mkdir(parents=True)
            for number in range(count):
                pixels = draw.integers(0, 256, (36, 40, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / half / name / f"{number}.png")
    teacher: Any = timm.create_model(MODEL, num_classes=2, **MODEL_ARGS)
    for block in teacher.blocks:  # fresh attention is near the mean of all tokens, where softmax has nothing to teach
        nn.init.normal_(block.attn.qkv.weight, std=0.4)
    save_file(teacher.state_dict(), folder.parent / "teacher.safetensors")
    CHANGES["teacher"] = str(folder.parent / "teacher.safetensors")
    return str(folder)


def wrong(folder: Path) -> str:
    """Write what is no data set, and say what `--data` would take."""
    (folder / "notes.txt").write_text("no images here")
    return str(folder)


def sources(folder: Path) -> tuple[list[str], list[str]]:
    """What predictions are asked about: what can be answered, and what cannot."""
    Image.new("RGB", (30, 50), "red").save(folder / "red.png")
    (folder / "broken.png").write_bytes(b"\x89PNG and then nothing")
    return [str(folder / "red.png")], [str(folder / "broken.png"), str(folder / "absent.png")]
