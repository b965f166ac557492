"""Folders that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def appearing(folder: Path) -> Generator[Path]:
    """A name beside a new folder to write to, which becomes the folder once all is written.

    Raises:
        ValueError: If the folder is there already.
    """
    if folder.exists():
        raise ValueError(f"{folder}: expected a new folder, got one that exists; remove it or choose another")
    beside = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    try:
        yield beside
        beside.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
