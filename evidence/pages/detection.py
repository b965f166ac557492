"""The page of results/detection, written from the cells that were trained: what cannot be concluded comes first."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pages.words import FIRST, percent
from running.files import keep, write

Row = Mapping[str, Any]
BAR = 80.0  # AP50 in percent that blood cells were to reach
NAMES = {
    "softmax": "around softmax",
    "linear": "around linear attention",
    "none": "around none",
    "mask_rcnn": "Mask R-CNN",
    "cascade_mask_rcnn": "Cascade Mask R-CNN",
}
COMMANDS = """```sh
PYTHONPATH=src python evidence/detect.py --data DATA --out detect --minutes 7 --only bccd
PYTHONPATH=src python evidence/detect.py --data DATA --out detect --minutes 20 --only nuclei --page results/detection
PYTHONPATH=src python evidence/detect.py --data DATA --out detect --part page --page results/detection
```
"""


def written(folder: Path, cells: Sequence[Row]) -> str:
    """Write `nuclei.json`, each cell of blood cells, and `README.md` of all that is in the folder; give the page.

    Args:
        folder: Of the page.
        cells: New ones; those that are there already and not among them stay.
    """
    folder.mkdir(parents=True, exist_ok=True)
    every = {name_of(cell): cell for cell in (*known(folder), *cells)}
    nuclei = [every[name] for name in sorted(every) if every[name]["cell"]["plan"] == "nuclei"]
    blood = [every[name] for name in sorted(every) if every[name]["cell"]["plan"] == "bccd"]
    for cell in blood:
        keep(folder / f"{name_of(cell)}.json", cell)
    if nuclei:
        keep(folder / "nuclei.json", nuclei)
    text = page(nuclei, blood)
    write(folder / "README.md", text)
    return text


def page(nuclei: Sequence[Row], blood: Sequence[Row]) -> str:
    """The page in Markdown."""
    parts = ["# Detection, from random weights\n", _limits(nuclei)]
    if nuclei:
        parts += [_nuclei(nuclei)]
    if blood:
        parts += [_blood(blood)]
    return "\n".join([*parts, COMMANDS])


def _limits(nuclei: Sequence[Row]) -> str:
    """What nobody should conclude from the page."""
    told = [FIRST]
    if not nuclei:
        told.append(
            "Nuclei with Mask R-CNN and Cascade Mask R-CNN, over seven backbones, are not here yet; the command below "
            "trains them."
        )
    else:
        seeds = {len(rows) for rows in _by_arm(nuclei).values()}
        steps = sorted({int(cell["plan"]["steps"]) for cell in nuclei})
        told.append(
            f"{' to '.join(str(n) for n in sorted({min(seeds), max(seeds)}))} seeds and {_many(steps)} steps from "
            "random weights say which backbone learns quickly from 532 images, not which is best after a published "
            "schedule or from trained weights. All backbones have one recipe, chosen for none of them; Swin is "
            "known to want more steps and a gentler one. Crops are 256 x 256, where attention over whole images costs "
            "little: nothing here speaks of large images. The validation half was judged once, after the last step, "
            "and no recipe was chosen by it."
        )
        there = {arm for _, arm in _by_arm(nuclei)}
        absent = [str(NAMES.get(arm, arm)) for arm in nuclei[0]["plan"]["arms"] if arm not in there]
        if absent:
            told.append(f"Not trained yet: {', '.join(absent)}; so nothing here compares backbones.")
        if max(seeds) < 3:
            told.append("With fewer than three seeds, a difference of a point or two is noise.")
    told.append("One backbone on 364 photos of blood cells says that RetinaNet works, and nothing about attention.")
    return " ".join(told) + "\n"


def _nuclei(cells: Sequence[Row]) -> str:
    plan = cells[0]["plan"]
    groups = _by_arm(cells)
    head = (
        f"**Nuclei.** {plan['steps']} steps of {plan['batch']} crops, at most {plan['cap']} detections an image, "
        "averaged weights after the last step, whole images of the validation half. Mean ± deviation over seeds, in "
        "percent. Milliseconds are those of a step on a GPU that several trainings shared, not always as many: they "
        "compare nothing.\n"
    )
    lines = ["| detector | backbone | seeds | box AP | AP50 | AP75 | mask AP | M parameters | ms a step | GiB |"]
    lines += ["|---|---|---|---|---|---|---|---|---|---|"]
    for (kind, arm), rows in groups.items():
        numbers = [percent([row.get(part, {}).get(name) for row in rows]) for part, name in COLUMNS]
        size, peak = rows[0]["parameters"] / 1e6, max(row["peak_gib"] for row in rows)
        speed = 1e3 * statistics.median(row["step_s"] for row in rows)
        told = (NAMES.get(kind, kind), NAMES.get(arm, arm), str(len(rows)), *numbers)
        lines.append(f"| {' | '.join(told)} | {size:.1f} | {speed:.0f} | {peak:.1f} |")
    return "\n".join([head, *lines, "", _verdict(groups)])


COLUMNS = (("box", "ap"), ("box", "ap50"), ("box", "ap75"), ("mask", "ap"))


def _verdict(groups: Mapping[tuple[str, str], Sequence[Row]]) -> str:
    """Whether the cascade is not below, backbone by backbone, over the seeds that both have."""
    gains: dict[str, list[float]] = {}
    for (kind, arm), rows in groups.items():
        if kind != "mask_rcnn":
            continue
        plain = {row["cell"]["seed"]: row["box"]["ap"] for row in rows}
        other = {row["cell"]["seed"]: row["box"]["ap"] for row in groups.get(("cascade_mask_rcnn", arm), ())}
        pairs = [100 * (other[seed] - plain[seed]) for seed in plain if seed in other]
        if pairs:
            gains[arm] = pairs
    if not gains:
        return "The bar, a cascade that is not below Mask R-CNN in box AP, is undecided: no backbone has both.\n"
    below = [arm for arm, pairs in gains.items() if statistics.mean(pairs) < 0]
    met = f"missed for {', '.join(NAMES.get(arm, arm) for arm in below)}" if below else "met where both were trained"
    listed = ", ".join(f"{NAMES.get(arm, arm)} {statistics.mean(pairs):+.1f}" for arm, pairs in gains.items())
    return f"The bar, a cascade that is not below Mask R-CNN in box AP, is {met}. Points of box AP gained: {listed}.\n"


def _blood(cells: Sequence[Row]) -> str:
    plan = cells[0]["plan"]
    values = [100 * cell["box"]["ap50"] for cell in cells]
    verdict = "met" if statistics.mean(values) >= BAR else "missed"
    head = (
        f"**Blood cells.** RetinaNet over `mavit_tiny`, {plan['steps']:,} steps of {plan['batch']} images, learned "
        f"from 292 photos of the training and validation halves, judged on the {cells[0]['images']} test photos, "
        "averaged weights after the last step, no choice among evaluations. "
        f"The bar was an AP50 of {BAR:.0f} %: {verdict}.\n"
    )
    lines = ["| seed | AP | AP50 | AP75 | first to third class |", "|---|---|---|---|---|"]
    for cell in cells:
        box = cell["box"]
        classes = ", ".join(f"{100 * one:.1f}" for one in box["by_class"])
        three = " | ".join(f"{100 * box[name]:.1f}" for name in ("ap", "ap50", "ap75"))
        lines.append(f"| {cell['cell']['seed']} | {three} | {classes} |")
    means = " | ".join(percent([cell["box"][name] for cell in cells]) for name in ("ap", "ap50", "ap75"))
    lines.append(f"| mean ± deviation | {means} | |")
    took, peak = max(cell["wall_s"] for cell in cells) / 60, max(cell["peak_gib"] for cell in cells)
    tail = f"{took:.0f} minutes each on a {cells[0]['device']} that other trainings shared, {peak:.1f} GiB, at most "
    return "\n".join([head, *lines, "", f"{tail}{plan['cap']} detections an image.\n"])


def _by_arm(cells: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """Cells by detector and backbone, in the order in which the plan has them."""
    plan = cells[0]["plan"]
    order = [(kind, arm) for kind in plan["kinds"] for arm in plan["arms"]]
    found: dict[tuple[str, str], list[Row]] = {key: [] for key in order}
    for cell in cells:
        found.setdefault((cell["cell"]["kind"], cell["cell"]["arm"]), []).append(cell)
    return {key: rows for key, rows in found.items() if rows}


def _many(numbers: Sequence[int]) -> str:
    return " or ".join(f"{number:,}" for number in numbers)


def name_of(cell: Row) -> str:
    """Of a cell, and of its file."""
    return "-".join(str(cell["cell"][part]) for part in ("plan", "kind", "arm", "seed"))


def known(folder: Path) -> list[Row]:
    """The cells that a page was written from."""
    found: list[Row] = [json.loads(file.read_text()) for file in sorted(folder.glob("bccd-*.json"))]
    if (folder / "nuclei.json").is_file():
        found += json.loads((folder / "nuclei.json").read_text())
    return found
