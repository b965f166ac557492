"""Little scenes of rectangles: photos whose colours tell their classes, and maps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("sky", "road", "car")
COLOURS = np.array([(90, 150, 220), (110, 110, 110), (200, 40, 40)], np.uint8)


def scene(random: np.random.Generator, size: tuple[int, int]) -> tuple[Image.Image, Image.Image]:
    """Sky over road with a car on it, an unlabelled border, and noise."""
    height, width = size
    numbers = np.ones(size, np.uint8)
    horizon = int(random.integers(height // 4, height // 2))
    numbers[horizon:] = 2
    y, x = int(random.integers(horizon, height - 8)), int(random.integers(0, width - 16))
    numbers[y : y + 8, x : x + 16] = 3
    pixels = COLOURS[numbers - 1].astype(np.int16) + random.integers(-20, 21, (*size, 3))
    numbers[:2] = 0
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8)), Image.fromarray(numbers)


def write(
    root: Path,
    counts: tuple[int, int] = (8, 4),
    sizes: tuple[tuple[int, int], ...] = ((64, 96), (72, 80)),
    seed: int = 0,
) -> Path:
    """A data set in ADE20K's layout."""
    random = np.random.default_rng(seed)
    for half, count in zip(("training", "validation"), counts, strict=True):
        for kind in ("images", "annotations"):
            (root / kind / half).mkdir(parents=True)
        for i in range(count):
            photo, numbers = scene(random, sizes[i % len(sizes)])
            photo.save(root / "images" / half / f"scene{i}.jpg", quality=95)
            numbers.save(root / "annotations" / half / f"scene{i}.png")
    (root / "classes.txt").write_text("\n".join(CLASSES) + "\n")
    return root
