"""A process in which sockets, other processes, unpickling and writing are forbidden while a file is read."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

FORBIDDEN = (
    "socket.",
    "subprocess.",
    "os.system",
    "os.exec",
    "os.fork",
    "os.posix_spawn",
    "os.spawn",
    "pty.",
    "pickle.find_class",
    "urllib.",
    "http.",
    "ftplib.",
    "webbrowser.",
    "shutil.",
    "os.remove",
    "os.rename",
    "os.mkdir",
)
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Crossed(BaseException):
    """Something forbidden was tried; no `except Exception` hides it."""


class Guard:
    """Watches this process for good, and forbids while it is told to.

    Attributes:
        crossed: What was tried.
    """

    def __init__(self) -> None:
        self.crossed: list[str] = []
        self._on = False
        self._cache: str | None = None
        sys.addaudithook(self._hear)

    @contextmanager
    def forbidding(self, cache: str | None = None) -> Generator[None]:
        """Within it, what is forbidden raises `Crossed` and is written down; but for files in a folder of its own."""
        self._on, self._cache = True, None if cache is None else os.path.realpath(cache)
        # Python would keep what it compiles of modules that are imported on the way, in folders that it makes.
        sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
        try:
            yield
        finally:
            self._on = False
            sys.dont_write_bytecode = before

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._on or (self._cache is not None and _stays_in(self._cache, event, args)):
            return
        if event.startswith(FORBIDDEN) or (event == "open" and _writes(args)):
            self.crossed.append(f"{event} {args!r}"[:300])
            raise Crossed(self.crossed[-1])


def _writes(args: tuple[Any, ...]) -> bool:
    _, _, flags = args
    return bool(flags & WRITING)


def _stays_in(folder: str, event: str, args: tuple[Any, ...]) -> bool:
    """Whether an event is about files in a folder and none beside."""
    if event != "open" and not event.startswith(("os.", "shutil.")):
        return False
    paths = [str(x) for x in args[:2] if isinstance(x, (str, os.PathLike)) and os.sep in str(x)]
    return bool(paths) and all((os.path.realpath(path) + os.sep).startswith(folder + os.sep) for path in paths)
