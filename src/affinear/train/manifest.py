"""The manifest of a checkpoint: which files it has, and the checksum of each."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, cast

MANIFEST = "manifest.json"
PIECE = 2**20


def write(folder: Path) -> None:
    """Write down every file of a folder."""
    files = [path for path in sorted(folder.iterdir()) if path.name != MANIFEST]
    told = {path.name: {"bytes": path.stat().st_size, "sha256": checksum(path)} for path in files}
    (folder / MANIFEST).write_text(json.dumps({"files": told}, indent=2), encoding="utf-8")


def fault(folder: Path, *, from_disk: bool = False) -> str:
    """What is wrong with the files of a folder, in words; nothing if all is as it was written.

    Args:
        folder: With a manifest.
        from_disk: Whether to ask the system to read the files anew, and not from its memory.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as place:
        ...     folder = Path(place)
        ...     _ = (folder / "a").write_text("one")
        ...     write(folder)
        ...     before = fault(folder)
        ...     _ = (folder / "a").write_text("two")
        ...     before, fault(folder)
        ('', 'a is not what was written: a bit of it has changed')
    """
    try:
        told = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = {str(name): (entry["bytes"], entry["sha256"]) for name, entry in told["files"].items()}
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"{MANIFEST} is damaged"
    for name, (size, digest) in files.items():
        path = folder / Path(name).name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, not {size}"
        if checksum(path, from_disk=from_disk) != digest:
            return f"{name} is not what was written: a bit of it has changed"
    others = sorted(
        path.name for path in folder.iterdir() if path.name not in {*files, MANIFEST} and path.name[0] != "."
    )
    return f"{others[0]} was not there when it was saved" if others else ""


def checksum(path: Path, *, from_disk: bool = False) -> str:
    """SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        if from_disk and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, cast("Any", os).POSIX_FADV_DONTNEED)
        while piece := file.read(PIECE):
            digest.update(piece)
    return digest.hexdigest()
