"""Putting a result where the user asked, whole or not at all, and never over something else without being told to."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Placed:
    """Where a file ended up.

    Attributes:
        path: Its name.
        written: False if a file with exactly this content was already there and was left alone.
    """

    path: Path
    written: bool


def place(content: bytes, path: Path, *, force: bool = False) -> Placed:
    """Write a file through a temporary name, so that nobody ever sees half of it.

    A file that exists and differs is replaced only with `force`; otherwise the next free name is taken: `a.png`,
    `a-2.png`, `a-3.png` ... A file that already holds the same bytes is kept, so repeating a command adds nothing.

    Args:
        content: What the file shall hold.
        path: Where the user wants it.
        force: Whether to replace what is there.

    Returns:
        The name that was used, and whether anything was written.

    Raises:
        OSError: If the folder does not exist or cannot be written to.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     wanted = Path(folder, "a.txt")
        ...     [place(text, wanted).path.name for text in (b"one", b"two", b"one")]
        ['a.txt', 'a-2.txt', 'a.txt']
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        draft.write_bytes(content)
        for candidate in [path] if force else _candidates(path):
            if _holds(candidate, content):
                return Placed(candidate, written=False)
            if force or _reserved(candidate):
                os.replace(draft, candidate)
                return Placed(candidate, written=True)
        raise AssertionError("names do not run out")
    finally:
        draft.unlink(missing_ok=True)


def _candidates(path: Path) -> Iterator[Path]:
    yield path
    for number in itertools.count(2):
        yield path.with_name(f"{path.stem}-{number}{path.suffix}")


def _holds(path: Path, content: bytes) -> bool:
    return path.is_file() and path.read_bytes() == content


def _reserved(path: Path) -> bool:
    # Opening exclusively claims the name at once, so two runs side by side cannot pick the same one.
    try:
        path.open("xb").close()
    except FileExistsError:
        return False
    return True
