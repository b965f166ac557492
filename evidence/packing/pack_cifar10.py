"""CIFAR-10 in a few small files, for a slow way to another machine.

    python evidence/packing/pack_cifar10.py cifar-10 sheets
    python evidence/packing/pack_cifar10.py cifar-10 sheets-64 --levels 64

takes the binary version of CIFAR-10, which `convert_cifar10.py` makes, and writes a sheet of 10,000 images for each of
its files: 17 MB without loss, or 11 MB with 64 levels of every colour, which are off by two at most. Every sheet tells
its classes, and stands alone: `pictures_of` reads as many as there are.

    python evidence/packing/pack_cifar10.py sheets cifar-10-again

makes of them a folder in the binary layout again, which `affinear train --data` reads if all six are there.
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST, NAMES = "test_batch", "batches.meta.txt"
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SIDE = 32
ACROSS = 50  # images of a sheet's row
TAG = 270  # of Exif: a description, which holds levels and classes

Bytes = NDArray[np.uint8]


def main() -> None:
    """Pack a folder, or unpack one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="folder of CIFAR-10's binary version, or of sheets")
    parser.add_argument("output", type=Path, help="folder to write")
    parser.add_argument("--levels", type=int, default=256, choices=(64, 128, 256), help="of every colour")
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    if sheets := sorted(given.source.glob("*.webp")):
        unpack(sheets, given.output)
        return
    for name in (*TRAIN, TEST):
        content = packed(np.fromfile(given.source / f"{name}.bin", np.uint8).reshape(-1, 1 + 3 * SIDE**2), given.levels)
        beside = given.output / f"{name}.part"
        beside.write_bytes(content)
        beside.replace(given.output / f"{name}.webp")
        print(f"{name}: {len(content) / 1e6:.1f} MB", flush=True)


def packed(rows: Bytes, levels: int = 256) -> bytes:
    """A sheet of images with their classes, (N, 1 + 3072), without loss but for the levels.

    Raises:
        ValueError: If they do not fill rows of the sheet.
    """
    if len(rows) % ACROSS:
        raise ValueError(f"images: expected a multiple of {ACROSS}, got {len(rows)}")
    sheet = (rows[:, 1:] // (256 // levels)).reshape(-1, ACROSS, 3, SIDE, SIDE).transpose(0, 3, 1, 4, 2)
    about = Image.Exif()
    about[TAG] = json.dumps({"levels": levels, "classes": "".join(map(str, rows[:, 0].tolist()))})
    file = io.BytesIO()
    made = Image.fromarray(np.ascontiguousarray(sheet).reshape(-1, ACROSS * SIDE, 3))
    made.save(file, "WEBP", lossless=True, quality=75, method=4, exif=about)
    return file.getvalue()


def opened(sheet: bytes) -> tuple[Bytes, NDArray[np.int64]]:
    """Images (N, 3, 32, 32) and classes (N,) of a sheet; colours are in the middle of their level."""
    with Image.open(io.BytesIO(sheet)) as image:
        about, pixels = json.loads(image.getexif()[TAG]), np.asarray(image.convert("RGB"))
    step = 256 // about["levels"]
    images = pixels.reshape(-1, SIDE, ACROSS, SIDE, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3, SIDE, SIDE)
    return (images * step + step // 2).astype(np.uint8), np.array([int(one) for one in about["classes"]])


def pictures_of(sheets: Sequence[Path]) -> tuple[Bytes, NDArray[np.int64]]:
    """Images and classes of several sheets, one behind the other."""
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(opened, [path.read_bytes() for path in sheets]))
    return np.concatenate([images for images, _ in found]), np.concatenate([classes for _, classes in found])


def unpack(sheets: Sequence[Path], folder: Path) -> None:
    """Write the binary version's files."""
    for path in sheets:
        images, classes = opened(path.read_bytes())
        rows = np.concatenate([classes[:, None].astype(np.uint8), images.reshape(len(images), -1)], axis=1)
        rows.tofile(folder / f"{path.stem}.bin")
    (folder / NAMES).write_text("".join(f"{name}\n" for name in CLASSES), encoding="utf-8")


if __name__ == "__main__":
    main()
