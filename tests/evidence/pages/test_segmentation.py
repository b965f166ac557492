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
    recipe = {"batch_size": 8, "lr": 1e-3, "warmup_steps": 75}
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
    assert "| mavit_tiny, 4,000 steps | 4,000 | 1 | 52.0" in text
    assert "is missed after 1,000 steps: 40.0%; met after 4,000 steps: 52.0%; longer runs went on" in text


def test_runs_that_lost_what_they_had_learned_come_first(page: Any) -> None:
    cells = [scene(arm, seed, 0.4) for arm in ("mavit_tiny", "resnet50") for seed in (0, 1)]
    assert "lost what they had learned" not in page.page({"camvid": {"cells": cells}})
    cells[0]["pace"]["losses"] = [2.0, 1.5, 2.1, 1.9]
    cells[2]["pace"]["losses"] = [2.0, 1.5, 1.55, 1.4]
    text = page.page({"camvid": {"cells": cells}})
    assert "the training loss of mavit_tiny (1 of 2) rose by 0.60 to 0.60" in text
    assert "that of all others by 0.05 at most" in text
    assert text.index("lost what they had learned") < text.index("which backbone learns quickly")


def test_longer_runs_that_were_done_apart_are_told_beside_the_others(page: Any, tmp_path: Path) -> None:
    apart, output = tmp_path / "apart", tmp_path / "evidence"
    for folder, cells in (
        (output, [scene("mavit_tiny", 0, 0.4), scene("resnet50", 0, 0.3)]),
        (apart, [scene("mavit_tiny", 0, 0.02), scene("mavit_tiny", 0, 0.6, longer=True)]),
    ):
        folder.mkdir()
        (folder / "camvid.json").write_text(json.dumps({"cells": cells}))
    text = page.written(tmp_path / "page", output, apart, ["They shared the GPU."])
    assert text.startswith("# Segmentation, from random weights\n\n**What cannot be concluded.** They shared the GPU. ")
    assert "| mavit_tiny, 4,000 steps | 4,000 | 1 | 60.0" in text
    assert " 2.0 |" not in text
    assert page.written(tmp_path / "page", output, None, ["They shared the GPU."]) == text


def test_sizes_that_were_not_reached_are_not_those_that_were_not_tried(page: Any) -> None:
    model = {"model": "mavit_tiny_linear"}
    rows = [
        {"name": "linear", "side": 512, "peak_gb": 0.3, "seconds": 0.02, **model},
        {"name": "kept", "side": 512, "error": "out of memory", **model},
        {"name": "fused", "side": 512, "peak_gb": 0.3, "seconds": 0.02, **model},
        {"name": "linear", "side": 1024, "peak_gb": 0.6, "seconds": 0.04, **model},
    ]
    assert "goes forward once more" not in page.page({"growth": {"rows": rows}})
    rows[0]["dtype"] = "bfloat16 autocast"
    text = page.page({"growth": {"rows": rows}})
    assert "Under autocast, as in growth, our softmax goes forward once more" in text
    assert "| 1024 | 0.60 GB, 0.04 s | not tried | not reached |" in text
