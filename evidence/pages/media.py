"""Pages of results out of what the scripts of evidence wrote: what cannot be concluded first, then tables and bars.

    PYTHONPATH=evidence python evidence/pages/media.py speech --found speech --output results/speech
    PYTHONPATH=evidence python evidence/pages/media.py generation --found outputs --output results/generation
    PYTHONPATH=evidence python evidence/pages/media.py upscaling --found out --output results/upscaling

`--found` is the folder with what came out, as far as it is there: of `evidence/speech.py` the folder `cells`,
of `benchmarks/speech_hour.py` speech_hour.json; generate.json, speed.json, check.json and generate-speed.json;
upscale-x2.json to upscale-x4.json and upscale-memory.json. JSON is put beside the page, and the page says nothing that
is not in it. It needs Python alone.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pages.words import FIRST, shown, table
from running.files import keep, write

Row = Mapping[str, Any]
Values = Mapping[str, Sequence[float]]  # of every arm, one for each seed
WANTED_SEEDS = 3
NONE = "none"

SPEECH_ARMS = ("softmax_relative", "softmax", "mala", "linear", "nala", "inline", NONE, "mala_causal")
GENERATION_ARMS = ("softmax", "mala", "mala_released", "linear", "nala", "inline", NONE)
UPSCALING_ARMS = ("windows", "mala", "nala", "linear", "inline", "softmax", "mala + windows", NONE)
CLAIMED = 92.3  # percent less memory, of NaLaFormer's authors
WER_BAR = 1.0  # points that MALA may be behind softmax with relative positions
BICUBIC_BAR, SET5 = 28.42, "Set5"
MEMORY_BAR = 0.1  # of what softmax takes that keeps its weights


# ------------------------------------------------------------------------------------------------ words


def doubts(values: Values, arms: Sequence[str], *, lower: bool, unit: str, form: str = ".1f") -> list[str]:
    """What the numbers of all arms cannot tell, a sentence each.

    Args:
        values: What was measured.
        arms: Those that were meant to be.
        lower: Whether less is better.
        unit: Of the numbers.
        form: Of the numbers.
    """
    found: list[str] = []
    missing = [arm for arm in arms if arm not in values]
    if missing:
        found.append(f"Not measured: {', '.join(missing)}.")
    fewest = min(map(len, values.values()))
    if fewest < WANTED_SEEDS:
        found.append(
            f"Some arms have {fewest} seed{'s' if fewest > 1 else ''}: how much another would differ is not known, and "
            "no order of the arms is established."
        )
    best = (min if lower else max)(values, key=lambda arm: statistics.mean(values[arm]))
    same = [arm for arm in values if arm != best and overlap(values[arm], values[best])]
    if same:
        found.append(f"Not told apart from the best arm, {best}, as their seeds overlap: {', '.join(same)}.")
    if NONE in values and best != NONE:
        ahead = abs(statistics.mean(values[best]) - statistics.mean(values[NONE]))
        found.append(
            f"The arm without attention is {ahead:{form}} {unit} behind the best: all that attention adds here."
        )
    elif best == NONE:
        found.append("The arm without attention is the best: this task, so trained, says nothing for any attention.")
    return found


def overlap(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether two sets of seeds overlap; of single seeds nobody knows, so they do."""
    if min(len(one), len(other)) < 2:
        return True
    return min(one) <= max(other) and min(other) <= max(one)


def page(title: str, cannot: Sequence[str], parts: Sequence[str], commands: Sequence[str]) -> str:
    """The whole page."""
    listed = "\n".join(f"- {sentence}" for sentence in cannot)
    made = "\n".join(commands)
    return "\n\n".join([f"# {title}", FIRST, listed, *parts, f"```sh\n{made}\n```"]) + "\n"


def by_arm(cells: Sequence[Row], arms: Sequence[str], value: Callable[[Row], float]) -> dict[str, list[float]]:
    """A number of all cells, by arm, in the order of the arms."""
    found = {arm: [value(cell) for cell in cells if cell["arm"] == arm] for arm in arms}
    return {arm: values for arm, values in found.items() if values}


# ------------------------------------------------------------------------------------------------ speech


