"""The page of segmentation says what was measured, what was not, and first what cannot be concluded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def page(script: Any) -> Any:
    return script("pages.segmentation")


def scene(arm: str, seed: int, miou: float, longer: bool = False) -> dict[str, Any]:
    recipe = {"batch_size": 8, "lr": 1e-3}
    settings = {"crop": [160, 224], "zoom": [0.95, 1.5], "short_side": 180, "balance": 0.5}
    pace = {"losses": [1.0, 0.3], "steps": 4000 if longer else 1000, "images_per_second": 99.0, "peak": 3 * 2**30}
    return {
        "arm": arm,
        "seed": seed,
        "longer": longer,
        "score": {"miou": miou, "macc": 0.7, "aacc": 0.9},
        "classes": {"sky": 0.9, "pole": 0.2},
        "parameters": 1.7e7,
        "pace": pace,
        "learned": 367,
        "packed": None,
        "photos": 233,
        "split": "test",
        "recipe": recipe,
        "settings": settings,
    }


def test_a_page_of_segmentation_has_every_part_that_was_measured(page: Any, tmp_path: Path) -> None:
    cells = [scene(arm, seed, 0.5 + 0.01 * seed) for seed in range(3) for arm in ("mavit_tiny", "resnet50")]
    about = {"size": [320, 320], "batch": 16, "graph": True}
    rows = [{"name": "mavit_tiny", "images_per_second": 207.0, "peak_gb": 3.2, **about}]
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
    early = page.written(tmp_path / "page", output)
    assert "Not measured yet: alone, upernet, growth, counted" in early
    assert "| mavit_tiny | 1,000 | 3 | 51.0 ± 1.0 | 50.0 to 52.0 | 90.0 ± 0.0 | 17.0 | 99* | 3.0* |" in early
    counted = [
        {"name": name, "side": 512, "kept_gb": 0.4, "model": "mavit_tiny_linear", "dtype": "bfloat16"}
        for name in ("linear", "softmax, fused", "softmax, weights kept")
    ]
    for name, part in (("alone", rows), ("upernet", upernet), ("growth", growth), ("counted", counted)):
        (output / f"{name}.json").write_text(json.dumps({"rows": part}))
    text = page.written(tmp_path / "page", output)
    assert "Not measured yet" not in text
    assert text.index("What cannot be concluded") < text.index(
        "| mavit_tiny | 1,000 | 3 | 51.0 ± 1.0 | 50.0 to 52.0 | 90.0 ± 0.0 | 17.0 | 207 |"
    )
    assert "alone on the GPU where it was measured so (16 of 320 x 320 pixels, one CUDA graph)" in text
    assert "is met after 1,000 steps: 51.0%" in text
    assert "the linear one ahead of both, is met in images per second. In memory it is below 0 of 2." in text
    assert "| 512 | 0.30 GB, 0.02 s | out of memory |" in text
    assert "| 512 | 0.40 | 0.40 | 0.40 |" in text
    assert "from random weights on 367 photos" in text
    upernet[1]["images_per_second"] = 10.0
    (output / "upernet.json").write_text(json.dumps({"rows": upernet}))
    assert "is missed: ahead of 1 of 2" in page.written(tmp_path / "page", output)


def test_a_page_says_by_what_the_recipe_was_chosen(page: Any) -> None:
    cells = [scene("mavit_tiny", 0, 0.6)]
    assert "No variant of the recipe was tried" in page.page({"camvid": {"cells": cells}})
    chosen = {"name": "wider", "set": ["zoom=0.5,2.0"], "validation": {"small": 0.5, "wider": 0.55}}
    text = page.page({"camvid": {"cells": cells, "chosen": chosen}})
    assert "The recipe, wider (`zoom=0.5,2.0`), was chosen" in text
    assert "mIoU of small 50.0, wider 55.0" in text


def test_a_page_says_what_photos_lost_before(page: Any) -> None:
    cell = scene("mavit_tiny", 0, 0.6)
    assert "packed before" not in page.page({"camvid": {"cells": [cell]}})
    cell["packed"] = {"short_side": 240, "quality": 82}
    assert "shrunk to a shorter side of 240 pixels and written as WebP of quality 82" in page.page(
        {"camvid": {"cells": [cell]}}
    )


def test_a_mean_below_the_floor_is_called_missed(page: Any) -> None:
    assert "is missed after 1,000 steps: 49.0%" in page.page({"camvid": {"cells": [scene("mavit_tiny", 0, 0.49)]}})


def test_a_longer_run_stands_by_itself(page: Any) -> None:
    cells = [scene("mavit_tiny", 0, 0.52, longer=True), scene("mavit_tiny", 0, 0.4), scene("resnet50", 0, 0.3)]
    text = page.page({"camvid": {"cells": cells}})
    assert "| mavit_tiny | 1,000 | 1 | 40.0" in text
    assert "| mavit_tiny, longer | 4,000 | 1 | 52.0" in text
    assert "is missed after 1,000 steps: 40.0%; met after 4,000 steps: 52.0%; the longer run went on" in text
