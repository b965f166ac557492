"""Crops of photographs to learn super-resolution from, and a list of which they are.

    PYTHONPATH=src:evidence python evidence/packing/cut_photos.py wallpapers more --output photos/train

Photos are found below the folders given, the same file once; paintings and drawings, which have few colours, are left
out by their number. JPEG leaves blocks behind, so every photo is halved first. `cut.json` beside their folder names
the photo of each by its bytes, so that the same ones can be made again.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from running.files import keep

ENDINGS = {".jpg", ".jpeg", ".png"}
COLOURS, LOOKED_AT = 6_000, 128  # a photo has more than so many colours in a picture of so many pixels a side


@dataclass(frozen=True)
class Cut:
    """A crop: its file, the photo by its name and bytes, and where in the halved photo it lies."""

    file: str
    photo: str
    sha256: str
    left: int
    top: int


def main() -> None:
    """Cut all photos, and write down what was cut."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="where photos are")
    parser.add_argument("--output", required=True, type=Path, help="folder of the crops")
    parser.add_argument("--side", default=480, type=int, help="of a crop, in pixels")
    parser.add_argument("--most", default=4, type=int, help="crops of one photo")
    given = parser.parse_args()
    cuts = list(cut(given.folders, given.output, given.side, given.most))
    keep(given.output.parent / "cut.json", [asdict(one) for one in cuts])
    print(f"{len(cuts)} crops of {len({one.sha256 for one in cuts})} photos in {given.output}")


def cut(folders: Sequence[Path], output: Path, side: int, most: int) -> Iterator[Cut]:
    """Write crops of all photos below some folders, in the order of their names."""
    output.mkdir(parents=True, exist_ok=True)
    seen: set[str] = set()
    files = (file for folder in folders for file in folder.rglob("*") if file.suffix.lower() in ENDINGS)
    for file in sorted((file for file in files if file.is_file()), key=lambda file: (file.name, str(file))):
        name = hashlib.sha256(file.read_bytes()).hexdigest()
        if name in seen:
            continue
        seen.add(name)
        with Image.open(file) as opened:
            if min(opened.size) < 2 * side:
                continue
            photo = opened.convert("RGB")
        if not is_photo(photo):
            continue
        half = photo.resize((photo.width // 2, photo.height // 2), Image.Resampling.LANCZOS)
        for number, (left, top) in enumerate(places(half.size, side, most)):
            target = output / f"{name[:12]}-{number}.png"
            half.crop((left, top, left + side, top + side)).save(target)
            yield Cut(target.name, file.name, name, left, top)


def is_photo(picture: Image.Image) -> bool:
    """Whether a picture, made small, has as many colours as photographs do."""
    small = np.asarray(picture.resize((LOOKED_AT, LOOKED_AT)))
    return len(np.unique(small.reshape(-1, 3), axis=0)) > COLOURS


def places(size: tuple[int, int], side: int, most: int) -> list[tuple[int, int]]:
    """Corners of crops that do not overlap, spread over a picture, `most` at the most.

    Examples:
        >>> places((960, 480), 480, 4), places((1000, 1000), 480, 2)
        ([(0, 0), (480, 0)], [(0, 0), (520, 520)])
    """
    columns, rows = (_spread(length, side) for length in size)
    grid = [(left, top) for top in rows for left in columns]
    if len(grid) <= most:
        return grid
    return [grid[round(i * (len(grid) - 1) / max(most - 1, 1))] for i in range(most)]


def _spread(length: int, side: int) -> list[int]:
    """As many starts of pieces as fit into a length, the first at its beginning, the last at its end."""
    count = length // side
    return [round(i * (length - side) / max(count - 1, 1)) for i in range(count)]


if __name__ == "__main__":
    main()