def speech(found: Path) -> tuple[str, dict[str, Any]]:
    """The page of speech, and the JSON beside it."""
    cells = [{**told, **told["cell"]} for file in sorted((found / "cells").glob("*.json")) if (told := _read(file))]
    hour = _read(found / "speech_hour.json")
    wer = by_arm(cells, SPEECH_ARMS, lambda cell: 100 * cell["wer"])
    cannot = [
        "The recordings are eleven hours of actors in a game, many of them with processed voices, and the networks "
        "have eight blocks of 160 channels: no WER here is to be read beside one of LibriSpeech's.",
        *(doubts(wer, SPEECH_ARMS, lower=True, unit="points") if wer else ["No network was trained yet."]),
        *([] if hour else ["An hour of audio in one piece was not measured yet."]),
    ]
    parts = ([_speech_table(cells, wer), *_speech_bars(cells, wer)] if wer else []) + ([_hour(hour)] if hour else [])
    commands = [
        "PYTHONPATH=src python evidence/speech.py --data packed --out speech --minutes 9",
        "PYTHONPATH=src python benchmarks/speech_hour.py --out speech/speech_hour.json",
    ]
    kept = {"cells": cells, **({"hour": hour} if hour else {})}
    return page("Speech: words that are heard wrong, by mechanism", cannot, parts, commands), kept


def _speech_table(cells: Sequence[Row], wer: Values) -> str:
    rows: list[list[str]] = []
    for arm in wer:
        mine = [cell for cell in cells if cell["arm"] == arm]
        edits = [shown([100 * cell[name] for cell in mine]) for name in ("wer", "cer")]
        steps = "/".join(sorted({str(cell["plan"]["steps"]) for cell in mine}))
        rows.append([arm, str(len(mine)), *edits, f"{mine[0]['parameters'] / 1e6:.2f} M", steps])
    first = cells[0]
    about = (
        f"WER and CER in percent on {first['recordings']:,} recordings ({first['words']:,} words) of speakers that "
        "were never heard, averaged weights after the last step, the likeliest piece of every token."
    )
    return f"{about}\n\n{table(('attention', 'seeds', 'WER', 'CER', 'parameters', 'steps'), rows)}"


def _speech_bars(cells: Sequence[Row], wer: Values) -> list[str]:
    found: list[str] = []
    if "mala" in wer and "softmax_relative" in wer:
        behind = statistics.mean(wer["mala"]) - statistics.mean(wer["softmax_relative"])
        found.append(
            f"**Bar: MALA within {WER_BAR} of softmax with relative positions, or better.** It is {abs(behind):.1f} "
            f"points {'behind' if behind > 0 else 'ahead'}: the bar {_held(behind <= WER_BAR)}."
        )
    streams = [cell["stream"] for cell in cells if "stream" in cell]
    if streams:
        same, tokens = (sum(stream[name] for stream in streams) for name in ("same_tokens", "tokens"))
        found.append(
            f"**Bar: the stream says what the whole says, token for token.** {same:,} of {tokens:,} tokens are the "
            "same."
        )
    return found


def _hour(hour: Row) -> str:
    rows = [[row["model"], row["arm"], f"{row['minutes']:g}", *_measured(row)] for row in hour["rows"]]
    about = f"The encoder in one piece, forward alone, {hour['machine']['device']}."
    return f"{about}\n\n{table(('network', 'attention', 'minutes of audio', 'seconds', 'GiB'), rows)}"


def _measured(row: Row) -> list[str]:
    if "seconds" in row:
        return [f"{row['seconds']:.3f}", f"{row['gib']:.2f}" if row.get("gib") else ""]
    if "would_need_gib" in row:
        return ["not tried", f"{row['would_need_gib']:,.0f} of scores alone"]
    return ["does not fit", ""]


# ------------------------------------------------------------------------------------------------ generation


def generation(found: Path) -> tuple[str, dict[str, Any]]:
    """The page of generation, and the JSON beside it."""
    told, speed, check, large = (
        _read(found / f"{name}.json") for name in ("generate", "speed", "check", "generate-speed")
    )
    cells: list[dict[str, Any]] = told["cells"] if told else []
    frechet = by_arm(cells, GENERATION_ARMS, lambda cell: cell["score"]["frechet"])
    cannot = [
        "Networks of this size are trained for 400,000 steps where FIDs are published; these were trained for "
        f"{_steps(cells)}, so that distances are far above those, and their order may change with more."
        if cells
        else "No network was trained yet.",
        *(doubts(frechet, GENERATION_ARMS, lower=True, unit="of distance") if cells else []),
        *([] if large else ["Speed from 1,024 tokens on was not measured yet."]),
    ]
    parts: list[str] = []
    if told and cells:
        parts.append(_generation_table(told, frechet, check))
    if speed:
        parts.append(_sampling(speed))
    if large:
        parts += _large(large)
    commands = [
        "PYTHONPATH=src python evidence/generate.py train --data cifar-10 --output outputs --steps 3000",
        "PYTHONPATH=src python evidence/generate.py check --data cifar-10 --output outputs",
        "PYTHONPATH=src python benchmarks/generate_speed.py --out outputs/generate-speed.json --around plain,parts",
    ]
    kept = {"generate": told, "speed": speed, "check": check, "generate-speed": large}
    return page("Generation: DiT-S/2 on CIFAR-10, by mechanism", cannot, parts, commands), kept


