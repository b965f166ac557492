"""Tokens of a corpus in files that are mapped into memory, with a manifest that says what they are."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ..told import json_of, text_of
from .reading import Half, Texts
from .spelling import Spelling
from .spelling import read as read_spelling

MANIFEST, TOKENIZER = "manifest.json", "tokenizer.json"
VERSION = 1
TOGETHER, SIGNS = 256, 2**18  # pieces of documents, and their characters, that are spelled at once
DTYPES = {"uint16": np.uint16, "uint32": np.uint32}

Tokens = NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True, eq=False)
class TokenFiles:
    """Tokens of both halves: documents end to end, each after the token `end`.

    Attributes:
        name: For people: the corpus they were made of.
        folder: Where the files are.
        spelling: What they are tokens of.
        train: To learn from, mapped.
        test: To be judged by, mapped.
        sizes: Documents of both halves.
        fingerprint: Of corpus and tokenizer.
    """

    name: str
    folder: Path
    spelling: Spelling
    train: Tokens
    test: Tokens
    sizes: tuple[int, int]
    fingerprint: str

    def half(self, half: Half) -> Tokens:
        """Of one half."""
        return self.train if half == "train" else self.test


def cache() -> Path:
    """Where token files are kept: AFFINEAR_CACHE, or affinear in the user's cache folder."""
    told = os.environ.get("AFFINEAR_CACHE")
    if told:
        return Path(told)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "affinear"


def mark_of(texts: Texts, spelling: Spelling) -> str:
    """A few letters that are others for another corpus or another tokenizer."""
    told = f"{VERSION} {texts.fingerprint} {spelling.text}"
    return hashlib.blake2b(told.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()


def kept(texts: Texts, spelling: Spelling) -> TokenFiles:
    """The tokens of a corpus, from the cache, or written there first."""
    folder = cache() / "tokens" / mark_of(texts, spelling)
    if not (folder / MANIFEST).is_file():
        write(texts, spelling, folder)
    return read(folder)


def write(texts: Texts, spelling: Spelling, folder: Path) -> Path:
    """Spell a corpus into token files. `--data FOLDER` then opens them, and they can go to another machine.

    Args:
        texts: The corpus.
        spelling: The tokenizer.
        folder: A new one. It appears whole or not at all; where another process was faster, its files stay.

    Raises:
        ValueError: If something else is there already, or the folder cannot be written.
    """
    if folder.is_dir() and not (folder / MANIFEST).is_file() and any(folder.iterdir()):
        raise ValueError(f"tokens: {folder} holds other files; give a new folder")
    beside = folder.with_name(f"{folder.name}.part-{os.getpid()}")
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        _write(texts, spelling, beside)
        try:
            beside.rename(folder)
        except OSError:
            if not (folder / MANIFEST).is_file():
                raise
    except OSError as error:
        raise ValueError(f"tokens: they cannot be written to {folder} ({error.strerror or error})") from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return folder


def _write(texts: Texts, spelling: Spelling, folder: Path) -> None:
    kind = "uint16" if spelling.size <= 2**16 else "uint32"
    counts: dict[str, int] = {}
    for half in ("train", "test"):
        counts[half] = 0
        with (folder / f"{half}.bin").open("wb") as file:
            for some in spelled(texts.texts(half), spelling):
                file.write(np.array(some, DTYPES[kind]).tobytes())
                counts[half] += len(some)
    (folder / TOKENIZER).write_text(spelling.text, encoding="utf-8")
    told = {
        "version": VERSION,
        "name": texts.name,
        "dtype": kind,
        "tokens": counts,
        "documents": list(texts.sizes),
        "vocabulary": spelling.size,
        "fingerprint": mark_of(texts, spelling),
    }
    (folder / MANIFEST).write_text(json.dumps(told, indent=1), encoding="utf-8")


def spelled(texts: Iterator[str], spelling: Spelling) -> Iterator[list[int]]:
    """The tokens of documents, each after the token `end`, some at a time, however long a document is."""
    pieces: list[str] = []
    begins: list[bool] = []  # whether a piece is the first of its document
    signs = 0
    for text in texts:
        for number, piece in enumerate(spelling.cut(text)):
            pieces.append(piece)
            begins.append(number == 0)
            signs += len(piece)
            if len(pieces) == TOGETHER or signs >= SIGNS:
                yield _flat(spelling, pieces, begins)
                pieces, begins, signs = [], [], 0
    if pieces:
        yield _flat(spelling, pieces, begins)


def _flat(spelling: Spelling, pieces: Sequence[str], begins: Sequence[bool]) -> list[int]:
    """Tokens of pieces end to end, the beginnings of documents marked."""
    found: list[int] = []
    for row, begin in zip(spelling.encode(pieces), begins, strict=True):
        found += [spelling.end, *row] if begin else row
    return found


def read(folder: Path) -> TokenFiles:
    """Token files, mapped.

    Raises:
        ValueError: If one is missing, or not as long as the manifest says, or holds what is no token.
    """
    try:
        told = json_of(text_of(folder / MANIFEST), MANIFEST)
        if not isinstance(told, dict) or told.get("version") != VERSION or told.get("dtype") not in DTYPES:
            raise ValueError("the manifest is of another version")
        about = cast("dict[str, Any]", told)
        spelling = read_spelling(folder / TOKENIZER)
        if spelling.size != about["vocabulary"]:
            raise ValueError(f"the tokenizer has {spelling.size} tokens, not {about['vocabulary']}")
        train, test = (_mapped(folder, half, about, spelling.size) for half in ("train", "test"))
        sizes = (int(about["documents"][0]), int(about["documents"][1]))
        return TokenFiles(str(about["name"]), folder, spelling, train, test, sizes, str(about["fingerprint"]))
    except (OSError, ValueError, KeyError, TypeError, IndexError, OverflowError) as error:
        said = (str(error).splitlines() or [type(error).__name__])[0][:160]
        raise ValueError(f"data: the token files in {folder} cannot be used: {said}") from None


def _mapped(folder: Path, half: str, about: dict[str, Any], size: int) -> Tokens:
    count, kind = int(about["tokens"][half]), DTYPES[about["dtype"]]
    path = folder / f"{half}.bin"
    if count < 2 or path.stat().st_size != count * np.dtype(kind).itemsize:
        raise ValueError(f"{path.name} does not have {count:,} tokens")
    found = np.memmap(path, kind, "r")
    for first in range(0, count, 2**24):
        if int(found[first : first + 2**24].max()) >= size:
            raise ValueError(f"{path.name} has tokens beyond the vocabulary of {size}")
    return found
