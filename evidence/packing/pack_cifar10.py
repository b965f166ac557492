"""Some images of CIFAR-10 in one small file, for a slow way to another machine.

    python evidence/packing/pack_cifar10.py cifar-10 cifar-10.webp --train 4000 --test 2000
    python evidence/packing/pack_cifar10.py cifar-10.webp cifar-10-part

The first command takes the first images of every class, as many of each, of the binary version of CIFAR-10, which
`convert_cifar10.py` makes, and rounds them to 64 levels of every colour, off by two at most: a kilobyte an image. The
second one makes of it a folder in that binary layout again, which `affinear train --data` reads.
"""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST, NAMES = "test_batch.bin", "batches.meta.txt"
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SIDE, LEVELS = 32, 64
STEP = 256 // LEVELS
ACROSS = 50  # images of a sheet's row
TAG = 270  # of Exif: a description, which holds how many images each half has

Bytes = NDArray[np.uint8]


def main() -> None:
    """Pack a folder, or unpack a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="folder of CIFAR-10's binary version, or what was packed")
    parser.add_argument("output", type=Path)
    parser.add_argument("--train", type=int, default=4000, help="training images, a multiple of 50")
    parser.add_argument("--test", type=int, default=2000, help="test images, a multiple of 50")
    given = parser.parse_args()
    if given.source.is_file():
        unpack(given.source, given.output)
    else:
        print(f"{given.output}: {pack(given.source, given.output, given.train, given.test) / 1e6:.1f} MB")


def pack(folder: Path, output: Path, train: int, test: int) -> int:
    """Write a sheet of images, class after class in turns, without loss; returns its bytes."""
    halves = [rows_of([folder / name for name in TRAIN], train), rows_of([folder / TEST], test)]
    rows = np.concatenate(halves)
    sheet = (rows[:, 1:] // STEP).reshape(-1, ACROSS, 3, SIDE, SIDE).transpose(0, 3, 1, 4, 2)
    about = Image.Exif()
    about[TAG] = json.dumps({"train": train, "test": test})
    file = io.BytesIO()
    made = Image.fromarray(np.ascontiguousarray(sheet).reshape(-1, ACROSS * SIDE, 3))
    made.save(file, "WEBP", lossless=True, quality=100, method=6, exif=about)
    beside = output.with_name(f"{output.name}.part")
    beside.write_bytes(file.getvalue())
    beside.replace(output)
    return len(file.getvalue())


def rows_of(paths: list[Path], count: int) -> Bytes:
    """The first rows of every class, (N, 1 + 3072), classes in turns.

    Raises:
        ValueError: If there are not so many, or they do not fill rows of the sheet.
    """
    if count % ACROSS:
        raise ValueError(f"images: expected a multiple of {ACROSS}, got {count}")
    rows = np.concatenate([np.fromfile(path, np.uint8).reshape(-1, 1 + 3 * SIDE**2) for path in paths])
    each = [rows[rows[:, 0] == number][: count // len(CLASSES)] for number in range(len(CLASSES))]
    if min(map(len, each)) < count // len(CLASSES):
        raise ValueError(f"images: expected {count // len(CLASSES)} of every class, got {min(map(len, each))}")
    return np.stack(each, axis=1).reshape(count, -1)


def unpack(source: Path, folder: Path) -> None:
    """Write the binary version's files; colours are in the middle of their level."""
    with Image.open(source) as image:
        about, sheet = json.loads(image.getexif()[TAG]), np.asarray(image.convert("RGB"))
    pixels = sheet.reshape(-1, SIDE, ACROSS, SIDE, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3 * SIDE**2)
    labels = np.arange(len(pixels))[:, None] % len(CLASSES)
    rows = np.concatenate([labels, pixels * STEP + STEP // 2], axis=1).astype(np.uint8)
    train, test = np.split(rows, [about["train"]])
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in zip((*TRAIN, TEST), (*np.split(train, len(TRAIN)), test), strict=True):
        part.tofile(folder / name)
    (folder / NAMES).write_text("".join(f"{name}\n" for name in CLASSES), encoding="utf-8")


if __name__ == "__main__":
    main()
