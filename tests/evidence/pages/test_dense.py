"""The pages about dense tasks say what was measured, what was not, and first what cannot be concluded."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[3]


def loaded(name: str) -> Any:
    """A file of evidence/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "evidence" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


detection_page, segmentation_page = map(loaded, ("pages/detection", "pages/segmentation"))
ARMS = ("mavit_tiny", "none", "resnet50")
KINDS = ("mask_rcnn", "cascade_mask_rcnn")


def nucleus(kind: str, arm: str, seed: int, ap: float) -> dict[str, Any]:
    numbers = {"ap": ap, "ap50": ap + 0.2, "ap75": ap - 0.1}
    plan = {"kinds": KINDS, "arms": ARMS, "steps": 200, "batch": 16, "cap": 400}
    cell = {"plan": "nuclei", "kind": kind, "arm": arm, "seed": seed}
    about = {"parameters": 4.3e7, "step_s": 0.21, "peak_gib": 7.25, "wall_s": 60.0, "device": "GPU", "images": 132}
    return {"cell": cell, "plan": plan, "box": numbers, "mask": {"ap": ap - 0.02}, **about}


def blood(seed: int, ap50: float) -> dict[str, Any]:
    made = nucleus("retinanet", "mavit_tiny", seed, ap50 - 0.2)
    made["cell"]["plan"] = "bccd"
    made["box"]["by_class"] = [0.7, 0.5, 0.4]
    return made


def scene(arm: str, seed: int, miou: float) -> dict[str, Any]:
    averaged = {"miou": miou, "macc": 0.7, "aacc": 0.9}
    recipe, settings = {"batch_size": 16, "lr": 1e-3}, {"crop": [320, 320], "zoom": [0.9, 1.6]}
    about = {"parameters": 1.7e7, "images_per_second": 99.0, "peak_memory": 3 * 2**30, "steps": 2000, "photos": 233}
    classes = {"sky": 0.9, "pole": 0.2}
    return {"arm": arm, "seed": seed, "last": averaged, "averaged": averaged, "classes": classes, **about} | {
        "recipe": recipe,
        "settings": settings,
    }


def test_a_page_of_detection_has_means_deviations_and_the_verdict(tmp_path: Path) -> None:
    aps = {("mask_rcnn", arm): 0.4 for arm in ARMS} | {("cascade_mask_rcnn", arm): 0.5 for arm in ARMS}
    cells = [nucleus(*key, seed, ap + 0.01 * seed) for key, ap in aps.items() for seed in range(3)]
    random.shuffle(cells)
    text = detection_page.written(tmp_path, cells)
    assert text.index("What cannot be concluded") < text.index(
        "| Mask R-CNN | mavit_tiny | 3 | 41.0 ± 1.0 | 61.0 ± 1.0"
    )
    assert "| Cascade Mask R-CNN | around none | 3 | 51.0 ± 1.0" in text
    assert "is met for all" in text
    assert "Blood" not in text
    assert (tmp_path / "README.md").read_text() == text
    worse = [nucleus("cascade_mask_rcnn", "none", seed, 0.3) for seed in range(3)]
    again = detection_page.written(tmp_path, [*worse, *(blood(seed, 0.85) for seed in range(3))])
    assert "is missed for around none" in again
    assert "| mean ± deviation | 65.0 ± 0.0 | 85.0 ± 0.0 |" in again
    assert "AP50 of 80 %: met" in again


def test_a_page_of_detection_says_what_is_missing_and_undecided(tmp_path: Path) -> None:
    assert "are not here yet" in detection_page.written(tmp_path / "none", [blood(0, 0.7)])
    one = detection_page.written(tmp_path / "one", [nucleus("mask_rcnn", "none", 0, 0.4)])
    assert "is undecided" in one
    assert "difference of a point or two is noise" in one


