"""Documents out of files: text, JSON lines, parquet, or a data set of Hugging Face on the disk."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, cast

from ..told import json_of

DOCUMENTS = ("file", "line", "paragraph")
TEXT, LINES, TABLES = (".txt", ".md"), (".jsonl", ".ndjson"), (".parquet",)
SUFFIXES = (*TEXT, *LINES, *TABLES)
TEST = ("test", "validation", "valid", "val", "eval")
BETWEEN = {"line": re.compile(r"\r?\n"), "paragraph": re.compile(r"\r?\n[ \t]*\r?\n")}
MARK = "\ufeff"  # with which some editors begin a file
LOOKED_FOR = (
    f"files that end in {', '.join(SUFFIXES)}, those to be judged by beginning with test or val, or in a folder called "
    "so; a data set of Hugging Face (dataset_dict.json or state.json); token files (manifest.json)"
)

Half = Literal["train", "test"]


@dataclass(frozen=True)
class Reading:
    """How files are read.

    Attributes:
        documents: What of a text file is one document.
        text_field: The field that holds the text, where there are fields.
        held_out: One document in so many is to be judged by, where files do not say it.
    """

    documents: str = "file"
    text_field: str = "text"
    held_out: int = 100


@dataclass(frozen=True, eq=False)
class Texts:
    """A corpus that is open: documents of both halves, read anew each time.

    Attributes:
        name: For people.
        train: Files to learn from, or a part of a data set.
        test: Files to be judged by; none where some documents are held out.
        reading: How they are read.
        sizes: Documents to learn from, and to be judged by.
        fingerprint: Of the names and contents of files, and of how they are read.
    """

    name: str
    train: Sequence[Path]
    test: Sequence[Path]
    reading: Reading
    sizes: tuple[int, int]
    fingerprint: str

    def texts(self, half: Half) -> Iterator[str]:
        """The documents of a half, none of them empty."""
        return documents(self.train, self.test, self.reading, half)


def open_texts(path: Path, reading: Reading) -> Texts:
    """A file, a folder of files, or a data set of Hugging Face; every document is looked at once.

    Raises:
        ValueError: If there is no text, or a file cannot be read as what it is.
    """
    train, test = _files(path)
    sizes = _sizes(train, test, reading)
    if test and sizes[0] and not sizes[1]:
        raise ValueError(
            f"data: {path} is judged by {test[0].name}, in which there is no text; write some, or take it away"
        )
    if min(sizes) < 1:
        have = (
            "no text at all" if not sum(sizes) else f"{sizes[0]} documents to learn from and {sizes[1]} to be judged by"
        )
        raise ValueError(
            f"data: {path} has {have}; expected some of both. Without files for it, one document in {reading.held_out} "
            "is held out: --set held_out=2, or documents=paragraph or line, makes more of it"
        )
    return Texts(str(path), train, test, reading, sizes, _fingerprint(path, train, test, reading))


def documents(train: Sequence[Path], test: Sequence[Path], reading: Reading, half: Half) -> Iterator[str]:
    """The documents of a half; where there are no test files, every so many is held out."""
    if test:
        yield from _documents(train if half == "train" else test, reading)
        return
    for number, text in enumerate(_documents(train, reading)):
        held = number % reading.held_out == reading.held_out - 1
        if held == (half == "test"):
            yield text


def _documents(paths: Sequence[Path], reading: Reading) -> Iterator[str]:
    for path in paths:
        for text in _reader(path)(path, reading):
            if text.strip():
                yield text


def _sizes(train: Sequence[Path], test: Sequence[Path], reading: Reading) -> tuple[int, int]:
    """Documents of both halves, after one look at each."""
    learnt = sum(1 for _ in _documents(train, reading))
    if test:
        return learnt, sum(1 for _ in _documents(test, reading))
    held = learnt // reading.held_out
    return learnt - held, held


def _reader(path: Path) -> Callable[[Path, Reading], Iterator[str]]:
    if path.is_dir():
        return _hugging
    suffix = path.suffix.lower()
    if suffix in LINES:
        return _lines
    return _table if suffix in TABLES else _text


def _text(path: Path, reading: Reading) -> Iterator[str]:
    content = decoded(path.read_bytes(), path)
    if reading.documents == "file":
        yield content
    else:
        yield from BETWEEN[reading.documents].split(content)


def decoded(content: bytes, path: Path | str) -> str:
    """Bytes as text, without the mark that some editors begin a file with.

    Args:
        content: The bytes.
        path: Where they are from, for people.

    Raises:
        ValueError: If they are no UTF-8.
    """
    try:
        return content.decode("utf-8").removeprefix(MARK)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: expected text in UTF-8, got the byte {content[error.start]:#04x} at {error.start}; convert it, "
            "or take the file away"
        ) from None


def _lines(path: Path, reading: Reading) -> Iterator[str]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            told = json_of(decoded(line, f"{path}: line {number}"), f"{path}: line {number}")
            yield _field(told, reading.text_field, f"{path}: line {number}")


def _field(told: Any, name: str, where: str) -> str:
    fields = cast("dict[str, Any]", told) if isinstance(told, dict) else None
    found = None if fields is None else fields.get(name)
    if not isinstance(found, str):
        have = type(found if fields is not None and name in fields else told).__name__
        if fields is not None and name not in fields:
            have = ", ".join(map(str, fields))[:80]
        raise ValueError(
            f"{where}: expected a text in the field {name!r}, got {have}; --set text_field=NAME says which"
        )
    try:
        found.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: expected Unicode, got half a pair of surrogates at {error.start}") from None
    return found


def _table(path: Path, reading: Reading) -> Iterator[str]:
    if find_spec("pyarrow") is None:
        raise ValueError(f"{path}: parquet needs pyarrow: pip install pyarrow")
    from pyarrow import ArrowException, parquet

    arrow: Any = parquet
    try:
        names = [str(name) for name in arrow.read_schema(path).names]
        if reading.text_field not in names:
            _field(dict.fromkeys(names), reading.text_field, str(path))
        # A text that comes a million times lies in the file once, and should not lie in memory more often.
        file = arrow.ParquetFile(path, read_dictionary=[reading.text_field])
        for batch in file.iter_batches(columns=[reading.text_field]):
            for text in batch.column(0):
                yield _field({reading.text_field: text.as_py()}, reading.text_field, str(path))
    except KeyError:  # a column of columns
        raise ValueError(
            f"{path}: expected texts in the column {reading.text_field!r}, got one of several parts"
        ) from None
    except (ArrowException, OSError) as error:
        raise ValueError(f"{path}: expected parquet ({str(error).splitlines()[0][:120]})") from None


def _hugging(path: Path, reading: Reading) -> Iterator[str]:
    if find_spec("datasets") is None:
        raise ValueError(f"{path}: a data set of Hugging Face needs datasets: pip install 'affinear[datasets]'")
    import datasets

    try:
        found: Any = datasets.load_from_disk(str(path))
    except (FileNotFoundError, ValueError, OSError) as error:
        raise ValueError(f"{path}: expected a data set of Hugging Face ({str(error).splitlines()[0][:120]})") from None
    for row in found:
        yield _field(row, reading.text_field, str(path))


def _files(path: Path) -> tuple[list[Path], list[Path]]:
    """Files to learn from, and to be judged by."""
    if path.is_file():
        if path.suffix.lower() not in SUFFIXES:
            raise ValueError(f"data: {path}: expected a file that ends in {', '.join(SUFFIXES)}")
        return [path], []
    if not path.is_dir():
        raise ValueError(
            f"data: expected a file or a folder of text, recall, copy, got {str(path)!r}: there is nothing of that "
            "name; nothing is fetched"
        )
    if (path / "state.json").is_file():
        return [path], []
    if (path / "dataset_dict.json").is_file():
        parts = [one for one in sorted(path.iterdir()) if (one / "state.json").is_file()]
    else:
        parts = sorted(one for one in path.rglob("*") if one.suffix.lower() in SUFFIXES and one.is_file())
    train = [one for one in parts if not _is_named(one, path, TEST)]
    test = [one for one in parts if _is_named(one, path, TEST)]
    if not train:
        names = sorted(one.name + "/" * one.is_dir() for one in path.iterdir())
        listed = ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
        raise ValueError(f"data: {path} has no text. Looked for: {LOOKED_FOR}. Found: {listed or 'nothing'}")
    return train, test


def _is_named(path: Path, root: Path, names: Sequence[str]) -> bool:
    """Whether a file, or a folder below `root` that it lies in, is called so."""
    return any(re.split(r"[.\-_]", part.lower(), maxsplit=1)[0] in names for part in path.relative_to(root).parts)


def _fingerprint(root: Path, train: Sequence[Path], test: Sequence[Path], reading: Reading) -> str:
    digest = hashlib.blake2b(str(reading).encode(), digest_size=12)
    for half in (train, test):
        for path in half:
            files = sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [path]
            for file in files:
                name = os.path.relpath(file, root if root.is_dir() else root.parent)
                digest.update(f"\n{name} {file.stat().st_size} ".encode("utf-8", "surrogateescape"))
                with file.open("rb") as opened:
                    while some := opened.read(2**20):
                        digest.update(some)
        digest.update(b"\n\n")
    return digest.hexdigest()
