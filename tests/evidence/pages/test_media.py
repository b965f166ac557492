"""Pages of results say first what cannot be concluded, and nothing that the cells do not."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


def written(page: str, found: Path, output: Path, *more: str) -> str:
    """The page, made by the script in a process of its own."""
    command = [sys.executable, str(ROOT / "evidence" / "pages" / "media.py"), page]
    command += ["--found", str(found), "--output", str(output), *more]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "evidence")}
    made = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert made.returncode == 0, made.stderr
    assert json.loads((output / f"{page}.json").read_text())
    text = (output / "README.md").read_text(encoding="utf-8")
    assert text.index("What cannot be concluded") < text.index("```sh")
    return text


def heard(folder: Path, arm: str, seed: int, wer: float, **more: Any) -> None:
    (folder / "cells").mkdir(exist_ok=True)
    told = {
        "cell": {"arm": arm, "seed": seed},
        "plan": {"steps": 900},
        "parameters": 4_000_000,
        "wer": wer,
        "cer": wer / 2,
    }
    told |= {"words": 5000, "recordings": 400, **more}
    (folder / "cells" / f"{arm}-{seed}.json").write_text(json.dumps(told))


def test_nothing_measured_is_a_page_that_says_so(tmp_path: Path):
    for page, said in (
        ("speech", "No network was trained yet"),
        ("generation", "No network was trained yet"),
        ("upscaling", "No network was trained yet"),
    ):
        (tmp_path / page).mkdir()
        assert said in written(page, tmp_path / page, tmp_path / "pages" / page)


@pytest.mark.parametrize(("behind", "said"), [(0.03, "the bar does not hold"), (0.009, "the bar holds")])
def test_speech_holds_mala_to_softmax_with_relative_positions(tmp_path: Path, behind: float, said: str):
    base = random.uniform(0.3, 0.5)
    for seed in range(3):
        heard(tmp_path, "softmax_relative", seed, base + 0.001 * seed)
        heard(tmp_path, "mala", seed, base + behind + 0.001 * seed)
    heard(tmp_path, "mala_causal", 0, base + 0.2, stream={"same_tokens": 999, "tokens": 1000})
    hour = {
        "machine": {"device": "X1"},
        "rows": [{"model": "m", "arm": "mala", "minutes": 60.0, "seconds": 0.5, "gib": 1.25}],
    }
    hour["rows"] += [{"model": "m", "arm": "softmax_relative", "minutes": 60.0, "would_need_gib": 180.0}]  # pyright: ignore
    (tmp_path / "speech_hour.json").write_text(json.dumps(hour))
    text = written("speech", tmp_path, tmp_path / "page")
    assert said in text
    assert "999 of 1,000 tokens" in text
    assert "Not measured: softmax, linear, nala, inline, none." in text
    assert "Some arms have 1 seed:" in text
    assert "180 of scores alone" in text
    assert f"{100 * (base + 0.001):.1f} ± 0.1" in text


def made(arm: str, seed: int, frechet: float) -> dict[str, Any]:
    score = {"frechet": frechet, "kernel": 0.02, "precision": 0.5, "recall": 0.4}
    return {"arm": arm, "seed": seed, "score": score, "parameters": 33e6, "steps": 1500, "settings": {"made": 5000}}


def test_generation_tells_arms_that_overlap_and_what_is_behind_sdpa(tmp_path: Path):
    cells = [made("softmax", s, 60.0 + s) for s in range(3)] + [made("mala", s, 61.0 + s) for s in range(3)]
    cells += [made("none", s, 90.0 + s) for s in range(3)]
    told = {"machine": {"device": "X1"}, "features": "inception", "cells": cells}
    (tmp_path / "generate.json").write_text(json.dumps(told))
    rows = [
        {"around": "plain", "pixels": 512, "tokens": 1024, "mechanism": name, "images_per_second": rate, "peak_gb": 1.0}
        for name, rate in (("softmax", 10.0), ("mala", 12.0), ("nala", 9.0))
    ]
    (tmp_path / "generate-speed.json").write_text(json.dumps({"steps": 50, "rows": rows}))
    text = written("generation", tmp_path, tmp_path / "page")
    assert "Not told apart from the best arm, softmax, as their seeds overlap: mala." in text
    assert "The arm without attention is 30.0 of distance behind" in text
    assert "Some arms have" not in text
    assert "| softmax | 3 | 61.0 ± 1.0 |" in text
    assert "Not for nala at 1,024 tokens (plain, 0.90)." in text


def larger(arm: str, psnr: float, **args: Any) -> dict[str, Any]:
    photos = [{"set": "Set5", "psnr": psnr, "ssim": 0.8, "tiles": psnr - 0.1, "bicubic": 28.43}]
    about = {"recipe": {"batch_size": 8}, "settings": {"patch": 24}, "model_args": {"mechanism": arm, **args}}
    return {"arm": arm, "seed": 0, "steps": 4000, "photos": photos, "parameters": 80_000, **about}


def test_upscaling_stands_beside_bicubic_and_tells_what_follows_from_numbers_alone(tmp_path: Path):
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


def test_upscaling_tells_what_takes_more_than_sdpa(tmp_path: Path):
    sizes = {"softmax, weights kept": 1000, "softmax, SDPA": 50, "mala": 40, "nala": 60}
    rows = [{"level": "layer", "who": who, "milliseconds": 1.0, "peak_bytes": size} for who, size in sizes.items()]
    memory = {"tokens": 72_900, "heads": 2, "head_dim": 32, "dtype": "torch.bfloat16", "device": "X1", "rows": rows}
    (tmp_path / "upscale-memory.json").write_text(json.dumps({**memory, "weights_bytes": 100}))
    text = written("upscaling", tmp_path, tmp_path / "page", "--note", "The machine was shared.")
    assert "The first holds; the second does not hold: more is taken by nala (layer)." in text
    assert "was not measured at 70,000 tokens" not in text
    assert "**What cannot be concluded.**\n\n- The machine was shared.\n- " in text
