"""Images and data sets, damaged and hostile: pixels, or a sentence; no hanging, no gigabytes, no code."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import random
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzzing import Tally, damaged, for_a_while, hostile
from PIL import Image

from affinear.lens.microscope import pictures
from affinear.lens.microscope.refusal import Refusal
from affinear.tasks.classify.data import open_data
from affinear.tasks.images.reading import CorruptImage, open_image

KINDS = ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM", "TGA", "ICO", "PCX", "SGI", "DDS", "JPEG2000")


def samples(draw: random.Random) -> list[bytes]:
    out: list[bytes] = []
    for kind in KINDS:
        for mode in ("RGB", "L", "RGBA", "P", "I;16", "1"):
            file = io.BytesIO()
            size = draw.randint(1, 40), draw.randint(1, 40)
            try:
                Image.frombytes("RGB", size, draw.randbytes(3 * size[0] * size[1])).convert(mode).save(file, kind)
            except (OSError, ValueError, KeyError):
                continue  # a kind that has no such mode
            out.append(file.getvalue())
    return out


def bombs() -> list[bytes]:
    """Small files that claim to be large."""
    out = [f"P{kind} {w} {h} 255\n".encode() + bytes(99) for kind in (5, 6) for w, h in SIZES]
    for width, height in SIZES:
        header = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
        out.append(b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + b"IHDR" + header + bytes(4))
        out.append(
            b"BM" + struct.pack("<IIIIiiHHIIiiII", 54, 0, 54, 40, width % 2**31, height % 2**31, 1, 24, *[0] * 6)
        )
        out.append(b"GIF89a" + struct.pack("<HH", width % 2**16, height % 2**16) + bytes(20))
    return out


SIZES = ((10**5, 1), (1, 10**5), (2**16, 2**16), (2**31 - 1, 2**31 - 1), (0, 0), (20_000, 20_000), (30_000, 400))


@pytest.mark.filterwarnings("ignore")
def test_hostile_images(tally: Tally, draw: random.Random, tmp_path: Path):
    whole, path = samples(draw), tmp_path / "a.png"
    files = bombs()
    for number in for_a_while():
        content = files[number] if number < len(files) else damaged(draw, draw.choice(whole))
        path.write_bytes(content)
        what = f"{content[:60]!r} of {len(content)} bytes"
        found, image = tally.attempt(f"open {what}", lambda: open_image(path), CorruptImage)
        if found and image.mode != "RGB":
            tally.failures.append(f"{what} became {image.mode}")
        tally.attempt(f"microscope {what}", lambda content=content: pictures.read(content), Refusal)
    tally.check()


def cifar(folder: Path, draw: random.Random) -> None:
    labels = [0, 1, 9, 3] if draw.random() < 0.5 else [hostile(draw) for _ in range(4)]
    data = np.zeros((4, 3072), np.uint8)
    for name in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"):
        batch = {b"labels": labels, b"data": data} if draw.random() < 0.8 else {b"labels": hostile(draw)}
        (folder / name).write_bytes(_maybe(draw, pickle.dumps(batch, 2)))
    names = [b"a"] * 10 if draw.random() < 0.8 else hostile(draw)
    (folder / "batches.meta").write_bytes(_maybe(draw, pickle.dumps({b"label_names": names}, 2)))


def idx(folder: Path, draw: random.Random) -> None:
    for half in ("train", "t10k"):
        for what, shape in (("images", (4, 3, 3)), ("labels", (4,))):
            shape = shape if draw.random() < 0.7 else tuple(draw.choice((0, 1, 3, 2**31, 2**32 - 1)) for _ in shape)
            head = struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape)
            content = head + bytes(min(int(np.prod(shape, dtype=object)), 10**5))
            packed = draw.random() < 0.5
            name = f"{half}-{what}-idx{len(shape)}-ubyte" + ".gz" * packed
            (folder / name).write_bytes(_maybe(draw, gzip.compress(content, 1) if packed else content))


def shards(folder: Path, draw: random.Random) -> None:
    picture = io.BytesIO()
    Image.new("RGB", (3, 3)).save(picture, "PNG")
    for half in ("train", "test"):
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w") as tar:
            for number in range(3):
                label = b"1" if draw.random() < 0.7 else str(hostile(draw)).encode("utf-8", "replace")
                for suffix, content in (("png", picture.getvalue()), ("cls", label)):
                    member = tarfile.TarInfo(f"n{number}.{suffix}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
        (folder / f"{half}-0.tar").write_bytes(_maybe(draw, file.getvalue()))
    if draw.random() < 0.3:
        (folder / "_info.json").write_bytes(_maybe(draw, b'{"splits": {"train": {"filenames": ["pipe:touch run"]}}}'))


def classes(folder: Path, draw: random.Random) -> None:
    """Class folders with pipes, links that lead anywhere, and files that are no images."""
    names = [folder / half / name for half in ("train", "val") for name in ("cat", "dog")]
    for place in names:
        place.mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(place / "0.png")
    for number in range(draw.randint(0, 6)):
        place = draw.choice(names) / f"{number + 1}.png"
        kind = draw.randrange(6)
        if kind == 0:
            os.mkfifo(place)
        elif kind == 1:
            place.symlink_to(draw.choice((*names, folder, Path(".."), Path("."), Path("/proc/self"), place)))
        elif kind == 2:
            place.symlink_to(draw.choice(names) / "0.png")
        elif kind == 3:
            place.mkdir()
            (place / "deep.png").symlink_to("/dev/zero")
        elif kind == 4:
            place.write_bytes(draw.randbytes(50))
        else:
            os.link(draw.choice(names) / "0.png", place)


def _maybe(draw: random.Random, content: bytes) -> bytes:
    return damaged(draw, content) if draw.random() < 0.3 else content


@pytest.mark.parametrize(
    ("make", "spec"),
    [(cifar, "{}"), (idx, "{}"), (shards, "wds/{}"), (classes, "{}")],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_hostile_data_sets(
    tally: Tally, draw: random.Random, tmp_path: Path, make: Callable[[Path, random.Random], None], spec: str
):
    def read(folder: Path) -> Any:
        images = open_data(spec.format(folder))
        for half in (images.train, images.test):
            for index in range(min(3, len(half))):
                try:
                    half[index]
                except CorruptImage:
                    continue
        return images.fingerprint

    open_data("digits")  # what is imported on the way may do as it likes
    for number in for_a_while(4):
        folder = tmp_path / str(number)
        folder.mkdir()
        make(folder, draw)
        tally.attempt(f"{make.__name__} {number}", lambda folder=folder: read(folder), ValueError)
    tally.check()
