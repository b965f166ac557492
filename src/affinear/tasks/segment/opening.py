"""`--data`, open: folders of photos beside folders of maps, checked before anything is trained."""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..images.finding import image_files
from ..images.reading import CorruptImage, size_of
from ..threads import in_threads
from ..told import text_of
from .pairs import UNLABELLED, VOID, Labels, Numbers, Pairs, Scenes, WrongMap, fingerprint, other_size, read_map

PHOTOS = ("images", "photos", "JPEGImages", "img")
MAPS = ("annotations", "masks", "labels", "trimaps", "SegmentationClass", "gt")
TRAINS = ("training", "train")
TESTS = ("validation", "val", "valid", "test")
NAMES = ("classes.txt", "objectInfo150.txt")
HELD_OUT = 10  # one photo in so many, where nobody says which are for testing
MOST_DECODED = 1000  # pairs of a half that are read before training to find those that cannot be
UNKNOWN = (0, 0)  # size of what cannot be read
CHECKED = 2000  # maps of a half that are read before training; all others are when they come
MOST_CLASSES = 254  # whose numbers fit into the bytes of a map, beside 0 and 255
NAMED = 3  # files that an error names; the others are counted
LAYOUT = (
    "images/training and images/validation beside annotations/training and annotations/validation, as in ADE20K, or "
    "images beside annotations"
)


def open_scenes(spec: str, *, zero_is_class: bool, test_split: str | None, memory: bool) -> Scenes:
    """A folder of photos and maps, open, and looked through.

    Args:
        spec: The folder.
        zero_is_class: Whether the number 0 in a map is the first class.
        test_split: Name of the folder of photos to be judged by; None for the first of `TESTS` that is there.
        memory: Whether all photos and maps are decoded now and kept.

    Raises:
        ValueError: If the folder is not there or not of this kind, photos and maps do not pair up, a map has another
            size than its photo or a class beyond the list, or no map of a half has a class. Files are named.
    """
    root = Path(spec).expanduser()
    if not root.is_dir():
        raise ValueError(f"data: expected a folder with {LAYOUT}, got {spec!r}, which is no folder")
    photos, maps = (_folder(root, names) for names in (PHOTOS, MAPS))
    parts = _halves(root, photos, maps, test_split)
    paired = [_paired(photo_folder, map_folder) for photo_folder, map_folder in parts]
    if len(paired) == 1:
        paired = _hold_out(photos, *paired[0])
    names = _class_names(root)
    classes = names or _count_classes([found for _, half in paired for found in half], zero_is_class)
    numbers = Numbers(len(classes), zero_is_class)
    halves = [
        _checked(Pairs(photo_files, map_files, numbers, ()), purpose)
        for purpose, (photo_files, map_files) in zip(("learned from", "judged by"), paired, strict=True)
    ]
    if memory:
        halves = [_stored(half) for half in halves]
    train, test = halves
    about = f"scenes in {root} ({', '.join(part[0].name for part in parts) if len(parts) == 2 else _held_out_note()})"
    return Scenes(about, train, test, classes, fingerprint(root, halves, classes))


def _folder(root: Path, names: Sequence[str]) -> Path:
    found = next((root / name for name in names if (root / name).is_dir()), None)
    if found is None:
        here = sorted(path.name for path in root.iterdir() if path.is_dir())
        raise ValueError(
            f"data: expected in {root} {LAYOUT}, found no folder called {' or '.join(names[:3])}; there are "
            f"{', '.join(here[:8]) or 'no folders'}"
        )
    return found