def _steps(cells: Sequence[Row]) -> str:
    counts = sorted({cell["steps"] for cell in cells})
    return " or ".join(f"{count:,}" for count in counts)


def _generation_table(told: Row, frechet: Values, check: Row | None) -> str:
    rows: list[list[str]] = []
    for arm in frechet:
        mine = [cell for cell in told["cells"] if cell["arm"] == arm]
        scores = {name: [cell["score"][name] for cell in mine] for name in mine[0]["score"]}
        kernel = shown([1000 * value for value in scores["kernel"]], ".2f")
        shares = [shown(scores[name], ".3f") for name in ("precision", "recall")]
        rows.append(
            [arm, str(len(mine)), shown(scores["frechet"]), kernel, *shares, f"{mine[0]['parameters'] / 1e6:.1f} M"]
        )
    fid = told["features"] == "inception"
    about = (
        f"{told['cells'][0]['settings']['made']:,} images of averaged weights against the training images, over "
        f"{'features of Inception' if fid else 'a small random network: these are no FIDs'}. Convolution, gate and "
        "positions are the same in all arms."
    )
    if check:
        about += f" The test images are {check['frechet']:.2f} from the training images by the same code."
    head = ("attention", "seeds", "FID" if fid else "distance", "kernel distance x 1000", "precision", "recall")
    return f"{about}\n\n{table((*head, 'parameters'), rows)}"


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
    rates = {(row["around"], row["pixels"], row["mechanism"]): row["images_per_second"] for row in large["rows"]}
    rows: list[list[str]] = []
    behind: list[str] = []
    for row in large["rows"]:
        base = rates.get((row["around"], row["pixels"], "softmax"))
        times = row["images_per_second"] / base if base else 0.0
        told = f"{times:.2f}" if base else ""
        rows.append(
            [
                row["around"],
                f"{row['tokens']:,}",
                row["mechanism"],
                f"{row['images_per_second']:.2f}",
                told,
                f"{row['peak_gb']:.2f}",
            ]
        )
        if base and row["mechanism"] not in ("softmax", NONE) and times <= 1:
            behind.append(f"{row['mechanism']} at {row['tokens']:,} tokens ({row['around']}, {times:.2f})")
    bar = f"not for {'; '.join(behind)}" if behind else "so it is for all that were measured"
    head = ("around", "tokens", "attention", "images/s", "of SDPA's", "GiB of a pass")
    return [
        f"Latents of 512 pixels and more, {large['steps']} steps, a whole batch at a time.\n\n{table(head, rows)}",
        f"**Bar: linear attention ahead of SDPA from 1,024 tokens on.** {bar[0].upper()}{bar[1:]}.",
    ]


# ------------------------------------------------------------------------------------------------ upscaling


def upscaling(found: Path) -> tuple[str, dict[str, Any]]:
    """The page of super-resolution, and the JSON beside it."""
    scales = {scale: told for scale in (2, 3, 4) if (told := _read(found / f"upscale-x{scale}.json"))}
    scales = {scale: told for scale, told in scales.items() if told["cells"]}
    memory = [told for file in sorted(found.glob("upscale-memory*.json")) if (told := _read(file))]
    cannot = [
        "Nothing was learnt from DIV2K, and no network was trained as long as published: the numbers are not SwinIR's."
    ]
    for scale, told in scales.items():
        values = by_arm(told["cells"], UPSCALING_ARMS, lambda cell: _psnr(cell))
        cannot += [f"×{scale}: {said}" for said in doubts(values, UPSCALING_ARMS, lower=False, unit="dB", form=".2f")]
        small = {name for cell in told["cells"] for name in cell.get("model_args", {}) if name not in OWN}
        if small:
            cannot.append(
                f"×{scale}: the networks were made smaller ({', '.join(sorted(small))}) than `upscaler_light` is, for "
                f"{told['machine']['device']}."
            )
    cannot += [] if scales else ["No network was trained yet."]
    parts = [part for scale, told in scales.items() for part in _upscaling(scale, told)]
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


OWN = ("mechanism", "alternate")


def _psnr(cell: Row, name: str | None = None, field: str = "psnr") -> float:
    """The mean over the photos of a set, or of all."""
    return statistics.mean(photo[field] for photo in cell["photos"] if name in (None, photo["set"]))


