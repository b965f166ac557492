"""A folder has one owner: a lock that dies with its process, and a sentence that names who holds it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import stat
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from .faults import OtherRun, SaveError

OWNER = ".owner.json"
NO_LINKS = getattr(os, "O_NOFOLLOW", 0)  # or a folder of somebody else's could have another file overwritten
TAKEN = (errno.EACCES, errno.EAGAIN, errno.EWOULDBLOCK)
# What disks say that have no locks; then what the file says has to do.
LOCKLESS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@contextmanager
def owned(folder: Path) -> Generator[None]:
    """Hold a folder as long as this process wants, and lives.

    The lock is the system's own for a range of a file, which a killed process loses at once and children do not
    inherit. It holds between the machines of a network disk if the disk carries locks; on one that does not, a process
    that the file names and that lives on this machine counts as the owner.

    Args:
        folder: Made if it is not there.

    Raises:
        OtherRun: If another process holds it.
        SaveError: If it cannot be written to.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as place:
        ...     with owned(Path(place)):
        ...         held = (Path(place) / OWNER).is_file()
        ...     held, (Path(place) / OWNER).exists()
        (True, False)
    """
    path = folder / OWNER
    made = not folder.exists()
    try:
        handle = _taken(path)
    except OSError as error:
        said = error.strerror or str(error)
        raise SaveError(f"{folder} cannot be written to: {said}. Give --output another folder.") from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(handle)  # and with it goes the lock
        if made:
            with contextlib.suppress(OSError):  # unless something is in it by now
                folder.rmdir()


def _taken(path: Path) -> int:
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)  # again, where its owner has just left and removed it
            handle = os.open(path, os.O_RDWR | os.O_CREAT | NO_LINKS, 0o644)
        except FileNotFoundError:
            continue
        except FileExistsError:  # mkdir's, too, where the folder was removed before it could see that it is one
            if _is_in_the_way(path.parent):
                raise
            continue
        try:
            _lock(handle, path)
            if _is_still(handle, path):
                os.truncate(handle, 0)
                os.pwrite(handle, _name_card(), 0)
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # its owner removed it between our opening and locking


def _is_in_the_way(folder: Path) -> bool:
    """Whether there is something of that name that is no folder."""
    try:
        return not stat.S_ISDIR(os.lstat(folder).st_mode)
    except FileNotFoundError:
        return False


def _lock(handle: int, path: Path) -> None:
    if sys.platform == "win32":
        import msvcrt

        try:
            os.lseek(handle, 2**30, os.SEEK_SET)  # beyond what is written, which others want to read
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        except OSError:
            raise _refusal(path) from None
        return
    import fcntl

    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in TAKEN:
            raise _refusal(path) from None
        if error.errno not in LOCKLESS:
            raise
        owner = _owner(path)
        if owner.get("host") == socket.gethostname() and _lives(owner.get("pid")):
            raise _refusal(path) from None


def _is_still(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def _refusal(path: Path) -> OtherRun:
    owner = _owner(path)
    who = f"process {owner['pid']} on {owner['host']}" if {"pid", "host"} <= owner.keys() else "another process"
    since = f", since {owner['since']}" if "since" in owner else ""
    return OtherRun(
        f"{path.parent} is in use by {who}{since}. Wait until that is through, stop it to go on from where it is, or "
        "give --output another folder."
    )


def _name_card() -> bytes:
    told = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    return json.dumps(told).encode()


def _owner(path: Path) -> dict[str, Any]:
    for _ in range(10):  # who has just taken it may not have written yet
        with contextlib.suppress(OSError, ValueError):
            told = json.loads(path.read_bytes()[:4096])
            return cast("dict[str, Any]", told) if isinstance(told, dict) else {}
        time.sleep(0.01)
    return {}


def _lives(pid: object) -> bool:
    if not isinstance(pid, int) or pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True
