"""The figure of dense tasks: a street scene, its classes, what a network found, and memory as images grow.

    PYTHONPATH=src:evidence python evidence/pages/scenes.py --data camvid --out docs/figures/scenes.png

draws what `results/segmentation` has: maps that `mavit_tiny` found, and memory as it was measured, or else counted.
`--maps` is another folder of maps that `segment.py camvid` keeps, or that `affinear predict` writes; the scene is the
one that shows most classes, unless `--photo` names another. `--growth` is another file that `segment_costs.py growth`
wrote, or `segment_costs.py counted`. It needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.patches import Patch

from affinear.tasks.segment.drawing import coloured, palette
from affinear.tasks.segment.opening import open_scenes
from affinear.tasks.segment.pairs import Labels, Pairs, Scenes, read_map

COLOURS = {"linear": "#1b7f4d", "softmax, fused": "#c05a1d", "softmax, weights kept": "#8a1f1f"}
RESULTS = Path("results/segmentation")
LEAST_SHARE = 0.002  # of a photo's pixels, for a class to be named


def main() -> None:
    """Draw, and say where."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="the folder that the network was judged on")
    parser.add_argument("--split", default="test", help="its half")
    parser.add_argument(
        "--maps", default=RESULTS / "maps", type=Path, help="folder of maps that were found, named as photos"
    )
    parser.add_argument("--photo", help="name of the photo, without its ending")
    measured = next((file for file in (RESULTS / "growth.json", RESULTS / "counted.json") if file.is_file()), None)
    parser.add_argument(
        "--growth", default=measured, required=measured is None, type=Path, help="growth.json or counted.json"
    )
    parser.add_argument("--out", required=True, type=Path, help="the PNG or SVG file")
    given = parser.parse_args()
    scenes = open_scenes(given.data, zero_is_class=False, test_split=given.split, memory=False)
    number, found = chosen(scenes.test, given.maps, given.photo)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    draw(scenes, number, found, json.loads(given.growth.read_text())["rows"], given.out)
    print(f"{given.out}: {scenes.test.path(number)}")


def chosen(half: Pairs, maps: Path, name: str | None) -> tuple[int, Labels]:
    """Number of the photo to be shown, and what was found in it.

    Raises:
        ValueError: If there is no map of it.
    """
    numbers = {Path(half.path(i)).stem: i for i in range(len(half))}
    files = {file.stem: file for file in sorted(maps.glob("*.png")) if file.stem in numbers}
    if not files or (name is not None and name not in files):
        wanted = f"{name}.png" if name else "maps that are named as photos"
        raise ValueError(f"--maps: expected {wanted} in {maps}, found {', '.join(sorted(files)) or 'none'}")
    picked = name or max(files, key=lambda one: len(np.unique(half[numbers[one]][1])))
    path = files[picked]
    return numbers[picked], half.numbers.labels(read_map(str(path)), str(path))


def draw(scenes: Scenes, number: int, found: Labels, rows: Sequence[dict[str, Any]], out: Path) -> None:
    """Three pictures above, memory below, and seconds where they were measured."""
    mpl.rcParams.update({"font.size": 9, "svg.fonttype": "none", "axes.spines.top": False, "axes.spines.right": False})
    photo, truth = scenes.test[number]
    figure = plt.figure(figsize=(9.6, 6.4), layout="constrained")
    halves: Any = figure.subfigures(2, 1, height_ratios=(1.15, 1.0))
    upper, lower = halves
    classes = len(scenes.classes)
    pictures = (
        (np.asarray(photo), "a street"),
        (coloured(truth, classes), "its classes"),
        (coloured(found, classes), "what was found"),
    )
    for axes, (pixels, title) in zip(upper.subplots(1, 3), pictures, strict=True):
        axes.imshow(pixels)
        axes.set_title(title)
        axes.set_axis_off()
    both = np.concatenate((truth.ravel(), found.ravel()))
    shares = np.bincount(both[both >= 0], minlength=classes) / max(both.size, 1)
    named = [
        Patch(color=shares_of(colour), label=name)
        for name, colour, share in zip(scenes.classes, palette(classes), shares, strict=True)
        if share >= LEAST_SHARE
    ]
    upper.legend(handles=named, loc="outside lower center", ncols=min(len(named), 6), frameon=False)
    if any("kept_gb" in row for row in rows):
        memory = lower.subplots(1, 1)
        curves(memory, rows, "kept_gb", "GB kept for backward, counted")
    else:
        memory, seconds = lower.subplots(1, 2)
        curves(memory, rows, "peak_gb", "GB above the weights")
        curves(seconds, rows, "seconds", "seconds, forward and backward")
    memory.legend(frameon=False)
    figure.savefig(out, dpi=160)
    plt.close(figure)


def curves(axes: Any, rows: Sequence[dict[str, Any]], what: str, label: str) -> None:
    """One curve per backbone over the side of the image; a cross where memory ended."""
    for name, colour in COLOURS.items():
        mine = sorted((row for row in rows if row["name"] == name), key=lambda row: row["side"])
        good = [row for row in mine if what in row]
        axes.plot([row["side"] for row in good], [row[what] for row in good], "o-", color=colour, label=name, ms=3)
        ended = [row["side"] for row in mine if "error" in row]
        if ended and good:
            axes.plot(ended[:1], [good[-1][what] * 2], "x", color=colour)
            axes.annotate(
                "out of memory", (ended[0], good[-1][what] * 2), color=colour, ha="right", va="bottom", fontsize=8
            )
    sides = sorted({row["side"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sides, [str(side) for side in sides])
    axes.minorticks_off()
    axes.set_xlabel("side of the image, pixels")
    axes.set_ylabel(label)


def shares_of(colour: tuple[int, int, int]) -> tuple[float, float, float]:
    """Bytes as shares."""
    return colour[0] / 255, colour[1] / 255, colour[2] / 255


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:  # of what was asked for: a sentence, which needs no traceback
        raise SystemExit(f"{error}.") from None
