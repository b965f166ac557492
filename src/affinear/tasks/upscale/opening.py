"""`--data`, open: folders of photos, each of which is its own truth."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..images.finding import image_files
from ..images.reading import CorruptImage, open_image, size_of
from ..threads import in_threads
from .metric import SIDE

TRAINS = ("train", "training", "DIV2K_train_HR", "DF2K_HR", "Flickr2K_HR")
LARGE = ("HR", "GTmod12", "GT", "original")  # folders within a set that hold the large photos, where others are small
SMALL = re.compile(r"(^|_)LR(_|$|x\d)", re.IGNORECASE)  # folders of small photos, which are made anew
HELD_OUT = 10  # one photo in so many, where nobody says which are for testing
TAIL = 64  # bytes at the end of a file that its fingerprint sees
LAYOUT = "a folder train of photos beside folders to be judged by, such as Set5 and Set14, or photos alone"

Pixels = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Photos:
    """Photos by number.

    Attributes:
        paths: Their files.
        sizes: Height and width of each as it is shown; (0, 0) of one that cannot be read.
        stored: All of them decoded, or None for those that are read when they are asked for.
    """

    paths: Sequence[str]
    sizes: Sequence[tuple[int, int]]
    stored: Sequence[Pixels] | None = None

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Pixels:
        """Bytes (H, W, 3).

        Raises:
            CorruptImage: If it cannot be read.
        """
        return np.asarray(open_image(self.paths[index])) if self.stored is None else self.stored[index]

    def path(self, index: int) -> str:
        """The photo's file."""
        return self.paths[index]

    def some(self, indices: Sequence[int]) -> Photos:
        """A part of them."""
        stored = None if self.stored is None else [self.stored[i] for i in indices]
        return Photos([self.paths[i] for i in indices], [self.sizes[i] for i in indices], stored)


@dataclass(frozen=True, eq=False)
class Album:
    """A data set that is open.

    Attributes:
        name: For people.
        train: To learn from.
        test: To be judged by.
        sets: Names of the sets that are judged by, such as "Set5".
        set_of: Which of them each test photo is of.
        fingerprint: Of names and contents of all files.
    """

    name: str
    train: Photos
    test: Photos
    sets: tuple[str, ...]
    set_of: tuple[int, ...]
    fingerprint: str

    @property
    def sizes(self) -> tuple[int, int]:
        """How many photos there are to learn from, and to be judged by."""
        return len(self.train), len(self.test)


def open_album(spec: str, scale: int, *, test_sets: str | None = None, memory: bool = False) -> Album:
    """A folder of photos to learn from and to be judged by.

    Args:
        spec: The folder.
        scale: How many times larger photos become.
        test_sets: Names of the folders to be judged by, with a plus between them; None for all.
        memory: Whether all photos are decoded now and kept.

    Raises:
        ValueError: If the folder is not there, holds no photos to learn from, or a photo is too small.
    """
    root = _folder(spec)
    sets = _sets(root, scale)
    train = next((name for name in TRAINS if name in sets), None)
    own = _photos_in(root, scale, deep=False)
    learnt = own if train is None else sets.pop(train)
    if not learnt:
        raise ValueError(f"data: expected in {root} {LAYOUT}, found {_found(sets)}")
    sets = _chosen(sets, test_sets) if sets else {}
    note = ", ".join(sets) or f"one in {HELD_OUT} held out"
    if not sets:
        if test_sets is not None:
            raise ValueError(f"test_sets: expected none, as {root} has no folder to be judged by, got {test_sets!r}")
        learnt, held = _hold_out(root, learnt)
        sets = {"held out": held}
    return _album(f"photos in {root} ({note})", root, learnt, sets, scale, memory)


def open_to_judge(spec: str, scale: int, *, test_sets: str | None = None, memory: bool = False) -> tuple[Album, str]:
    """Photos to be judged by, and which they are in words: the sets beside a folder to learn from, or else all.

    Raises:
        ValueError: As `open_album` does.
    """
    root = _folder(spec)
    sets, own = _sets(root, scale), _photos_in(root, scale, deep=False)
    if any(name in sets for name in TRAINS):
        album = open_album(spec, scale, test_sets=test_sets, memory=memory)
        return album, f"the test sets of {root}: {', '.join(album.sets)}"
    sets = {root.resolve().name: own} if own else _chosen(sets, test_sets)
    if not sets:
        raise ValueError(f"data: expected in {root} {LAYOUT}, found {_found(sets)}")
    return _album(f"photos in {root}", root, [], sets, scale, memory), f"all photos of {', '.join(sets)}"


def _folder(spec: str) -> Path:
    root = Path(spec).expanduser()
    if not root.is_dir():
        raise ValueError(f"data: expected {LAYOUT}, got {spec!r}, which is no folder")
    return root


