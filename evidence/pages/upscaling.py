"""The page of super-resolution: decibels by mechanism, and memory at 70,000 tokens."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from pages.arms import NONE, Row, by_arm, doubts, held, page, read, steps_of
from pages.words import shown, table

ARMS = ("windows", "mala", "nala", "linear", "inline", "softmax", "mala + windows", NONE)
OWN = ("mechanism", "alternate")  # arguments that tell arms apart
CLAIMED = 92.3  # percent less memory, of NaLaFormer's authors
BICUBIC_BAR, SET5 = 28.42, "Set5"
MEMORY_BAR = 0.1  # of what softmax takes that keeps its weights
SAME = 0.001  # share by which two peaks may differ that are called the same
KEPT, SDPA = "softmax, weights kept", "softmax, SDPA"


def upscaling(found: Path) -> tuple[str, dict[str, Any]]:
    """The page of super-resolution, and the JSON beside it."""
    scales = {scale: told for scale in (2, 3, 4) if (told := read(found / f"upscale-x{scale}.json"))}
    scales = {scale: told for scale, told in scales.items() if told["cells"]}
    memory = [told for file in sorted(found.glob("upscale-memory*.json")) if (told := read(file))]
    cannot = [
        "Nothing was learnt from DIV2K, and no network was trained as long as published: the numbers are not SwinIR's."
    ]
    for scale, told in scales.items():
        values = by_arm(told["cells"], ARMS, lambda cell: _psnr(cell))
        cannot += [f"×{scale}: {said}" for said in doubts(values, ARMS, lower=False, unit="dB", form=".2f")]
        small = {name for cell in told["cells"] for name in cell.get("model_args", {}) if name not in OWN}
        if small:
            cannot.append(
                f"×{scale}: the networks were made smaller ({', '.join(sorted(small))}) than `upscaler_light` is, for "
                f"{told['machine']['device']}."
            )
    cannot += [] if scales else ["No network was trained yet."]
    parts = [part for scale, told in scales.items() for part in _scale(scale, told)]
    if not any(told["tokens"] >= 70_000 and _softmax_kept(told) for told in memory):
        cannot.append(
            "Memory of softmax that keeps its weights was not measured at 70,000 tokens; what is said of it follows "
            "from their number."
        )
    parts += [_memory(told) for told in memory]
    commands = [
        "PYTHONPATH=src python evidence/upscale.py --data photos --output out --scale 4 --minutes 25",
        "PYTHONPATH=src python benchmarks/upscale_memory.py --out out/upscale-memory.json",
    ]
    kept = {**{f"x{scale}": told for scale, told in scales.items()}, "memory": memory}
    return page("Super-resolution: decibels by mechanism, memory at 70,000 tokens", cannot, parts, commands), kept


def _psnr(cell: Row, name: str | None = None, field: str = "psnr") -> float:
    """The mean over the photos of a set, or of all."""
    return statistics.mean(photo[field] for photo in cell["photos"] if name in (None, photo["set"]))


def _scale(scale: int, told: Row) -> list[str]:
    cells: list[dict[str, Any]] = told["cells"]
    sets = list(dict.fromkeys(photo["set"] for photo in cells[0]["photos"]))
    bicubic = [f"{_psnr(cells[0], name, 'bicubic'):.2f}" for name in (*sets, None)]
    rows = [["bicubic", "", *bicubic, "", "", ""]]
    for arm in by_arm(cells, ARMS, lambda cell: _psnr(cell)):
        mine = [cell for cell in cells if cell["arm"] == arm]
        numbers = [shown([_psnr(cell, name) for cell in mine], ".2f") for name in (*sets, None)]
        others = [
            shown([_psnr(cell, None, field) for cell in mine], form)
            for field, form in (("ssim", ".4f"), ("tiles", ".2f"))
        ]
        rows.append([arm, str(len(mine)), *numbers, *others, f"{mine[0]['parameters'] / 1e3:.0f}k"])
    head = ("attention", "seeds", *sets, "all", "SSIM", "in tiles", "parameters")
    steps = steps_of(cells)
    settings = cells[0]["settings"]
    about = (
        f"×{scale}, PSNR on Y in dB after {steps} steps of {cells[0]['recipe']['batch_size']} crops of "
        f"{settings['patch']} x {settings['patch']}, {told['machine']['device']}. Of the last and the averaged weights "
        "the better ones on these photos are told, in all arms."
    )
    parts = [f"{about}\n\n{table(head, rows)}"]
    if scale == 4 and SET5 in sets:
        ours = {arm: statistics.mean(v) for arm, v in by_arm(cells, ARMS, lambda c: _psnr(c, SET5)).items()}
        own = _psnr(cells[0], SET5, "bicubic")
        above = [f"{arm} {value - own:+.2f} dB" for arm, value in ours.items()]
        parts.append(
            f"**Bars: bicubic on Set5, ×4, at {BICUBIC_BAR} ± 0.05 dB, and our network above it.** Bicubic has "
            f"{own:.2f}: the metric is {'right' if abs(own - BICUBIC_BAR) <= 0.05 else 'wrong'}. Over it: "
            f"{', '.join(above)}."
        )
    return parts


def _softmax_kept(told: Row) -> Row | None:
    rows = (row for row in told["rows"] if row["who"] == KEPT and row.get("peak_bytes"))
    return next(rows, None)


def _memory(told: Row) -> str:
    rows: list[list[str]] = []
    for row in told["rows"]:
        base = _kept_bytes(told, row["level"])
        less = ""
        if row["who"] != KEPT and row.get("peak_bytes") and base:
            less = f"{100 * (1 - row['peak_bytes'] / base):.1f} %"
        peak = f"{row['peak_bytes'] / 2**30:.3f}" if row.get("peak_bytes") else ""
        time = "does not fit" if "out_of_memory" in row else f"{row['milliseconds']:,.1f}"
        rows.append([row["level"], row["who"], time, peak, less])
    about = (
        f"Forward and backward over {told['tokens']:,} tokens, {told['heads']} heads of {told['head_dim']}, "
        f"{told['dtype'].removeprefix('torch.')}, {told['device']}; reported by NaLaFormer's authors: {CLAIMED} % less."
    )
    if not _softmax_kept(told):
        about += (
            f" The weights of softmax were not made: by their number alone, {told['heads']} x {told['tokens']:,}² of "
            f"them, they are {told['weights_bytes'] / 2**30:,.1f} GiB, which is what is compared with."
        )
    head = ("level", "attention", "ms", "peak GiB", "less than softmax with weights kept")
    return f"{about}\n\n{table(head, rows)}{_memory_bar(told)}"


def _kept_bytes(told: Row, level: str) -> float | None:
    """What softmax takes that keeps its weights: as measured, or by their number; None where it was tried in vain."""
    tried = [row for row in told["rows"] if row["who"] == KEPT and row["level"] == level]
    return tried[0].get("peak_bytes") if tried else told["weights_bytes"]


def _memory_bar(told: Row) -> str:
    """Whether every mechanism takes a tenth of softmax that keeps its weights, and less than SDPA."""
    sdpa = {row["level"]: row["peak_bytes"] for row in told["rows"] if row["who"] == SDPA and row.get("peak_bytes")}
    ours = [row for row in told["rows"] if not row["who"].startswith("softmax") and row.get("peak_bytes")]
    beside = [(row["peak_bytes"], base) for row in ours if (base := _kept_bytes(told, row["level"]))]
    less = all(own <= MEMORY_BAR * base for own, base in beside)
    said = f"\n\n**Bar: 90 % less than softmax that keeps its weights, and less than SDPA.** The first {held(less)}"
    if not sdpa:
        return f"{said}; SDPA was not measured."
    shares = {f"{row['who']} ({row['level']})": row["peak_bytes"] / sdpa[row["level"]] - 1 for row in ours}
    more = [name for name, share in shares.items() if share > SAME]
    same = [name for name, share in shares.items() if 0 <= share <= SAME]
    said += f"; the second {held(not more and not same)}"
    said += f": more is taken by {', '.join(more)}" if more else ""
    if same:
        said += (
            f"; as much, to {100 * SAME:.1f} %, by {', '.join(same)}: there the highest point is not in the attention"
        )
    return f"{said}."
