"""The page of results/segmentation, written from what was measured: what cannot be concluded comes first."""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pages.words import FIRST, percent
from running.files import keep, write

Row = Mapping[str, Any]
PARTS = ("camvid", "alone", "upernet", "growth", "counted")
LONGER = "longer"  # runs until the time is over that were done apart from the others
FLOOR = 0.5  # mIoU that mavit_tiny was to reach
AUTOCAST = "bfloat16 autocast"
ROSE = 0.2  # by which a training loss is above what it was before, if the network has lost what it had learned
COMMANDS = """```sh
# begun twice at the same time
PYTHONPATH=src python evidence/segment.py camvid --data camvid --output outputs --minutes 6 --fit 11 --parallel 2 \\
    --longer mavit_tiny
PYTHONPATH=src python evidence/segment.py camvid --data camvid --output apart --minutes 7 --arms mavit_tiny --seeds 0 \\
    --steps 2 --longer mavit_tiny
PYTHONPATH=src python evidence/segment_costs.py alone --output outputs
PYTHONPATH=src python evidence/segment_costs.py upernet --output outputs
PYTHONPATH=src python evidence/segment_costs.py growth --output outputs
PYTHONPATH=src python evidence/segment_costs.py counted --output outputs
PYTHONPATH=src python evidence/segment.py page --output outputs --apart apart --page results/segmentation
```
"""