def _upscaling(scale: int, told: Row) -> list[str]:
    cells: list[dict[str, Any]] = told["cells"]
    sets = list(dict.fromkeys(photo["set"] for photo in cells[0]["photos"]))
    bicubic = [f"{_psnr(cells[0], name, 'bicubic'):.2f}" for name in (*sets, None)]
    rows = [["bicubic", "", *bicubic, "", "", ""]]
    for arm in by_arm(cells, UPSCALING_ARMS, lambda cell: _psnr(cell)):
        mine = [cell for cell in cells if cell["arm"] == arm]
        numbers = [shown([_psnr(cell, name) for cell in mine], ".2f") for name in (*sets, None)]
        others = [
            shown([_psnr(cell, None, field) for cell in mine], form)
            for field, form in (("ssim", ".4f"), ("tiles", ".2f"))
        ]
        rows.append([arm, str(len(mine)), *numbers, *others, f"{mine[0]['parameters'] / 1e3:.0f}k"])
    head = ("attention", "seeds", *sets, "all", "SSIM", "in tiles", "parameters")
    steps = _steps(cells)
    settings = cells[0]["settings"]
    about = (
        f"×{scale}, PSNR on Y in dB after {steps} steps of {cells[0]['recipe']['batch_size']} crops of "
        f"{settings['patch']} x {settings['patch']}, {told['machine']['device']}. Of the last and the averaged weights "
        "the better ones on these photos are told, in all arms."
    )
    parts = [f"{about}\n\n{table(head, rows)}"]
    if scale == 4 and SET5 in sets:
        ours = {arm: statistics.mean(v) for arm, v in by_arm(cells, UPSCALING_ARMS, lambda c: _psnr(c, SET5)).items()}
        own = _psnr(cells[0], SET5, "bicubic")
        above = [f"{arm} {value - own:+.2f} dB" for arm, value in ours.items()]
        parts.append(
            f"**Bars: bicubic on Set5, ×4, at {BICUBIC_BAR} ± 0.05 dB, and our network above it.** Bicubic has "
            f"{own:.2f}: the metric is {'right' if abs(own - BICUBIC_BAR) <= 0.05 else 'wrong'}. Over it: "
            f"{', '.join(above)}."
        )
    return parts


def _softmax_kept(told: Row) -> Row | None:
    rows = (row for row in told["rows"] if row["who"] == "softmax, weights kept" and row.get("peak_bytes"))
    return next(rows, None)


def _memory(told: Row) -> str:
    rows: list[list[str]] = []
    for row in told["rows"]:
        less = ""
        if row["who"] != "softmax, weights kept" and row.get("peak_bytes"):
            percent = row.get("less_percent", 100 * (1 - row["peak_bytes"] / told["weights_bytes"]))
            less = f"{percent:.1f} %"
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


def _memory_bar(told: Row) -> str:
    """Whether every mechanism takes a tenth of softmax that keeps its weights, and less than SDPA."""
    base: dict[str, float] = {}
    sdpa: dict[str, float] = {}
    for row in told["rows"]:
        for name, found in (("softmax, weights kept", base), ("softmax, SDPA", sdpa)):
            if row["who"] == name and row.get("peak_bytes"):
                found[row["level"]] = row["peak_bytes"]
    ours = [row for row in told["rows"] if not row["who"].startswith("softmax") and row.get("peak_bytes")]
    less = all(row["peak_bytes"] <= MEMORY_BAR * (base.get(row["level"]) or told["weights_bytes"]) for row in ours)
    said = f"\n\n**Bar: 90 % less than softmax that keeps its weights, and less than SDPA.** The first {_held(less)}"
    if not sdpa:
        return f"{said}; SDPA was not measured."
    more = [f"{row['who']} ({row['level']})" for row in ours if row["peak_bytes"] >= sdpa.get(row["level"], math.inf)]
    return f"{said}; the second {_held(not more)}{': more is taken by ' + ', '.join(more) if more else ''}."


def _held(good: bool) -> str:
    return "holds" if good else "does not hold"


# ------------------------------------------------------------------------------------------------ files


def _read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


PAGES = {"speech": speech, "generation": generation, "upscaling": upscaling}


def main() -> None:
    """Write one page and the JSON beside it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", choices=tuple(PAGES))
    parser.add_argument("--found", type=Path, required=True, help="folder with what the scripts wrote")
    parser.add_argument("--output", type=Path, required=True, help="folder of the page")
    parser.add_argument("--note", action="append", help="what the files do not tell and a reader has to know")
    given = parser.parse_args()
    text, kept = PAGES[given.page](given.found)
    notes = "".join(f"- {note}\n" for note in given.note or [])
    text = text.replace(f"{FIRST}\n\n", f"{FIRST}\n\n{notes}", 1)
    keep(given.output / f"{given.page}.json", kept)
    write(given.output / "README.md", text)
    print(text)


if __name__ == "__main__":
    main()