def test_a_page_of_segmentation_has_every_part_that_was_measured(tmp_path: Path) -> None:
    cells = [scene(arm, seed, 0.5 + 0.01 * seed) for seed in range(3) for arm in ("mavit_tiny", "resnet50")]
    rows = [{"name": "mavit_tiny", "images_per_second": 207.0, "peak_gb": 3.2, "size": [320, 320], "batch": 16}]
    wide = {"size": [512, 2048], "batch": 2, "parameters": 5e7, "gmacs": 940.0, "peak_gb": 11.0}
    upernet = [
        {"name": name, "images_per_second": speed, "turns": [speed, speed], **wide}
        for name, speed in (("mavit_small_linear", 9.0), ("mavit_small", 8.0), ("swin_small", 8.5))
    ]
    growth = [
        {"name": "linear", "side": 512, "peak_gb": 0.3, "seconds": 0.02, "model": "mavit_tiny_linear"},
        {"name": "softmax, weights kept", "side": 512, "error": "out of memory", "model": "mavit_tiny_linear"},
    ]
    output = tmp_path / "evidence"
    output.mkdir()
    (output / "camvid.json").write_text(json.dumps({"cells": cells}))
    early = segmentation_page.written(tmp_path / "page", output)
    assert "Not measured yet: alone, upernet, growth" in early
    assert "| mavit_tiny | 3 | 51.0 ± 1.0 | 50.0 to 52.0 | 90.0 ± 0.0 | 17.0 | 99* | 3.0* |" in early
    for name, part in (("alone", rows), ("upernet", upernet), ("growth", growth)):
        (output / f"{name}.json").write_text(json.dumps({"rows": part}))
    text = segmentation_page.written(tmp_path / "page", output)
    assert "Not measured yet" not in text
    assert text.index("What cannot be concluded") < text.index(
        "| mavit_tiny | 3 | 51.0 ± 1.0 | 50.0 to 52.0 | 90.0 ± 0.0 | 17.0 | 207 |"
    )
    assert "is met: 51.0%" in text
    assert "the linear one ahead of both, is met" in text
    assert "| 512 | 0.30 GB, 0.02 s | out of memory |" in text
    upernet[1]["images_per_second"] = 10.0
    (output / "upernet.json").write_text(json.dumps({"rows": upernet}))
    assert "is missed: ahead of 1 of 2" in segmentation_page.written(tmp_path / "page", output)


def test_a_page_says_by_what_the_recipe_was_chosen() -> None:
    cells = [scene("mavit_tiny", 0, 0.6)]
    assert "no variant was tried" in segmentation_page.page({"camvid": {"cells": cells}})
    chosen = {"name": "wider", "set": ["zoom=0.5,2.0"], "validation": {"small": 0.5, "wider": 0.55}}
    text = segmentation_page.page({"camvid": {"cells": cells, "chosen": chosen}})
    assert "The recipe, wider (`zoom=0.5,2.0`), was chosen" in text
    assert "mIoU of small 50.0, wider 55.0" in text


def test_a_mean_below_the_floor_is_called_missed() -> None:
    assert "is missed: 49.0%" in segmentation_page.page({"camvid": {"cells": [scene("mavit_tiny", 0, 0.49)]}})


@pytest.mark.exhaustive
def test_the_figure_is_drawn_from_maps_and_growth(tmp_path: Path) -> None:
    generator = np.random.default_rng()
    for folder in ("images", "annotations"):
        for half in ("training", "test"):
            (tmp_path / folder / half).mkdir(parents=True)
    for half in ("training", "test"):
        photo = generator.integers(0, 256, (24, 32, 3), np.uint8)
        Image.fromarray(photo).save(tmp_path / "images" / half / "a.jpg")
        Image.fromarray(generator.integers(0, 3, (24, 32), np.uint8)).save(tmp_path / "annotations" / half / "a.png")
    (tmp_path / "classes.txt").write_text("road\nsky\n")
    rows = [{"name": "linear", "side": side, "peak_gb": side / 512, "seconds": 0.1} for side in (512, 4096)]
    (tmp_path / "growth.json").write_text(json.dumps({"rows": rows}))
    command = [sys.executable, str(ROOT / "evidence" / "pages" / "scenes.py"), "--data", str(tmp_path)]
    command += ["--growth", str(tmp_path / "growth.json"), "--out", str(tmp_path / "figure.png"), "--maps"]
    drawn = subprocess.run([*command, str(tmp_path / "annotations" / "test")], capture_output=True, text=True)
    assert drawn.returncode == 0, drawn.stderr
    with Image.open(tmp_path / "figure.png") as figure:
        assert figure.width > 1000
    refused = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True)
    assert "--maps: expected maps that are named as photos" in refused.stderr
