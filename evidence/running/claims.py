"""Claims of processes that share out work among themselves, each of them started by the same command."""

from __future__ import annotations

import fcntl
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def claimed(path: Path, wait: bool = False) -> Generator[bool, None, None]:
    """Whether this process has a claim that no other has; it ends with the process, however that ends.

    Args:
        path: The file that stands for what is claimed; it is left there.
        wait: Until it can be had.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True
