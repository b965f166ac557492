"""`--data`, open: pictures with classes as classification reads them, or latents in files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from ..images.labelled.images import Images, Source
from ..images.labelled.opening import open_data
from ..images.labelled.some import first_of
from ..told import text_of

MOST_CLASSES = 2**17
LATENTS = ("train.safetensors", "train.npz")


@dataclass(frozen=True, eq=False)
class LatentSource:
    """Latents of one size, all in memory.

    Attributes:
        name: Of this half, such as "train".
        latents: (N, C, H, W), float16 or float32.
        labels: The class of each, int64.
    """

    name: str
    latents: NDArray[np.floating]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.latents)

    def path(self, index: int) -> str:
        """Its number, since it has no file of its own."""
        return f"{self.name} latent {index}"


@dataclass(frozen=True, eq=False)
class Pictures:
    """A data set that is open.

    Attributes:
        name: For people.
        train: To learn from.
        test: To be compared with, where that is asked for.
        class_names: By the number of the class.
        channels: Of pictures or latents.
        size: Height and width, if all have the same; otherwise None.
        fingerprint: Of all names, sizes and classes.
        known: Features (N, D) of what made images are compared with, where somebody has them already; else None.
    """

    name: str
    train: Source | LatentSource
    test: Source | LatentSource
    class_names: tuple[str, ...]
    channels: int
    size: tuple[int, int] | None
    fingerprint: str
    known: NDArray[np.float32] | None = None

    @property
    def sizes(self) -> tuple[int, int]:
        """How many there are to learn from, and to be compared with."""
        return len(self.train), len(self.test)

    @property
    def is_latent(self) -> bool:
        """Whether it holds latents and not pictures."""
        return isinstance(self.train, LatentSource)


def open_pictures(spec: str) -> Pictures:
    """What `--data` says, open.

    Args:
        spec: What classification takes: a folder of CIFAR, of class folders ...; or a folder with train.npz or
            train.safetensors, and perhaps the same for test: `latents` (N, C, H, W), floats, and `labels` (N,).

    Raises:
        ValueError: If it is not there, not recognised or damaged: what was looked for, what was found.
    """
    folder = Path(spec).expanduser()
    file = next((folder / name for name in LATENTS if (folder / name).is_file()), None)
    if file is not None:
        return _latents(folder, file)
    images = open_data(spec)
    return Pictures(
        images.name, images.train, images.test, images.class_names, images.channels, images.size, images.fingerprint
    )


def limited(data: Pictures, limit: int) -> Pictures:
    """At most so many of each half, evenly among all."""
    if isinstance(data.train, LatentSource) and isinstance(data.test, LatentSource):
        halves = [_some(half, limit) for half in (data.train, data.test)]
    else:
        images = Images(data.name, _source(data.train), _source(data.test), data.class_names, data.size, data.channels)
        fewer = first_of(images, limit)
        halves = [fewer.train, fewer.test]
    name = f"{data.name}, at most {limit} of each half"
    return replace(data, train=halves[0], test=halves[1], name=name, fingerprint=f"{data.fingerprint}-{limit}")


def _some(half: LatentSource, limit: int) -> LatentSource:
    chosen = np.linspace(0, len(half) - 1, min(limit, len(half))).astype(np.int64)
    return replace(half, latents=half.latents[chosen], labels=half.labels[chosen])


def _source(half: Source | LatentSource) -> Source:
    assert not isinstance(half, LatentSource)
    return half


def _latents(folder: Path, file: Path) -> Pictures:
    train = _half(file, "train")
    other = folder / file.name.replace("train", "test", 1)
    test = _half(other, "test") if other.is_file() else train
    shapes = [half.latents.shape[1:] for half in (train, test)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"{other}: expected latents of {_told(shapes[0])}, as {file.name} has, got {_told(shapes[1])}")
    count = 1 + int(max(train.labels.max(), test.labels.max()))
    names = _names(folder / "classes.txt", count)
    digest = hashlib.sha256("\n".join(names).encode("utf-8", "surrogateescape"))
    for half in (train, test):
        digest.update(str(half.latents.shape).encode())
        digest.update(half.latents.tobytes())
        digest.update(half.labels.tobytes())
    about = f"latents in {folder}"
    channels, height, width = shapes[0]
    return Pictures(about, train, test, names, channels, (height, width), digest.hexdigest()[:32])


def _half(path: Path, name: str) -> LatentSource:
    found = _arrays(path)
    latents, labels = found.get("latents"), found.get("labels")
    if latents is None or labels is None:
        raise ValueError(f"{path}: expected arrays called latents and labels, got {', '.join(found) or 'none'}")
    if latents.ndim != 4 or not latents.size or latents.dtype.kind != "f":
        raise ValueError(
            f"{path}: expected latents (N, C, H, W) of floats, got shape {latents.shape} of {latents.dtype}"
        )
    if labels.shape != latents.shape[:1] or labels.dtype.kind not in "iu" or int(labels.min()) < 0:
        raise ValueError(
            f"{path}: expected a class for each latent, whole numbers from 0 on, shape ({len(latents)},), got shape "
            f"{labels.shape} of {labels.dtype}"
        )
    if int(labels.max()) >= MOST_CLASSES:
        raise ValueError(f"{path}: expected classes below {MOST_CLASSES:,}, got {int(labels.max())}")
    if not np.isfinite(latents).all():
        number = int(np.flatnonzero(~np.isfinite(latents).all(axis=(1, 2, 3)))[0])
        raise ValueError(f"{path}: expected finite latents, but number {number} holds one that is not")
    kept = latents.astype(np.float32) if latents.dtype.itemsize > 4 else latents
    return LatentSource(name, kept, labels.astype(np.int64))


def _arrays(path: Path) -> Mapping[str, NDArray[Any]]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with path.open("rb") as file, np.load(file, allow_pickle=False) as content:
            # What does not begin as an array does comes as bytes.
            return {name: array for name in content.files if isinstance(array := content[name], np.ndarray)}
    except (SafetensorError, OSError, ValueError, KeyError, EOFError) as error:
        said = str(error).partition("\n")[0][:120]
        raise ValueError(f"{path}: cannot be read as arrays ({said or type(error).__name__})") from None
    except Exception as error:  # damaged archives make zipfile and zlib raise nearly anything
        raise ValueError(f"{path}: cannot be read as arrays ({type(error).__name__})") from None


def _names(path: Path, count: int) -> tuple[str, ...]:
    if not path.is_file():
        return tuple(f"class {number}" for number in range(count))
    names = tuple(line.strip() for line in text_of(path).splitlines() if line.strip())
    if len(names) < count:
        raise ValueError(f"{path}: expected the names of {count} classes, one per line, got {len(names)}")
    return names


def _told(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
