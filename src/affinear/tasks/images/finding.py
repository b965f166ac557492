"""The image files of a folder, or those of other kinds: regular files, each real one once, however links lead there."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from .reading import suffixes

Identity = tuple[int, int]  # device and number of a file, the same by whatever name it is reached


@dataclass(frozen=True)
class Found:
    """A file.

    Attributes:
        path: By which it was found.
        identity: Device and number, the same for all names of one file.
    """

    path: str
    identity: Identity


def image_files(folder: Path, *, every_name: bool = False) -> list[Found]:
    """All image files under a folder: see `files_ending`."""
    return files_ending(folder, suffixes(), every_name=every_name)


def files_ending(folder: Path, endings: Collection[str], *, every_name: bool = False) -> list[Found]:
    """All files of some kinds under a folder, however deep, in no order; hidden ones do not count.

    Links to files and folders are followed. A pipe, a socket or a device is no file, and a folder that several links
    lead to is looked into once.

    Args:
        folder: Where to look.
        endings: Of the names of these kinds, in small letters.
        every_name: Whether a file that has several names is found by each of them, and not by the first alone.

    Raises:
        ValueError: If a link leads back to a folder that it is in; both are named.
    """
    every: list[Found] = []
    _walk(str(folder), (), set(), frozenset(endings), every)
    if every_name:
        return every
    first: dict[Identity, Found] = {}
    for one in every:
        first.setdefault(one.identity, one)
    return list(first.values())


def _walk(
    folder: str,
    above: tuple[tuple[Identity, str], ...],
    seen: set[Identity],
    endings: frozenset[str],
    found: list[Found],
) -> None:
    here = _identity(folder)
    loop = next((path for identity, path in above if identity == here), None)
    if loop is not None:
        raise ValueError(f"{folder}: a link that leads back to {loop}, which it is in; remove it")
    if here is None or here in seen:  # gone by now, or reached by another link already
        return
    seen.add(here)
    for entry in _entries(folder):
        if _is(entry.is_dir, entry.path):
            _walk(entry.path, (*above, (here, folder)), seen, endings, found)
        elif _is(entry.is_file, entry.path) and os.path.splitext(entry.name)[1].lower() in endings:
            identity = _identity(entry.path) if entry.is_symlink() else (here[0], entry.inode())
            if identity is not None:
                found.append(Found(entry.path, identity))


def _is(kind: Callable[[], bool], path: str) -> bool:
    try:
        return kind()
    except OSError as error:  # a link to itself, say
        raise ValueError(f"{path}: cannot be followed ({error.strerror}); remove it") from None


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted((entry for entry in entries if entry.name[0] != "."), key=lambda entry: entry.name)
    except OSError as error:
        raise ValueError(f"{folder}: cannot be read ({error.strerror})") from None


def _identity(path: str) -> Identity | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
