"""What a file is that is taken for weights and is none: empty, text, or a program."""

from __future__ import annotations

import pickletools
import zipfile
from pathlib import Path
from typing import IO

BEGINNING = 2**12  # bytes that are looked at
LONGEST = 2**24  # bytes of the header of a file of safetensors: a hundred thousand tensors
SHOWN = 40  # characters of a text that are shown
MOST_STEPS = 10_000  # of a pickle


def complaint(path: Path) -> str:
    """What is wrong with a file that somebody takes for weights, in a few words; nothing if it may be some.

    Raises:
        OSError: If it cannot be read.

    Example:
        >>> import tempfile
        >>> from affinear.models.recognising import complaint
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "weights.pth")
        ...     _ = path.write_text("epoch 1")
        ...     complaint(path)
        "expected weights, got a text file; it begins with 'epoch 1'"
    """
    with path.open("rb") as file:
        begin = file.read(BEGINNING)
    if not begin:
        return "expected weights, got an empty file"
    head = int.from_bytes(begin[:8], "little")
    if path.suffix == ".safetensors" and begin[8:9] == b"{" and head > LONGEST:
        return f"expected a header of at most {LONGEST:,} bytes, got one of {head:,}: no network has so many tensors"
    text = _text_of(begin)
    if text is None or would_run(path) is not None:  # the oldest pickles are text, too
        return ""
    kind = (
        "a pointer of Git LFS; fetch what it points to with `git lfs pull`"
        if text.startswith("version https://git-lfs")
        else "a page of HTML, perhaps in place of a download"
        if text.lstrip().lower().startswith(("<!doctype html", "<html"))
        else "a text file"
    )
    first = text.strip().partition("\n")[0][:SHOWN]
    return f"expected weights, got {kind}; it begins with {first!r}"


def would_run(path: Path) -> str | None:
    """Name of the first thing that a pickle, or one that torch wrote, would import, such as posix.system.

    The pickle is read as a list of instructions, and none of them is followed.

    Returns:
        The name; None if nothing would be imported, or it is no pickle.
    """
    try:
        if not zipfile.is_zipfile(path):
            with path.open("rb") as file:
                return _first_import(file)
        with zipfile.ZipFile(path) as archive:
            inner = next(name for name in archive.namelist() if name.endswith("data.pkl"))
            with archive.open(inner) as file:
                return _first_import(file)
    except Exception:  # a damaged file makes its readers raise nearly anything
        return None


def _first_import(file: IO[bytes]) -> str | None:
    words: list[str] = []
    found: str | None = None
    for step, (opcode, argument, _) in enumerate(pickletools.genops(file)):  # to its end, or it is no pickle
        if opcode.name == "GLOBAL":
            found = found or str(argument).replace(" ", ".")
        elif opcode.name == "STACK_GLOBAL" and len(words) > 1:
            found = found or ".".join(words[-2:])
        elif isinstance(argument, str):
            words = [*words[-3:], argument]
        if step > MOST_STEPS:
            break
    return found


def _text_of(begin: bytes) -> str | None:
    """The bytes as text, if they are."""
    for cut in range(4):  # the last sign may have been cut
        try:
            text = begin[: len(begin) - cut].decode("utf-8")
        except UnicodeDecodeError:
            continue
        return text if all(sign.isprintable() or sign in "\t\r\n\f" for sign in text) else None
    return None
