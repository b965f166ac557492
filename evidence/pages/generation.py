"""The page of generation: distances by mechanism, and how fast samplers are."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pages.arms import NONE, Row, Values, by_arm, doubts, page, read, steps_of
from pages.words import shown, table

FROM = 1024  # tokens
UNJUDGED = (
    "Networks were trained, but the time was over before they had made images: there is no FID of any arm, and a "
    "training loss says little about images."
)
ARMS = ("softmax", "mala", "mala_released", "linear", "nala", "inline", NONE)


def generation(found: Path) -> tuple[str, dict[str, Any]]:
    """The page of generation, and the JSON beside it."""
    told, speed, check, large = (
        read(found / f"{name}.json") for name in ("generate", "speed", "check", "generate-speed")
    )
    cells: list[dict[str, Any]] = told["cells"] if told else []
    losses: list[dict[str, Any]] = told.get("losses", []) if told else []
    frechet = by_arm(cells, ARMS, lambda cell: cell["score"]["frechet"])
    cannot = [
        _how_far(cells, losses),
        *(doubts(frechet, ARMS, lower=True, unit="of distance") if cells else []),
        *([] if large else ["Speed from 1,024 tokens on was not measured yet."]),
    ]
    parts: list[str] = []
    if told and cells:
        parts.append(_table(told, frechet, check))
        if (found / "samples.png").is_file():
            parts.append("Every arm from the same noise, a class in each column:\n\n![Images of all arms](samples.png)")
    if losses:
        parts.append(_losses(losses))
    if check and not cells:
        parts.append(_check(check))
    if speed:
        parts.append(_sampling(speed))
    if large:
        parts += _large(large)
    commands = [
        f"PYTHONPATH=src python evidence/generate.py --data sheets --output outputs {_told(cells)}--minutes 9",
        "PYTHONPATH=src python benchmarks/generate_speed.py --out outputs/generate-speed.json --around plain,parts",
    ]
    kept = {"generate": told, "speed": speed, "check": check, "generate-speed": large}
    return page("Generation: DiT-S/2 on CIFAR-10, by mechanism", cannot, parts, commands), kept


def _told(cells: Sequence[Row]) -> str:
    """What the command was told."""
    if not cells:
        return ""
    first, settings = cells[0], cells[0]["settings"]
    return f"--steps {first['steps']} --made {settings['made']} --sample-steps {settings['sample_steps']} "


def _how_far(cells: Sequence[Row], losses: Sequence[Row]) -> str:
    """How long networks were trained, beside those that are published; or that they were not, or not judged."""
    if not cells:
        return UNJUDGED if losses else "No network was trained yet."
    batch, steps, images = cells[0]["recipe"]["batch_size"], cells[0]["steps"], cells[0]["images"]
    return (
        "Networks of this size are trained for 400,000 steps of 256 images where FIDs are published; these were "
        f"trained for {steps_of(cells)} of {batch}, so that every image came {batch * steps / images:.1f} times. "
        "Distances are far above those, and their order may change with more."
    )


def _table(told: Row, frechet: Values, check: Row | None) -> str:
    rows: list[list[str]] = []
    for arm in frechet:
        mine = [cell for cell in told["cells"] if cell["arm"] == arm]
        scores = {name: [cell["score"][name] for cell in mine] for name in mine[0]["score"]}
        kernel = shown([1000 * value for value in scores["kernel"]], ".2f")
        shares = [shown(scores[name], ".3f") for name in ("precision", "recall")]
        size, made = f"{mine[0]['parameters'] / 1e6:.1f} M", shown([one["made_per_second"] for one in mine], ".0f")
        rows.append([arm, str(len(mine)), shown(scores["frechet"]), kernel, *shares, size, made])
    fid, first = told["features"] == "inception", told["cells"][0]
    about = (
        f"{first['settings']['made']:,} images of averaged weights, {first['settings']['sample_steps']} of Euler's "
        f"steps each, against the {first['images']:,} images that were learnt from, over "
        f"{'features of Inception' if fid else 'a small random network: these are no FIDs'}. Convolution, gate and "
        f"positions are the same in all arms. A step is of {first['recipe']['batch_size']} images."
    )
    if check:
        others, last = check["images"]
        about += f" {last:,} real images are {check['frechet']:.2f} from {others:,} others by the same code."
    head = ("attention", "seeds", "FID" if fid else "distance", "kernel distance x 1000", "precision", "recall")
    return f"{about}\n\n{table((*head, 'parameters', 'images made/s'), rows)}"


def _losses(losses: Sequence[Row]) -> str:
    """The training loss of all arms with the same seed, at the steps that all of them have been at."""
    seed = losses[0]["seed"]
    found = {row["arm"]: dict(zip(row["at"], row["loss"], strict=True)) for row in losses if row["seed"] == seed}
    common = sorted(set[int].intersection(*(set(steps) for steps in found.values())))
    late = common[len(common) // 2 :]
    base = found.get("softmax")
    rows: list[list[str]] = []
    for arm in sorted(found, key=lambda arm: statistics.mean(found[arm][step] for step in late)):
        mean = statistics.mean(found[arm][step] for step in late)
        apart = [found[arm][step] - base[step] for step in late] if base else []
        beside = f"{statistics.mean(apart):+.4f} ({min(apart):+.4f} to {max(apart):+.4f})" if apart else ""
        rows.append([arm, f"{mean:.4f}", beside, f"{max(found[arm]):,}"])
    about = (
        f"Training loss, the mean over the stretches of steps that end with {late[0]:,} to {late[-1]:,}; images and "
        f"noise are the same in all arms, so that what is beside softmax is told stretch by stretch. Seed {seed} alone."
    )
    return f"{about}\n\n{table(('attention', 'loss', 'beside softmax (least to most)', 'steps done'), rows)}"


def _check(check: Row) -> str:
    """How far real images are from real images."""
    others, last = check["images"]
    return (
        f"What FID is of images that are as good as they can be: {last:,} real images are {check['frechet']:.2f} from "
        f"{others:,} others, by as many as there are; the kernel distance, which has no such bias, is "
        f"{1000 * check['kernel']:.2f} thousandths."
    )


def _sampling(speed: Row) -> str:
    rows = [
        [row["arm"], f"{statistics.median(row['images_per_second']):,.0f}", f"{row.get('peak_gb') or 0:.2f}"]
        for row in speed["rows"]
        if row["images_per_second"]
    ]
    about = (
        f"The whole sampler at {speed['tokens']} tokens: {speed['steps']} steps of {speed['sampler']}, batches of "
        f"{speed['batch']}, no guidance, {speed['dtype']}, {'compiled' if speed['compiled'] else 'eager'}, "
        f"{speed['machine']['device']}."
    )
    return f"{about}\n\n{table(('attention', 'images/s', 'GiB'), rows)}"


def _large(large: Row) -> list[str]:
    def size(row: Row) -> tuple[str, int, bool]:
        return row["around"], row["tokens"], row.get("compiled", False)

    rates = {size(row): row["images_per_second"] for row in large["rows"] if row["mechanism"] == "softmax"}
    rows: list[list[str]] = []
    behind: list[str] = []
    for row in sorted(large["rows"], key=size):
        base = rates.get(size(row))
        times = row["images_per_second"] / base if base else 0.0
        how = "compiled" if row.get("compiled") else "eager"
        images = f"{row['images_per_second']:.2f}"
        told = f"{times:.2f}" if base else ""
        rows.append([row["around"], how, f"{row['tokens']:,}", row["mechanism"], images, told, f"{row['peak_gb']:.2f}"])
        if base and row["tokens"] >= FROM and row["mechanism"] not in ("softmax", NONE) and times <= 1:
            behind.append(f"{row['mechanism']} at {row['tokens']:,} tokens ({row['around']}, {how}, {times:.2f})")
    bar = f"not for {'; '.join(behind)}" if behind else "so it is for all that were measured"
    head = ("around", "network", "tokens", "attention", "images/s", "of SDPA's", "GiB of a pass")
    return [
        f"Latents of 256 pixels and more, {large['steps']} steps, a whole batch at a time.\n\n{table(head, rows)}",
        f"**Bar: linear attention ahead of SDPA from {FROM:,} tokens on.** {bar[0].upper()}{bar[1:]}.",
    ]
