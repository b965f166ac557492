"""Scenes and objects that others drew, damaged and hostile: a data set, or a sentence."""

from __future__ import annotations

import copy
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzzing import Tally, changed, damaged, for_a_while, hostile
from PIL import Image

from affinear.tasks.detect.opening import Reading, open_coco
from affinear.tasks.detect.runs import pack
from affinear.tasks.images.reading import CorruptImage
from affinear.tasks.segment.opening import open_scenes

SIZE = (12, 10)  # width and height
WORST: tuple[Any, ...] = (  # of a shape
    {"size": [10, 12], "counts": [2**60, 2**60]},
    {"size": [10, 12], "counts": [2**62, 2**62, 2**62, 2**62, 120]},
    {"size": [2**31, 2**29], "counts": [2**60]},
    {"size": [10, 12], "counts": "o" * 5000 + "0"},
    {"size": [float("inf"), 12], "counts": []},
    {"size": [10, 12], "counts": [1e300]},
    [[0, 0, 1e9, 0, 1e9, 1e9]],
    [[0, 0, 1e308, -1e308, 1e308, 1e308]],
    [[0, 0, float("nan"), 0, 1, 1]],
    [[0, 0, 10**400, 0, 1, 1]],
    [[0, 0, 5, 0, 5, 5] * 50_000],
    [[0, 0, 5000, 5000] * 5_000],
    [[0, 0, 5, 0, 5, 5]] * 20_000,
)


def told(half: str) -> dict[str, Any]:
    """What JSON says of two images and three objects."""
    whole = {"image_id": 1, "category_id": 3, "bbox": [1, 1, 5, 4], "iscrowd": 0, "area": 20}
    runs = {"size": [10, 12], "counts": [11, 4, 6, 4, 95]}
    return {
        "images": [{"id": n, "file_name": f"{half}{n}.png", "height": 10, "width": 12} for n in (1, 2)],
        "categories": [{"id": 3, "name": "cat"}, {"id": 7, "name": "dog"}],
        "annotations": [
            {**whole, "id": 1, "segmentation": [[1, 1, 6, 1, 6, 5, 1, 5]]},
            {**whole, "id": 2, "image_id": 2, "category_id": 7, "segmentation": runs},
            {
                **whole,
                "id": 3,
                "iscrowd": 1,
                "segmentation": {**runs, "counts": pack(np.array([11, 4, 6, 4, 95])).decode()},
            },
        ],
    }


def spoilt(draw: random.Random, whole: dict[str, Any]) -> bytes:
    """The same JSON, of which something is another."""
    out = copy.deepcopy(whole)
    kind = draw.randrange(7)
    if kind == 0:
        out["annotations"][draw.randrange(3)]["segmentation"] = draw.choice(WORST)
    elif kind == 1:
        part = draw.choice(("images", "categories", "annotations"))
        out[part][draw.randrange(2)] = changed(draw, out[part][draw.randrange(2)])
    elif kind == 2:
        out["annotations"][draw.randrange(3)][draw.choice(("bbox", "area", "segmentation", "image_id"))] = hostile(draw)
    elif kind == 3:
        out["images"][0]["file_name"] = draw.choice(
            ("../a.png", "/etc/passwd", "pipe.png", "\x00", "x" * 5000, "loop/a")
        )
    elif kind == 4:
        return draw.choice((b"[" * 100_000, b'{"images": [' + b"9" * 10**6 + b"]}", b'{"images": ' + b'{"a":' * 10**5))
    elif kind == 5:
        return damaged(draw, json.dumps(out).encode())
    else:
        return json.dumps(changed(draw, out)).encode()
    return json.dumps(out).encode()


def draw_all(folder: Path, reading: Reading) -> None:
    """Open a data set, and draw every mask of it."""
    data = open_coco(str(folder), reading=reading)
    for half in (data.train, data.test):
        for index in range(len(half)):
            _, objects = half[index]
            objects.truth(half.sizes[index], data.masks)