def written(folder: Path, output: Path, apart: Path | None = None, notes: Sequence[str] = ()) -> str:
    """Bring the JSON of what was measured, and maps of what was found, to the page's folder, and write its `README.md`.

    Args:
        folder: Of the page.
        output: Of the measurements; a part that is not there stays as the page's folder has it.
        apart: Of another output, whose runs until the time was over are told beside these.
        notes: What the JSON does not tell and a reader has to know.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    for part in PARTS:
        source = next((at / f"{part}.json" for at in (output, folder) if (at / f"{part}.json").is_file()), None)
        if source is not None:
            found[part] = json.loads(source.read_text())
            keep(folder / f"{part}.json", found[part])
    if apart is not None:
        other = json.loads((apart / "camvid.json").read_text())
        keep(folder / f"{LONGER}.json", {**other, "cells": [cell for cell in other["cells"] if cell["longer"]]})
    if (folder / f"{LONGER}.json").is_file():
        found[LONGER] = json.loads((folder / f"{LONGER}.json").read_text())
    maps = output / "camvid" / "maps"
    if maps.is_dir():
        shutil.copytree(maps, folder / "maps", dirs_exist_ok=True)
    text = page(found).replace(FIRST, " ".join([FIRST, *notes]), 1)
    write(folder / "README.md", text)
    return text


def page(found: Mapping[str, Any]) -> str:
    """The page in Markdown, of those parts that were measured."""
    cells: list[Row] = [cell for part in ("camvid", LONGER) for cell in found.get(part, {}).get("cells", [])]
    parts = ["# Segmentation, from random weights\n", _limits(cells, found)]
    if cells:
        parts.append(_camvid(cells, found))
    if "upernet" in found:
        parts.append(_upernet(found["upernet"]))
    if "growth" in found:
        parts.append(_growth(found["growth"]))
    if "counted" in found:
        parts.append(_counted(found["counted"]))
    return "\n".join([*parts, COMMANDS])


def _limits(cells: Sequence[Row], found: Mapping[str, Any]) -> str:
    told = [FIRST]
    if cells:
        told.append(_lost(by_arm(cells)))
        seeds = {len(rows) for rows in by_arm(cells).values() if not rows[0]["longer"]} or {0}
        many = " to ".join(str(count) for count in sorted({min(seeds), max(seeds)}))
        learned = " or ".join(str(count) for count in sorted({cell["learned"] for cell in cells}))
        told.append(
            f"{many} seeds and {steps_of(cells):,} steps from random weights on {learned} photos say which backbone "
            "learns quickly, not which is best with trained weights, more photos or more steps. One recipe served all "
            "of them; it was settled with `mavit_tiny` in mind and never by test photos, so others may lose by it. "
            "Photos of 480 x 360 pixels have few tokens: nothing here speaks of larger ones."
        )
        if max(seeds) < 3:
            told.append("With fewer than three seeds, a difference of a few points is noise.")
        told.append(_by_heart(cells))
    missing = [part for part in PARTS if part not in found]
    if missing:
        told.append(f"Not measured yet: {', '.join(missing)}.")
    twice = [part for part in ("alone", "growth") if any(row.get("dtype") == AUTOCAST for row in _rows(found, part))]
    if twice:
        told.append(
            f"Under autocast, as in {' and '.join(twice)}, our softmax goes forward once more in the backward pass: "
            "it needs more time than it would without, and less memory, where weights are kept, as only one block at a "
            "time has them."
        )
    told.append("Speeds are those of one machine; eager ones are decided by the host where images are small.")
    return " ".join(told) + "\n"


def _rows(found: Mapping[str, Any], part: str) -> list[Row]:
    return found.get(part, {}).get("rows", [])


def _lost(groups: Mapping[str, Sequence[Row]]) -> str:
    """Which runs lost what they had learned, if any."""
    rises = {arm: [rise(row["pace"]["losses"]) for row in rows] for arm, rows in groups.items()}
    lost = {arm: [one for one in rises[arm] if one > ROSE] for arm in rises}
    named = [f"{arm} ({len(some)} of {len(rises[arm])})" for arm, some in lost.items() if some]
    if not named:
        return ""
    stayed = max((one for each in rises.values() for one in each if one <= ROSE), default=0.0)
    some = [one for each in lost.values() for one in each]
    return (
        f"**Some runs lost what they had learned**: the training loss of {', '.join(named)} rose by {min(some):.2f} to "
        f"{max(some):.2f} above where it had been, that of all others by {stayed:.2f} at most. So the rate was too "
        "high for these, and nothing here compares them with the others."
    )


def rise(losses: Sequence[float]) -> float:
    """By how much a loss was above what it had been, at most.

    Examples:
        >>> rise([3.0, 1.0, 1.5, 0.5])
        0.5
    """
    lowest, most = float("inf"), 0.0
    for loss in losses:
        lowest = min(lowest, loss)
        most = max(most, loss - lowest)
    return most


def _by_heart(cells: Sequence[Row]) -> str:
    """How far what was learned lies from what is judged."""
    last = [cell["pace"]["losses"][-1] for cell in cells if cell["pace"]["losses"]]
    if not last:
        return ""
    return (
        f"Training losses ended at {min(last):.2f} to {max(last):.2f}: where they are low and test photos stay far "
        "behind, which arm is ahead says as much about what it learns by heart."
    )


def _camvid(cells: Sequence[Row], found: Mapping[str, Any]) -> str:
    alone = {row["name"]: row for row in _rows(found, "alone")}
    groups = by_arm(cells)
    recipe, settings = cells[0]["recipe"], cells[0]["settings"]
    crop = " x ".join(str(side) for side in settings["crop"])
    head = (
        f"**CamVid.** SemanticFPN by the recipe `small`, {steps_of(cells):,} steps of {recipe['batch_size']} crops of "
        f"{crop}, cut out of {_photos(settings)}, zoomed by "
        f"{settings['zoom'][0]:g} to {settings['zoom'][1]:g}, AdamW at {recipe['lr']:g} "
        f"after {recipe['warmup_steps']:,} steps of warm-up, classes balanced by a power of {settings['balance']:g}; "
        f"averaged weights after the last step, whole photos, {cells[0]['photos']} of the {cells[0]['split']} half, "
        "compared with maps of their full size, no choice among evaluations. Mean ± "
        "deviation over seeds, in percent. Images per second and memory are of a training step, each backbone alone "
        f"on the GPU where it was measured so{_alone_size(found)}, else (marked *) beside others.\n\n"
        "A step is a CUDA graph over photos that lie on the GPU; crops are cut and lit there as the library does it on "
        f"the host, with other random numbers.{_packing(cells[0]['packed'])}\n"
    )
    lines = ["| backbone | steps | seeds | mIoU | lowest to highest | aAcc | M parameters | images/s | GB |"]
    lines += ["|---|---|---|---|---|---|---|---|---|"]
    for arm, rows in groups.items():
        values = [miou(row) for row in rows]
        right = percent([row["score"]["aacc"] for row in rows])
        own = alone.get(arm)
        speed = own["images_per_second"] if own else statistics.median(row["pace"]["images_per_second"] for row in rows)
        memory = own["peak_gb"] if own and own["peak_gb"] else max(row["pace"]["peak"] for row in rows) / 2**30
        mark = "" if own else "*"
        lines.append(
            f"| {arm} | {rows[0]['pace']['steps']:,} | {len(rows)} | {percent(values)} "
            f"| {100 * min(values):.1f} to {100 * max(values):.1f} | {right} "
            f"| {rows[0]['parameters'] / 1e6:.1f} | {speed:.0f}{mark} | {memory:.1f}{mark} |"
        )
    return "\n".join([head, *lines, "", _floor(groups), _choice(found["camvid"].get("chosen")), _classes(groups)])


def _photos(settings: Row) -> str:
    side = settings["short_side"]
    return "photos of 480 x 360" if side is None else f"photos whose shorter side is {side} pixels"


def _packing(about: Row | None) -> str:
    """What photos lost before they were learned from."""
    if about is None:
        return ""
    return (
        f" Photos were packed before: shrunk to a shorter side of {about['short_side']} pixels and written as WebP of "
        f"quality {about['quality']}, maps without loss (`evidence/packing/pack_scenes.py`)."
    )


def _alone_size(found: Mapping[str, Any]) -> str:
    """At which size each was measured alone, if it was."""
    rows = _rows(found, "alone")
    if not rows:
        return ""
    how = "one CUDA graph" if rows[0]["graph"] else "eager"
    return f" ({rows[0]['batch']} of {' x '.join(str(side) for side in rows[0]['size'])} pixels, {how})"


def _choice(chosen: Row | None) -> str:
    """By what the recipe was chosen."""
    if not chosen:
        return "No variant of the recipe was tried.\n"
    tried = ", ".join(f"{name} {100 * score:.1f}" for name, score in chosen["validation"].items())
    changes = f" ({', '.join(f'`{one}`' for one in chosen['set'])})" if chosen["set"] else ""
    return (
        f"The recipe, {chosen['name']}{changes}, was chosen with `mavit_tiny` and one seed by the validation half, "
        f"before any test photo was judged: mIoU of {tried}.\n"
    )


def _floor(groups: Mapping[str, Sequence[Row]]) -> str:
    told: list[str] = []
    own = [rows for rows in groups.values() if rows[0]["arm"] == "mavit_tiny"]
    for rows in own:
        mean, steps = statistics.mean(miou(row) for row in rows), rows[0]["pace"]["steps"]
        told.append(f"{'met' if mean >= FLOOR else 'missed'} after {steps:,} steps: {mean:.1%}")
    if not told:
        return f"The floor, {FLOOR:.0%} for `mavit_tiny`, is undecided: it was not trained.\n"
    if any(rows[0]["longer"] for rows in own):
        told.append(
            "longer runs went on until the time was over, their rate going down along a cosine of the time, and are "
            "compared with nothing"
        )
    return f"The floor, {FLOOR:.0%} for `mavit_tiny`, is {'; '.join(told)}.\n"


def _classes(groups: Mapping[str, Sequence[Row]]) -> str:
    """IoU of each class, mean over seeds."""
    names = list(next(iter(groups.values()))[0]["classes"])
    lines = [f"| IoU, % | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for arm, rows in groups.items():
        each = [100 * statistics.mean(row["classes"].get(name, 0.0) for row in rows) for name in names]
        lines.append(f"| {arm} | {' | '.join(f'{value:.0f}' for value in each)} |")
    return "\n".join(["By class:\n", *lines, ""])


def _upernet(part: Row) -> str:
    rows: list[Row] = part["rows"]
    size = " x ".join(str(side) for side in rows[0]["size"])
    lines = [f"**UperNet at {size}**, {rows[0]['batch']} images, a training step in bfloat16, eager, in turns:\n"]
    lines += ["| backbone | images/s | turns | GB | M parameters | GMACs |", "|---|---|---|---|---|---|"]
    for row in rows:
        turns = ", ".join(f"{turn:.1f}" for turn in row["turns"])
        memory = f"{row['peak_gb']:.1f}" if row["peak_gb"] is not None else ""
        lines.append(
            f"| {row['name']} | {row['images_per_second']:.1f} | {turns} | {memory} | {row['parameters'] / 1e6:.1f} "
            f"| {row['gmacs']:.0f} |"
        )
    linear = next((row for row in rows if row["name"].endswith("_linear")), None)
    others = [row for row in rows if row is not linear]
    if linear is None or not others:
        return "\n".join([*lines, ""])
    ahead = [row for row in others if linear["images_per_second"] > row["images_per_second"]]
    verdict = "met" if len(ahead) == len(others) else f"missed: ahead of {len(ahead)} of {len(others)}"
    told = [f"The bar, the linear one ahead of both, is {verdict} in images per second."]
    if all(row["peak_gb"] is not None for row in rows):
        less = [row for row in others if round(linear["peak_gb"], 1) < round(row["peak_gb"], 1)]
        told.append(f"In memory it is below {len(less)} of {len(others)}.")
    turns = [len(row["turns"]) for row in rows]
    if min(turns) < max(turns):
        told.append(f"The run was cut off by the time: some had {max(turns)} turns and some {min(turns)}.")
    return "\n".join([*lines, "", f"{' '.join(told)}\n"])


def _growth(part: Row) -> str:
    """Gigabytes and seconds of one image, by side."""
    rows: list[Row] = part["rows"]
    names, sides = list(dict.fromkeys(row["name"] for row in rows)), sorted({row["side"] for row in rows})
    told = {(row["name"], row["side"]): row for row in rows}
    lines = [f"**Growth.** `{rows[0]['model']}`, one image, forward and backward, gigabytes above the weights':\n"]
    lines += [f"| side | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    ended = {row["name"] for row in rows if "error" in row}
    for side in sides:
        rest = ("not tried" if name in ended else "not reached" for name in names)
        each = [_grown(told.get((name, side)), else_) for name, else_ in zip(names, rest, strict=True)]
        lines.append(f"| {side} | {' | '.join(each)} |")
    return "\n".join([*lines, ""])


def _counted(part: Row) -> str:
    """Gigabytes that are kept for backward, by side."""
    rows: list[Row] = part["rows"]
    names, sides = list(dict.fromkeys(row["name"] for row in rows)), sorted({row["side"] for row in rows})
    told = {(row["name"], row["side"]): row["kept_gb"] for row in rows}
    lines = [
        f"**Kept for backward.** `{rows[0]['model']}`, one image, {rows[0]['dtype']}: gigabytes that the forward pass "
        "leaves behind, counted on torch's meta device with PyTorch's own operators, not measured. Fused softmax is "
        "counted as softmax without its maps of weights.\n"
    ]
    lines += [f"| side | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for side in sides:
        lines.append(f"| {side} | {' | '.join(f'{told[name, side]:,.2f}' for name in names)} |")
    verdict = (
        "Linear attention keeps about what fused softmax does: what it saves there is time, and memory only beside a "
        "softmax that keeps its weights.\n"
    )
    return "\n".join([*lines, "", verdict])


def _grown(row: Row | None, missing: str) -> str:
    if row is None:
        return missing
    return row["error"] if "error" in row else f"{row['peak_gb']:.2f} GB, {row['seconds']:.2f} s"


def by_arm(cells: Sequence[Row]) -> dict[str, list[Row]]:
    """Runs by backbone, in the order in which they come; those that went on until the time was over by themselves."""
    found: dict[str, list[Row]] = {}
    for cell in sorted(cells, key=lambda one: bool(one["longer"])):
        found.setdefault(_name(cell), []).append(cell)
    return found


def _name(cell: Row) -> str:
    return f"{cell['arm']}, {cell['pace']['steps']:,} steps" if cell["longer"] else cell["arm"]


def miou(cell: Row) -> float:
    """What counts: the averaged weights after the last step."""
    return cell["score"]["miou"]


def steps_of(cells: Sequence[Row]) -> int:
    """Steps of the runs that have the same number."""
    return max((cell["pace"]["steps"] for cell in cells if not cell["longer"]), default=0)