def _halves(root: Path, photos: Path, maps: Path, test_split: str | None) -> list[tuple[Path, Path]]:
    """Folders of photos and maps of both halves, or of all together."""
    train = next((name for name in TRAINS if (photos / name).is_dir()), None)
    if train is None:
        if test_split is not None:
            raise ValueError(f"test_split: expected none, as {photos} has no folder {TRAINS[0]}, got {test_split!r}")
        return [(photos, maps)]
    test = test_split or next((name for name in TESTS if (photos / name).is_dir()), None)
    if test is None:
        raise ValueError(f"data: expected a folder of photos to be judged by, {photos / TESTS[0]}, found none")
    for part in (train, test):
        for folder in (photos / part, maps / part):
            if not folder.is_dir():
                raise ValueError(f"data: expected a folder {folder}, found none; {root} should hold {LAYOUT}")
    return [(photos / train, maps / train), (photos / test, maps / test)]


def _paired(photos: Path, maps: Path) -> tuple[list[str], list[str]]:
    """Files of photos and maps under two folders that have the same names but for their endings."""
    found = [_by_name(folder) for folder in (photos, maps)]
    if not found[0]:
        raise ValueError(f"data: expected photos in {photos}, found none; their names end in .jpg, .png or the like")
    for one, other, folder, noun in ((0, 1, maps, "map"), (1, 0, photos, "photo")):
        alone = [path for name, path in found[one].items() if name not in found[other]]
        if alone:
            raise ValueError(
                f"data: expected a {noun} in {folder} for every file of the same name, but {_some(alone)} "
                f"{'has' if len(alone) == 1 else 'have'} none"
            )
    names = list(found[0])
    return [found[0][name] for name in names], [found[1][name] for name in names]


def _by_name(folder: Path) -> dict[str, str]:
    """All images under a folder, however deep, by their names without ending; sorted, numbers as numbers."""
    found: dict[str, str] = {}
    for one in image_files(folder, every_name=True):
        found[os.path.splitext(os.path.relpath(one.path, folder))[0]] = one.path
    return dict(sorted(found.items(), key=lambda item: _natural(item[0])))


def _natural(name: str) -> tuple[list[tuple[int, str]], str]:
    return [(int(piece), "") if piece.isdecimal() else (-1, piece) for piece in re.split(r"(\d+)", name)], name