@pytest.mark.filterwarnings("ignore")
def test_hostile_objects(tally: Tally, draw: random.Random, tmp_path: Path):
    (tmp_path / "annotations").mkdir()
    files = {half: tmp_path / "annotations" / f"instances_{half}.json" for half in ("train", "val")}
    for half, file in files.items():
        (tmp_path / half).mkdir()
        for number in (1, 2):
            Image.new("RGB", SIZE).save(tmp_path / half / f"{half}{number}.png")
        os.mkfifo(tmp_path / half / "pipe.png")
        for name in ("loop", "again"):
            (tmp_path / half / name).symlink_to(".")
        file.write_text(json.dumps(told(half)))
    draw_all(tmp_path, Reading())  # which is whole
    for number in for_a_while():
        half, reading = draw.choice(("train", "val")), Reading(skip_bad_boxes=draw.random() < 0.5)
        content = spoilt(draw, told(half))
        files[half].write_bytes(content)
        what = f"objects {number}: {content[:300]!r}"
        tally.attempt(what, lambda reading=reading: draw_all(tmp_path, reading), ValueError)
        files[half].write_text(json.dumps(told(half)))
    tally.check()


def spoil_scenes(folder: Path, draw: random.Random) -> None:
    """A data set of photos and maps in which something is wrong."""
    for part in ("images", "annotations"):
        for half in ("training", "validation"):
            (folder / part / half).mkdir(parents=True)
    for half in ("training", "validation"):
        for number in range(2):
            Image.new("RGB", SIZE).save(folder / "images" / half / f"{number}.png")
            numbers = np.full(SIZE[::-1], draw.choice((0, 1, 2, 255)), np.uint8)
            Image.fromarray(numbers).save(folder / "annotations" / half / f"{number}.png")
    place = folder / draw.choice(("images", "annotations")) / draw.choice(("training", "validation"))
    victim = place / "1.png"
    kind = draw.randrange(9)
    if kind == 0:
        victim.write_bytes(damaged(draw, victim.read_bytes()))
    elif kind == 1:
        mode = draw.choice(("RGB", "RGBA", "LA", "CMYK", "F", "1", "P"))
        Image.new(mode, SIZE).save(victim, "TIFF")
    elif kind == 2:
        numbers = np.full(SIZE[::-1], draw.choice((2**31 - 1, -(2**31), 40_000, 300)), np.int32)
        Image.fromarray(numbers).save(victim, "TIFF")
    elif kind == 3:
        Image.new("L", (draw.randint(1, 20), draw.randint(1, 20))).save(victim)
    elif kind == 4:
        victim.unlink()
        os.mkfifo(victim)
    elif kind == 5:
        for name in ("loop", "again"):
            (place / name).symlink_to(draw.choice((".", "..", "/proc/self")))
    elif kind == 6:
        victim.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 12 10\n(run) run\n")
    elif kind == 7:
        (place / "2.png").symlink_to("0.png")
    else:
        lines = draw.choice(
            (draw.randbytes(30), b"a\n" * 50_000, b"cat\ncat\n", b"", "\n".join(map(str, range(10**5))).encode())
        )
        (folder / draw.choice(("classes.txt", "objectInfo150.txt"))).write_bytes(lines)


@pytest.mark.filterwarnings("ignore")
def test_hostile_maps(tally: Tally, draw: random.Random, tmp_path: Path):
    def read(folder: Path, zero: bool, memory: bool) -> Any:
        data = open_scenes(str(folder), zero_is_class=zero, test_split=None, memory=memory)
        for half in (data.train, data.test):
            for index in range(len(half)):
                try:
                    half[index]
                except CorruptImage:
                    continue
        return data.fingerprint

    for number in for_a_while():
        folder = tmp_path / str(number)
        spoil_scenes(folder, draw)
        zero, memory = draw.random() < 0.5, draw.random() < 0.5
        what = f"scenes {number}: {sorted(map(str, folder.rglob('*')))[-3:]}"
        tally.attempt(what, lambda f=folder, z=zero, m=memory: read(f, z, m), ValueError)
    tally.check()
