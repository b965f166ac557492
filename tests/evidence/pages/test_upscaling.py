"""The page of super-resolution says what was measured, and what follows from numbers alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def larger(arm: str, psnr: float, **args: Any) -> dict[str, Any]:
    photos = [{"set": "Set5", "psnr": psnr, "ssim": 0.8, "tiles": psnr - 0.1, "bicubic": 28.43}]
    about = {"recipe": {"batch_size": 8}, "settings": {"patch": 24}, "model_args": {"mechanism": arm, **args}}
    return {"arm": arm, "seed": 0, "steps": 4000, "photos": photos, "parameters": 80_000, **about}


def test_upscaling_stands_beside_bicubic_and_tells_what_follows_from_numbers_alone(
    written: Callable[..., str], tmp_path: Path
):
    told = {"machine": {"device": "CPU"}, "cells": [larger("mala", 29.1, dim=32), larger("none", 29.3, dim=32)]}
    (tmp_path / "upscale-x4.json").write_text(json.dumps(told))
    memory = {"tokens": 72_900, "heads": 2, "head_dim": 32, "dtype": "torch.float32", "device": "CPU"}
    memory |= {"weights_bytes": 100 * 2**30}
    memory |= {"rows": [{"level": "operator", "who": "mala", "milliseconds": 9.0, "peak_bytes": 2**30}]}
    (tmp_path / "upscale-memory.json").write_text(json.dumps(memory))
    text = written("upscaling", tmp_path, tmp_path / "page")
    assert "The arm without attention is the best" in text
    assert "made smaller (dim)" in text
    assert "Bicubic has 28.43: the metric is right. Over it: mala +0.67 dB, none +0.87 dB." in text
    assert "was not measured at 70,000 tokens" in text
    assert "| operator | mala | 9.0 | 1.000 | 99.0 % |" in text
    assert "The first holds; SDPA was not measured." in text


def test_upscaling_tells_what_takes_more_than_sdpa(written: Callable[..., str], tmp_path: Path):
    sizes = {"softmax, weights kept": 1000, "softmax, SDPA": 50, "mala": 40, "nala": 60}
    rows = [{"level": "layer", "who": who, "milliseconds": 1.0, "peak_bytes": size} for who, size in sizes.items()]
    memory = {"tokens": 72_900, "heads": 2, "head_dim": 32, "dtype": "torch.bfloat16", "device": "X1", "rows": rows}
    (tmp_path / "upscale-memory.json").write_text(json.dumps({**memory, "weights_bytes": 100}))
    text = written("upscaling", tmp_path, tmp_path / "page", "--note", "The machine was shared.")
    assert "The first holds; the second does not hold: more is taken by nala (layer)." in text
    assert "was not measured at 70,000 tokens" not in text
    assert "**What cannot be concluded.**\n\n- The machine was shared.\n- " in text


def test_a_peak_that_is_elsewhere_is_no_less_and_no_more(written: Callable[..., str], tmp_path: Path):
    sizes = {"softmax, SDPA": 50_000, "mala": 50_001, "linear": 49_000}
    rows: list[dict[str, Any]] = [
        {"level": "network", "who": who, "milliseconds": 1.0, "peak_bytes": size} for who, size in sizes.items()
    ]
    rows.insert(0, {"level": "network", "who": "softmax, weights kept", "out_of_memory": "of 20 GiB"})
    memory = {"tokens": 72_900, "heads": 2, "head_dim": 32, "dtype": "torch.bfloat16", "device": "X1", "rows": rows}
    (tmp_path / "upscale-memory.json").write_text(json.dumps({**memory, "weights_bytes": 100}))
    text = written("upscaling", tmp_path, tmp_path / "page")
    assert "| network | softmax, weights kept | does not fit |  |  |" in text
    assert "| network | mala | 1.0 | 0.000 |  |" in text
    assert "the second does not hold; as much, to 0.1 %, by mala (network): there the highest point is not in" in text