def _sets(root: Path, scale: int) -> dict[str, list[str]]:
    """Photos of every folder within a folder that has some."""
    folders = sorted(path for path in root.iterdir() if path.is_dir() and path.name[0] != ".")
    found = {path.name: _photos_in(path, scale) for path in folders if not SMALL.search(path.name)}
    return {name: photos for name, photos in found.items() if photos}


def _photos_in(folder: Path, scale: int, deep: bool = True) -> list[str]:
    """The large photos of a folder, sorted, however the set is laid out."""
    if deep:
        pairs = folder / f"image_SRF_{scale}"  # small and large ones side by side
        if pairs.is_dir():
            return [path for path in _images(pairs) if "_HR" in Path(path).stem]
        folder = next((folder / name for name in LARGE if (folder / name).is_dir()), folder)
        return _images(folder)
    return [path for path in _images(folder) if Path(path).parent == folder]


def _images(folder: Path) -> list[str]:
    """All images under a folder, sorted, but for those in folders of small ones."""
    paths = (found.path for found in image_files(folder))
    large = (path for path in paths if not any(map(SMALL.search, Path(path).relative_to(folder).parts[:-1])))
    return sorted(large, key=_natural)


def _natural(name: str) -> tuple[list[tuple[int, str]], str]:
    return [(int(piece), "") if piece.isdecimal() else (-1, piece) for piece in re.split(r"(\d+)", name)], name


def _chosen(sets: dict[str, list[str]], names: str | None) -> dict[str, list[str]]:
    """The sets to be judged by."""
    if names is None:
        return sets
    wanted = [name.strip() for name in names.split("+")]
    missing = [name for name in wanted if name not in sets]
    if missing:
        raise ValueError(f"test_sets: expected some of {', '.join(sets) or 'none'}, got {missing[0]!r}")
    return {name: sets[name] for name in wanted}


def _found(sets: dict[str, list[str]]) -> str:
    return f"photos in {', '.join(sets)} and none to learn from" if sets else "no photo at all"


def _hold_out(root: Path, paths: list[str]) -> tuple[list[str], list[str]]:
    """Two halves of what comes in one, by a digest of the photos' names."""
    if len(paths) < 2:
        raise ValueError(f"data: expected two photos or more in {root}, as one in {HELD_OUT} is held out, got one")

    def rank(path: str) -> bytes:
        return hashlib.blake2b(os.path.relpath(path, root).encode("utf-8", "surrogateescape")).digest()

    held = set(sorted(paths, key=rank)[: max(1, len(paths) // HELD_OUT)])
    return [path for path in paths if path not in held], [path for path in paths if path in held]


def _album(name: str, root: Path, learnt: list[str], sets: dict[str, list[str]], scale: int, memory: bool) -> Album:
    """The data set of these files, their sizes known and checked."""
    judged = [path for paths in sets.values() for path in paths]
    train, test = (Photos(paths, in_threads(_size, paths)) for paths in (learnt, judged))
    for photos, least in ((train, 8 * scale), (test, SIDE + 3 * scale)):
        small = [i for i, size in enumerate(photos.sizes) if 0 < min(size) < least]
        if small:
            height, width = photos.sizes[small[0]]
            more = f" ({len(small) - 1} more are too small)" if len(small) > 1 else ""
            raise ValueError(
                f"data: {photos.paths[small[0]]}: expected sides of at least {least} pixels, got {height} x "
                f"{width}{more}; take it away"
            )
    if memory:
        train, test = _stored(train), _stored(test)
    numbers = dict(zip(judged, (i for i, paths in enumerate(sets.values()) for _ in paths), strict=True))
    set_of = tuple(numbers[path] for path in test.paths)
    return Album(name, train, test, tuple(sets), set_of, _fingerprint(root, learnt, judged))


def _size(path: str) -> tuple[int, int]:
    try:
        return size_of(path)
    except CorruptImage:
        return 0, 0  # is passed over and counted while training, as long as there are few


def _stored(photos: Photos) -> Photos:
    """The photos decoded; what cannot be is left to be found out later."""
    kept = [i for i, size in enumerate(photos.sizes) if min(size)]
    if len(kept) < len(photos):
        return photos
    return replace(photos, stored=in_threads(photos.__getitem__, kept))


def _fingerprint(root: Path, *halves: Sequence[str]) -> str:
    """A few letters that are others for other files: of each its name, its size and its end."""
    digest = hashlib.blake2b(digest_size=8)
    for paths in halves:
        for path in paths:
            with open(path, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - TAIL))
                name = os.path.relpath(path, root)
                digest.update(f"\n{name} {size} ".encode("utf-8", "surrogateescape") + file.read())
        digest.update(b"\n\n")
    return digest.hexdigest()
