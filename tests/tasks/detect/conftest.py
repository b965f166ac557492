"""A small data set in COCO's layout: coloured shapes, with masks as runs and as outlines, a crowd, an empty image."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from affinear.tasks.detect.runs import Runs

Make = Callable[..., Path]


def make_coco(root: Path, *, train: int = 6, test: int = 4, masks: bool = True, seed: int = 0) -> Path:
    """Images of 48 to 80 pixels a side; rectangles of class "bar" are red, of class "box" blue."""
    random = np.random.default_rng(seed)
    (root / "annotations").mkdir(parents=True)
    for split, count in (("train", train), ("val", test)):
        (root / split).mkdir()
        images: list[dict[str, Any]] = []
        annotations: list[dict[str, Any]] = []
        for number in range(count):
            height, width = (int(side) for side in random.integers(48, 80, 2))
            pixels = random.integers(0, 60, (height, width, 3)).astype(np.uint8)
            for k in range(0 if number == 1 else 3):
                top, left = int(random.integers(0, height - 20)), int(random.integers(0, width - 20))
                tall, wide = (int(side) for side in random.integers(8, 20, 2))
                pixels[top : top + tall, left : left + wide, 0 if k % 2 else 2] = 230
                annotations.append(
                    {
                        "id": len(annotations) + 1,
                        "image_id": number + 10,
                        "category_id": (3, 7)[k % 2],
                        "bbox": [left, top, wide, tall],
                        "area": wide * tall,
                        "iscrowd": int(k == 2 and number == 0),
                        **(_shape((top, left, tall, wide), (height, width), k) if masks else {}),
                    }
                )
            name = f"{number}.png"
            Image.fromarray(pixels).save(root / split / name)
            images.append({"id": number + 10, "file_name": name, "height": height, "width": width})
        categories = [{"id": 7, "name": "bar"}, {"id": 3, "name": "box"}]
        content = {"images": images, "annotations": annotations, "categories": categories}
        (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))
    return root


def _shape(place: tuple[int, int, int, int], size: tuple[int, int], kind: int) -> dict[str, Any]:
    top, left, tall, wide = place
    if kind == 1:
        corners = (left, top, left + wide, top, left + wide, top + tall, left, top + tall)
        return {"segmentation": [list(corners)]}
    runs = Runs.of(np.ones((tall, wide), np.bool_), (top, left), size)
    return {"segmentation": runs.json() if kind else {"size": list(size), "counts": runs.counts.tolist()}}


@pytest.fixture
def coco(tmp_path: Path) -> Make:
    def make(**given: Any) -> Path:
        return make_coco(tmp_path / "data", **given)

    return make
