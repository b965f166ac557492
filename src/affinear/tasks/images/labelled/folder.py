"""Images in folders that are called like their classes."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from ..finding import Identity, image_files
from ..reading import CorruptImage, open_image, size_of
from .images import Digest, Images

TRAIN = "train"
TESTS = ("val", "validation", "valid", "test")  # the first that is there is taken
LOOKED_INTO, BEGINNING = 1000, 2**14  # files, and bytes of each, that tell data sets apart beside names and sizes
HELD_OUT = 10  # one image in so many
MOST_DECODED, MOST_OPENED = 1000, 20_000  # files that are read, or opened, before training to find those that cannot be
LARGEST = 256  # pixels of a side, up to which images that all have one size are shown as they are

Natural = tuple[list[str | int], str]


@dataclass(frozen=True, eq=False)
class FileSource:
    """Images in files.

    Attributes:
        paths: Their files.
        labels: The class of each.
    """

    paths: Sequence[str]
    labels: Sequence[int]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return open_image(self.paths[index]), self.labels[index]

    def path(self, index: int) -> str:
        """Its file."""
        return self.paths[index]

    def mark(self, digest: Digest) -> None:
        """Names, sizes and classes of all files, and the beginnings of some of them, evenly among all."""
        every = max(1, len(self.paths) // LOOKED_INTO)
        for number, (path, label) in enumerate(zip(self.paths, self.labels, strict=True)):
            size, begin = -1, b""
            with contextlib.suppress(OSError):
                size = os.stat(path).st_size
                if number % every == 0:
                    with open(path, "rb") as file:
                        begin = file.read(BEGINNING)
            digest.update(f"{label} {size} {os.path.basename(path)}\n".encode("utf-8", "surrogateescape") + begin)


def unreadable(source: FileSource) -> list[int]:
    """Numbers of images that cannot be read, as far as a quick look finds them.

    Each of a thousand images is decoded; of more, a thousand evenly among all, and of twenty thousand the beginning.
    """
    count = len(source)
    decoded = set(range(0, count, -(-count // MOST_DECODED) or 1))
    opened = sorted({*decoded, *range(0, count, -(-count // MOST_OPENED) or 1)})
    return [index for index in opened if not _is_good(source.paths[index], whole=index in decoded)]


def _is_good(path: str, whole: bool) -> bool:
    try:
        if whole:
            open_image(path)
        else:
            size_of(path)
    except CorruptImage:
        return False
    return True


def one_size(paths: Sequence[str]) -> tuple[int, int] | None:
    """Height and width of all images, if they are the same for all, and small enough to be shown as they are.

    Files that cannot be read do not count; of more than twenty thousand, some evenly among all are asked.
    """
    found: tuple[int, int] | None = None
    for path in paths[:: -(-len(paths) // MOST_OPENED) or 1]:
        try:
            size = size_of(path)
        except CorruptImage:
            continue
        if max(size) > LARGEST or found not in (None, size):
            return None
        found = size
    return found


def natural(name: str) -> Natural:
    """What to sort names by, so that numbers in them count as numbers.

    Examples:
        >>> sorted(["n10", "N2", "n1"], key=natural)
        ['n1', 'N2', 'n10']
    """
    pieces = re.split(r"(\d+)", name.lower())
    return [int(piece) if number % 2 else piece for number, piece in enumerate(pieces)], name


def halves_in(folder: Path) -> tuple[Path, Path] | None:
    """The two folders of the halves, if they are there."""
    train = folder / TRAIN
    test = next((folder / name for name in TESTS if (folder / name).is_dir()), None)
    return (train, test) if train.is_dir() and test is not None else None


def read_halves(folder: Path, train: Path, test: Path) -> Images:
    """Open a folder with `train/CLASS/...` and `val/CLASS/...`.

    Raises:
        ValueError: If the halves do not have the same classes, or a class has no image to learn from.
    """
    classes = _classes(train)
    _same_classes(classes, _classes(test), train, test)
    learnt, tested = (_source(classes, _files(half, classes)) for half in (train, test))
    _none_empty(train, classes, learnt.labels)
    if not len(tested):
        raise ValueError(f"{test}: expected images in its class folders, found none; {_known()}")
    name, size = f"images in {folder} ({train.name}, {test.name})", one_size([*learnt.paths, *tested.paths])
    return Images(name, learnt, tested, tuple(classes), size, 3)


def read_classes(folder: Path) -> Images | None:
    """Open a folder of class folders, of each of which one image in ten is held out, chosen by its name.

    Returns:
        The data set, or None if the folder has no class folders with images.

    Raises:
        ValueError: If a class has fewer than two images.
    """
    classes = _classes(folder)
    files = _files(folder, classes)
    if not any(files):
        return None
    poor = [name for name, found in zip(classes, files, strict=True) if len(found) < 2]
    if poor:
        raise ValueError(
            f"{folder}: expected at least two images of each class, since one in {HELD_OUT} is held out for testing; "
            f"too few in {_some(poor)}; {_known()}"
        )
    held = [_held_out(folder, found) for found in files]
    kept = [[path for path in found if path not in out] for found, out in zip(files, held, strict=True)]
    tested = [[path for path in found if path in out] for found, out in zip(files, held, strict=True)]
    name = f"images in {folder} (one in {HELD_OUT} of each class held out for testing)"
    size = one_size([path for found in files for path in found])
    return Images(name, _source(classes, kept), _source(classes, tested), tuple(classes), size, 3)


def read_whole(folder: Path) -> Images | None:
    """Open a folder of class folders to be judged by: all of its images are the test half, and none is to learn from.

    Returns:
        The data set, or None if the folder has no class folders with images.
    """
    classes = _classes(folder)
    files = _files(folder, classes)
    if not any(files):
        return None
    return Images(f"all images in {folder}", FileSource((), ()), _source(classes, files), tuple(classes), None, 3)


def _held_out(folder: Path, files: Sequence[str]) -> set[str]:
    def rank(path: str) -> bytes:
        # Of the name within the folder alone, so that it stays the same wherever the folder is moved.
        name = Path(path).relative_to(folder).as_posix()
        return hashlib.blake2b(name.encode("utf-8", "surrogateescape")).digest()

    return set(sorted(files, key=rank)[: max(1, len(files) // HELD_OUT)])


def _classes(folder: Path) -> list[str]:
    return sorted((one.name for one in folder.iterdir() if one.is_dir() and one.name[0] != "."), key=natural)


def _files(folder: Path, classes: Sequence[str]) -> list[list[str]]:
    """All images of each class, however deep; hidden files and folders do not count."""
    found = [image_files(folder / name) for name in classes]
    owner: dict[Identity, tuple[int, str]] = {}
    for label, files in enumerate(found):
        for file in files:
            first, path = owner.setdefault(file.identity, (label, file.path))
            if first != label:
                raise ValueError(f"{file.path}: the same file as {path}, of another class; keep one of them")
    return [sorted((file.path for file in files), key=natural) for files in found]


def _source(classes: Sequence[str], files: Sequence[Sequence[str]]) -> FileSource:
    paths = [path for found in files for path in found]
    return FileSource(paths, [label for label in range(len(classes)) for _ in files[label]])


def _same_classes(ours: Sequence[str], theirs: Sequence[str], train: Path, test: Path) -> None:
    lacking = [
        f"{half} lacks {_some(names)}"
        for half, names in (
            (test.name, [name for name in ours if name not in set(theirs)]),
            (train.name, [name for name in theirs if name not in set(ours)]),
        )
        if names
    ]
    if lacking:
        raise ValueError(
            f"{train.parent}: expected the same class folders in {train.name} and {test.name}; {'; '.join(lacking)}"
        )


def _none_empty(train: Path, classes: Sequence[str], labels: Sequence[int]) -> None:
    present = set(labels)
    empty = [name for label, name in enumerate(classes) if label not in present]
    if empty or not classes:
        raise ValueError(f"{train}: expected images of every class, found none in {_some(empty) or 'it'}; {_known()}")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _known() -> str:
    return "images are files that end in .jpg, .png, .webp, .tif, .bmp or another ending that Pillow knows"