def _hold_out(photos: Path, files: list[str], maps: list[str]) -> list[tuple[list[str], list[str]]]:
    """Two halves of what comes in one, by a digest of the photos' names."""
    if len(files) < 2:
        raise ValueError(f"data: expected two photos or more in {photos}, as one in {HELD_OUT} is held out, got one")

    def rank(index: int) -> bytes:
        name = os.path.relpath(files[index], photos)
        return hashlib.blake2b(name.encode("utf-8", "surrogateescape")).digest()

    held = set(sorted(range(len(files)), key=rank)[: max(1, len(files) // HELD_OUT)])
    chosen = [[i for i in range(len(files)) if (i in held) == out] for out in (False, True)]
    return [([files[i] for i in part], [maps[i] for i in part]) for part in chosen]


def _held_out_note() -> str:
    return f"one in {HELD_OUT} held out for testing"


def _class_names(root: Path) -> tuple[str, ...] | None:
    """Names of the classes, where a file tells them."""
    path = next((root / name for name in NAMES if (root / name).is_file()), None)
    return None if path is None else read_names(path)


def read_names(path: Path) -> tuple[str, ...]:
    """Names of classes out of a file: one per line, or ADE20K's own table.

    Raises:
        ValueError: If there are none, or one comes twice.
    """
    lines = [line.strip() for line in text_of(path).splitlines() if line.strip()]
    if path.name == NAMES[1]:
        lines = [line.split("\t")[-1].strip() for line in lines[1:]]
    if not lines:
        raise ValueError(f"{path}: expected the name of a class on every line, got an empty file")
    if len(lines) > MOST_CLASSES:
        raise ValueError(f"{path}: expected at most {MOST_CLASSES:,} classes, got {len(lines):,}")
    twice = sorted(name for name, times in Counter(lines).items() if times > 1)
    if twice and path.name == NAMES[0]:
        raise ValueError(f"{path}: expected every class once, got {_some(twice)} twice")
    return tuple(lines)


def _count_classes(maps: Sequence[str], zero_is_class: bool) -> tuple[str, ...]:
    """Classes by number, as many as the maps have, where nobody names them."""

    def largest(path: str) -> int:
        try:
            numbers = read_map(path)
        except CorruptImage:
            return 0
        return int(numbers[numbers != 255].max(initial=0))

    tops = in_threads(largest, maps)
    most = max(tops)
    first = 0 if zero_is_class else 1
    if most >= MOST_CLASSES + first:
        raise ValueError(
            f"{maps[tops.index(most)]}: expected class numbers up to {MOST_CLASSES + first - 1}, got {most:,}; is it a "
            "map of classes?"
        )
    if most < first:
        raise ValueError(f"data: expected class numbers in the maps, found nothing but {most}; is 0 a class?")
    return tuple(f"class {number}" for number in range(first, most + 1))


def _checked(half: Pairs, purpose: str) -> Pairs:
    """The half with its sizes, if no pair is wrong as far as can be told quickly."""
    spread = set(np.linspace(0, len(half) - 1, min(len(half), CHECKED)).astype(int).tolist())

    bare: set[int] = set()  # maps in which no pixel has a class

    def look(index: int) -> tuple[tuple[int, int], str | None]:
        try:
            size, own = size_of(half.photos[index]), size_of(half.maps[index])
            if size != own:
                return size, other_size(half.maps[index], own, size)
            if index in spread:
                labels = half.numbers.labels(read_map(half.maps[index]), half.maps[index])
                if (labels == UNLABELLED).all():
                    bare.add(index)
        except WrongMap as error:
            return size, str(error)  # pyright: ignore[reportPossiblyUnboundVariable]  # a map comes after its photo
        except CorruptImage:
            return UNKNOWN, None  # is passed over and counted, as long as there are few
        return size, None

    found = in_threads(look, range(len(half)))
    wrong = [message for _, message in found if message is not None]
    if wrong:
        more = f" ({len(wrong) - 1} more maps are wrong)" if len(wrong) > 1 else ""
        raise ValueError(f"{wrong[0]}{more}")
    if len(bare) == len(spread):
        raise ValueError(_without_classes(half, purpose))
    return replace(half, sizes=[size for size, _ in found])


def _without_classes(half: Pairs, purpose: str) -> str:
    """The sentence for a half in whose maps no pixel has a class."""
    zero = half.numbers.zero_is_class
    nothing = f"{VOID}" if zero else f"0, which is unlabelled, and {VOID}"
    return (
        f"{Path(half.maps[0]).parent}: expected class numbers from {half.numbers.first} on in the maps that are "
        f"{purpose}, found nothing but {nothing}; write the number of its class for every pixel"
        f"{'' if zero else ', or set zero_is_class=true if 0 is a class'}"
    )


def _stored(half: Pairs) -> Pairs:
    """The half with everything decoded that can be."""

    def decode(index: int) -> tuple[np.ndarray[tuple[int, ...], np.dtype[np.uint8]], Labels] | None:
        try:
            photo, labels = half[index]
        except CorruptImage:
            return None
        return np.asarray(photo), labels

    return replace(half, stored=in_threads(decode, range(len(half))))


def unreadable(half: Pairs) -> list[int]:
    """Numbers of pairs that cannot be read, as far as a quick look finds them.

    Each of a thousand is decoded, or a thousand evenly among more; of all, the beginnings were read before.
    """
    decoded = range(0, len(half), -(-len(half) // MOST_DECODED) or 1)

    def is_bad(index: int) -> bool:
        try:
            half[index]
        except CorruptImage:
            return True
        return False

    bad = {index for index, found in zip(decoded, in_threads(is_bad, decoded), strict=True) if found}
    return sorted(bad | {index for index, size in enumerate(half.sizes) if size == UNKNOWN})


def _some(paths: Sequence[str]) -> str:
    return ", ".join(paths[:NAMED]) + (f" and {len(paths) - NAMED} more" if len(paths) > NAMED else "")
