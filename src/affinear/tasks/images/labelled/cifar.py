"""CIFAR-10 and CIFAR-100 in the files they are published in: pickles for Python, or rows of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from .images import Images, in_memory
from .pickles import read_pickle

SIDE = 32
PIXELS = 3 * SIDE * SIDE

Half = tuple[NDArray[np.uint8], NDArray[np.int64]]


@dataclass(frozen=True)
class Layout:
    """Which files a version of CIFAR consists of.

    Attributes:
        title: Of the data set.
        classes: How many there are.
        train: Files of the training half.
        test: Files of the test half.
        names: The file with the names of the classes.
        entry: Where in that file the names are, if it is a pickle.
        labels: Where in a pickle the labels are; or, for rows of bytes, at which byte.
        head: For rows of bytes, how many come before the pixels; 0 for pickles.
    """

    title: str
    classes: int
    train: tuple[str, ...]
    test: tuple[str, ...]
    names: str
    entry: str
    labels: str | int
    head: int = 0

    @property
    def files(self) -> tuple[str, ...]:
        """The files that hold images."""
        return (*self.train, *self.test)


BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
LAYOUTS = (
    Layout("CIFAR-10", 10, BATCHES, ("test_batch",), "batches.meta", "label_names", "labels"),
    Layout(
        "CIFAR-10", 10, tuple(f"{one}.bin" for one in BATCHES), ("test_batch.bin",), "batches.meta.txt", "", 0, head=1
    ),
    Layout("CIFAR-100", 100, ("train",), ("test",), "meta", "fine_label_names", "fine_labels"),
    Layout("CIFAR-100", 100, ("train.bin",), ("test.bin",), "fine_label_names.txt", "", 1, head=2),
)


def recognise(folder: Path) -> Layout | None:
    """The version whose files lie in a folder; also if some of them are missing, so that the reader can say which."""
    for layout in LAYOUTS:
        if any((folder / name).is_file() for name in layout.train):
            return layout
    return None


def read(folder: Path, layout: Layout) -> Images:
    """Open a folder with the files of a version.

    Raises:
        ValueError: If a file is missing, damaged, or not what its name says.
    """
    missing = [name for name in layout.files if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{folder}: {layout.title} needs {', '.join(layout.files)}; missing: {', '.join(missing)}")
    names = _class_names(folder / layout.names, layout)
    halves = [_half([folder / name for name in files], layout) for files in (layout.train, layout.test)]
    return in_memory(f"{layout.title} in {folder}", halves[0], halves[1], names)


def _half(paths: Sequence[Path], layout: Layout) -> Half:
    parts = [_rows_of_bytes(path, layout) if layout.head else _pickled(path, layout) for path in paths]
    pixels = np.concatenate([part for part, _ in parts]).reshape(-1, 3, SIDE, SIDE)
    return pixels, np.concatenate([labels for _, labels in parts])


def _pickled(path: Path, layout: Layout) -> Half:
    content = read_pickle(path)
    pixels, labels = content.get("data"), content.get(str(layout.labels))
    if not isinstance(pixels, np.ndarray) or not isinstance(labels, list):
        raise ValueError(f"{path}: expected data and {layout.labels}, got {', '.join(sorted(content)) or 'nothing'}")
    if pixels.shape != (len(labels), PIXELS):
        raise ValueError(
            f"{path}: expected data of shape ({len(labels)}, {PIXELS}), one row for each label, got {pixels.shape}"
        )
    return pixels, _checked(labels, path, layout)


def _rows_of_bytes(path: Path, layout: Layout) -> Half:
    content = np.fromfile(path, np.uint8)
    width = layout.head + PIXELS
    if not len(content) or len(content) % width:
        raise ValueError(f"{path}: expected rows of {width} bytes, got {len(content)} bytes in all; is it whole?")
    rows = content.reshape(-1, width)
    return rows[:, layout.head :], _checked(rows[:, int(layout.labels)], path, layout)


def _checked(labels: Any, path: Path, layout: Layout) -> NDArray[np.int64]:
    try:
        checked = np.array(labels, np.int64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{path}: expected whole numbers as labels ({error})") from error
    if checked.ndim != 1:
        raise ValueError(f"{path}: expected one label for each image, got labels of shape {checked.shape}")
    if len(checked) and not 0 <= checked.min() <= checked.max() < layout.classes:
        raise ValueError(
            f"{path}: expected labels from 0 to {layout.classes - 1}, got {checked.min()} to {checked.max()}"
        )
    return checked


def _class_names(path: Path, layout: Layout) -> tuple[str, ...]:
    if not path.is_file():
        raise ValueError(f"{path.parent}: {layout.title} needs {path.name}, which names the classes")
    if layout.entry:
        entries: Any = read_pickle(path).get(layout.entry)
        if not isinstance(entries, list) or not all(
            isinstance(name, (str, bytes)) for name in cast("list[Any]", entries)
        ):
            raise ValueError(f"{path}: expected names of classes in a list under {layout.entry}, got something else")
        told = cast("list[str | bytes]", entries)
        names = tuple(name.decode("utf-8", "replace") if isinstance(name, bytes) else name for name in told)
    else:
        names = tuple(path.read_text(encoding="utf-8", errors="replace").split())
    if len(names) != layout.classes:
        raise ValueError(f"{path}: expected the names of {layout.classes} classes, got {len(names)}")
    return names
