"""A folder of photos and maps in one small file, for a machine that can be reached with little.

    PYTHONPATH=src:evidence python evidence/packing/pack_scenes.py pack --data camvid --file camvid.tar
    PYTHONPATH=src:evidence python evidence/packing/pack_scenes.py unpack --file camvid.tar --data camvid

Photos are shrunk and written as WebP, with loss; maps as WebP without loss. Unpacked, photos have their old size again,
as maps must have it, but not what was lost; `packed.json` says how they were packed.
"""

from __future__ import annotations

import argparse
import io
import json
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

import numpy as np
from PIL import Image

PHOTOS, MAPS, ABOUT = "images", "annotations", "packed.json"


def main() -> None:
    """Pack or unpack."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("pack", "unpack"))
    parser.add_argument("--data", required=True, type=Path, help="folder with images/ and annotations/")
    parser.add_argument("--file", required=True, type=Path, help="the tar file")
    parser.add_argument("--short-side", default=240, type=int, help="pack: of the photos")
    parser.add_argument("--quality", default=90, type=int, help="pack: WebP's, of the photos")
    given = parser.parse_args()
    if given.what == "pack":
        pack(given.data, given.file, given.short_side, given.quality)
        print(f"{given.file}: {given.file.stat().st_size / 1e6:.1f} MB")
    else:
        print(f"{unpack(given.file, given.data)} files in {given.data}")


def pack(data: Path, file: Path, short_side: int, quality: int) -> None:
    """Write all photos, maps and names of classes of a folder into a file."""
    images = sorted(one for part in (PHOTOS, MAPS) for one in (data / part).rglob("*") if one.is_file())
    about = {"short_side": short_side, "quality": quality}
    partial = file.with_name(f"{file.name}.part")
    with tarfile.open(partial, "w") as tar, ThreadPoolExecutor() as pool:
        _add(tar, ABOUT, json.dumps(about).encode())
        _add(tar, "classes.txt", (data / "classes.txt").read_bytes())

        def content_of(one: Path) -> bytes:
            return _map(one) if _is_map(one, data) else _photo(one, short_side, quality)

        written = pool.map(content_of, images)
        for one, content in zip(images, written, strict=True):
            _add(tar, one.relative_to(data).with_suffix(".webp").as_posix(), content)
    partial.rename(file)


def unpack(file: Path, data: Path) -> int:
    """Write a folder of photos and maps of one size each, as PNG; give how many files."""
    with tarfile.open(file) as tar:
        held = {one.name: content.read() for one in tar if (content := tar.extractfile(one)) is not None}
    maps = {name: Image.open(io.BytesIO(content)) for name, content in held.items() if name.startswith(f"{MAPS}/")}

    def write(name: str) -> None:
        path = data / PurePosixPath(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix != ".webp":
            path.write_bytes(held[name])
        elif name in maps:
            Image.fromarray(np.asarray(maps[name])[..., 0]).save(path.with_suffix(".png"), compress_level=1)
        else:
            size = maps[name.replace(PHOTOS, MAPS, 1)].size
            photo = Image.open(io.BytesIO(held[name])).resize(size, Image.Resampling.BICUBIC)
            photo.save(path.with_suffix(".png"), compress_level=1)

    with ThreadPoolExecutor() as pool:
        return len(list(pool.map(write, held)))


def _is_map(path: Path, data: Path) -> bool:
    return path.relative_to(data).parts[0] == MAPS


def _photo(path: Path, short_side: int, quality: int) -> bytes:
    """WebP of a photo, shrunk."""
    photo = Image.open(path).convert("RGB")
    factor = min(1.0, short_side / min(photo.size))
    size = round(photo.width * factor), round(photo.height * factor)
    return _webp(photo.resize(size, Image.Resampling.LANCZOS), quality=quality)


def _map(path: Path) -> bytes:
    """WebP of a map of class numbers, without loss: a number is a grey."""
    return _webp(Image.open(path).convert("RGB"), lossless=True, exact=True)


def _webp(image: Image.Image, **options: int) -> bytes:
    file = io.BytesIO()
    image.save(file, "WEBP", method=6, **options)
    return file.getvalue()


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    told = tarfile.TarInfo(name)
    told.size = len(content)
    tar.addfile(told, io.BytesIO(content))


if __name__ == "__main__":
    main()
