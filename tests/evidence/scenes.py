"""Little scenes for experiments: photos and maps as CamVid's lie."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image


def folder(root: Path, size: tuple[int, int], count: int) -> Path:
    """As many photos of smooth colours, and random maps of three classes, in each half."""
    random = np.random.default_rng()
    for half in ("training", "test"):
        for kind in ("images", "annotations"):
            (root / kind / half).mkdir(parents=True)
        for number in range(count):
            tones = random.integers(256, size=(3, 4, 3), dtype=np.uint8)
            photo = Image.fromarray(tones).resize((size[1], size[0]), Image.Resampling.BICUBIC)
            photo.save(root / "images" / half / f"{number}.png")
            map_ = random.integers(4, size=size, dtype=np.uint8)
            Image.fromarray(map_).save(root / "annotations" / half / f"{number}.png")
    (root / "classes.txt").write_text("sky\nroad\ncar\n")
    return root
