"""WebDataset shards as images by number.

timm reads shards as a stream: shuffled through a buffer, with no way to ask for one image or to go on in the middle of
an epoch as if nothing had happened. Tar files on a disk need not be read that way. Their headers say where each file
begins, so a table of places is made once, when the data set is opened, and after that a shard is a source like any
other. What the shards are called and what is in them is as timm's reader has it: `_info.json` lists the shards of each
split, a sample is a run of files with the same stem, `.cls` holds its class.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ....models.making import short
from ..reading import CorruptImage, decode
from .folder import natural
from .images import Digest, Images
from .splits import pick

INFO = ("_info.json", "info.json")
CLASS_NAMES = "classnames.txt"  # one name a line, as many published shards have it
PICTURES = ("jpg", "jpeg", "png", "webp")
TARGET = "cls"
MOST_CLASSES = 2**20
STEM = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)")


@dataclass(frozen=True)
class Split:
    """The shards of a half.

    Attributes:
        name: Of the split.
        shards: Their files.
        alt_label: The entry of `.json` that holds the class, if `.cls` does not.
    """

    name: str
    shards: tuple[Path, ...]
    alt_label: str = ""


@dataclass
class Table:
    """Where the images of a half are: one entry for each, in all lists."""

    shards: list[int] = field(default_factory=list[int])
    offsets: list[int] = field(default_factory=list[int])
    sizes: list[int] = field(default_factory=list[int])
    labels: list[int] = field(default_factory=list[int])
    keys: list[str] = field(default_factory=list[str])


class ShardSource:
    """Images in tar files.

    Args:
        split: The files.
    """

    def __init__(self, split: Split) -> None:
        table = Table()
        for number, shard in enumerate(split.shards):
            _index(shard, number, split.alt_label, table)
        if not table.labels:
            target = f"{split.alt_label} in json" if split.alt_label else TARGET
            raise ValueError(
                f"{split.shards[0].parent}: expected samples with an image ({', '.join(PICTURES)}) and its class "
                f"({target}) in the {split.name} shards, found none"
            )
        self.shards = split.shards
        self.places: NDArray[np.int64] = np.array([table.shards, table.offsets, table.sizes], np.int64)
        self.labels, self.keys = np.array(table.labels, np.int64), table.keys

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        shard, offset, size = (int(number) for number in self.places[:, index])
        try:
            # Opened anew each time: an open file would be shared by the processes that load, with one position for all.
            with self.shards[shard].open("rb") as file:
                file.seek(offset)
                content = file.read(size)
        except OSError as error:
            raise CorruptImage(f"{self.path(index)}: cannot be read ({error})") from error
        return decode(io.BytesIO(content), self.path(index)), int(self.labels[index])

    def path(self, index: int) -> str:
        """Its shard, and the stem of its files there."""
        return f"{self.shards[int(self.places[0, index])]}:{self.keys[index]}"

    def mark(self, digest: Digest) -> None:
        """Names, places, sizes and classes of the samples, and the names of the shards."""
        digest.update(
            "\n".join((*(shard.name for shard in self.shards), *self.keys)).encode("utf-8", "surrogateescape")
        )
        digest.update(np.ascontiguousarray(self.places))
        digest.update(np.ascontiguousarray(self.labels))


def read(folder: Path) -> Images:
    """Open a folder of shards.

    Raises:
        ValueError: If there are no shards, or one is missing or damaged.
    """
    train, test = (_split(folder, *choice) for choice in _choose(folder))
    sources = ShardSource(train), ShardSource(test)
    classes = 1 + max(int(source.labels.max()) for source in sources)
    return Images(f"shards in {folder} ({train.name}, {test.name})", *sources, _names(folder, classes), None, 3)


def _choose(folder: Path) -> list[tuple[str, Sequence[Path] | None]]:
    """The names of the two splits; with their shards, if no file lists those."""
    listed = next((folder / name for name in INFO if (folder / name).is_file()), None)
    if listed is not None:
        try:
            names: Iterable[str] = json.loads(listed.read_text(encoding="utf-8"))["splits"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{listed}: expected JSON with the splits, as timm writes it ({error})") from error
        return [(name, None) for name in pick(list(names), folder)]
    found = sorted(folder.rglob("*.tar"), key=lambda path: natural(str(path)))
    if not found:
        raise ValueError(f"wds/{folder}: expected shards, files that end in .tar, found none")
    shards: dict[str, list[Path]] = {}
    for path in found:  # a shard is of every split that its name speaks of, such as pets-train-0001.tar
        for word in set(re.findall(r"[a-z]+", path.relative_to(folder).as_posix().lower())):
            shards.setdefault(word, []).append(path)
    return [(name, shards[name]) for name in pick(sorted(shards), folder)]


def _split(folder: Path, name: str, shards: Sequence[Path] | None) -> Split:
    if shards is not None:
        return Split(name, tuple(shards))
    try:
        from timm.data.readers.reader_wds import ReaderWds

        found = ReaderWds(root=str(folder), split=name).split_info
    except RuntimeError as error:
        raise ValueError(f"wds/{folder}: {error}; run pip install 'affinear[datasets]'") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder}: what it lists of the split {name} is not as timm writes it ({error!r})") from error
    names = [str(one) for one in found.filenames]
    if any(Path(one).is_absolute() or ".." in Path(one).parts for one in names):
        raise ValueError(f"{folder}: expected shards of {name} in the folder itself, got one elsewhere")
    paths = tuple(folder / one for one in names)
    missing = [path.name for path in paths if not path.is_file()]
    if missing or not paths:
        raise ValueError(f"{folder}: shards of {name} that are listed are missing: {', '.join(missing[:8]) or 'all'}")
    return Split(name, paths, found.alt_label)


def _index(shard: Path, number: int, alt_label: str, table: Table) -> None:
    try:
        length = shard.stat().st_size
        with tarfile.open(shard, "r:") as tar, shard.open("rb") as file:
            for key, files in _samples(tar):
                picture = next((files[one] for one in PICTURES if one in files), None)
                target = files.get("json" if alt_label else TARGET)
                if picture is None or target is None:
                    continue
                file.seek(target.offset_data)
                label = _label(file.read(target.size), alt_label, f"{shard}:{key}")
                if label < 0:  # as timm has it, a sample that the other labels leave out
                    continue
                if not 0 <= picture.offset_data + picture.size <= length:
                    raise tarfile.ReadError(f"{key} goes on beyond its end")
                table.shards.append(number)
                table.offsets.append(picture.offset_data)
                table.sizes.append(picture.size)
                table.labels.append(label)
                table.keys.append(key)
    except (tarfile.TarError, OSError, OverflowError, EOFError) as error:
        raise ValueError(f"{shard}: cannot be read as a tar file that is not packed ({error})") from error


def _samples(tar: tarfile.TarFile) -> Iterator[tuple[str, dict[str, tarfile.TarInfo]]]:
    named = ((STEM.fullmatch(member.name), member) for member in tar if member.isfile())
    found = ((match[1], match[2].lower(), member) for match, member in named if match is not None)
    for key, run in groupby(found, key=lambda one: one[0]):
        yield key, {suffix: member for _, suffix, member in run}


def _label(content: bytes, alt_label: str, name: str) -> int:
    try:
        label = int(json.loads(content)[alt_label]) if alt_label else int(content)
    except (ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError) as error:
        raise ValueError(f"{name}: expected a number as its class ({type(error).__name__}: {error})") from error
    if abs(label) > MOST_CLASSES:
        raise ValueError(f"{name}: expected the number of its class, below {MOST_CLASSES}, got {short(label)}")
    return label


def _names(folder: Path, classes: int) -> tuple[str, ...]:
    path = folder / CLASS_NAMES
    if not path.is_file():
        return tuple(map(str, range(classes)))
    names = tuple(path.read_text(encoding="utf-8").splitlines())
    if len(names) < classes:
        raise ValueError(f"{path}: expected the names of {classes} classes, got {len(names)}")
    return names
