"""The evidence for super-resolution: PSNR by mechanism after equal training from fresh weights, on one GPU.

    PYTHONPATH=src python evidence/upscale.py --data photos --output outputs --probe
    PYTHONPATH=src python evidence/upscale.py --data photos --output outputs --minutes 25 --parallel 4

The data is a folder `train` of photos beside Set5, Set14, BSD100 and Urban100. Every arm with every seed that is not
trained yet is trained by the small recipe, several processes at a time, all by the same settings, and judged on every
photo: whole, and in tiles of the size it was trained on. `upscale-xS.json` is written after each. When the time is over
it stops; the same command goes on where each run was. `--probe` trains nothing: it measures a step of each arm by
itself, and says how long all of them would take.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from affinear import tasks
from affinear.models.upscaler import make_upscaler
from affinear.tasks.upscale.opening import Album
from affinear.tasks.upscale.samples import cut_to
from affinear.tasks.upscale.work import UpscaleWork
from affinear.train import Recipe, Run, train
from affinear.train.spelling import parse, parse_model_args
from affinear.train.task import Trained
from running.cells import Cell, is_worker, results, serve
from running.files import keep
from running.machine import machine
from running.options import add_options, again, arms_of, how_of, numbers, without_traceback
from running.steps import step_seconds
from running.telling import work_off_and_tell

OURS = "upscaler_light"
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "windows": (OURS, {"mechanism": "windows"}),
    "mala": (OURS, {"mechanism": "mala"}),
    "none": (OURS, {"mechanism": "none"}),
    "nala": (OURS, {"mechanism": "nala"}),
    "linear": (OURS, {"mechanism": "linear"}),
    "inline": (OURS, {"mechanism": "inline"}),
    "softmax": (OURS, {"mechanism": "softmax"}),
    "mala + windows": (OURS, {"mechanism": "mala", "alternate": True}),
    "swinir_light": ("swinir_light", {}),
}
USUAL = tuple(ARMS)[:8]
BATCH, PATCH = 32, 64
AROUND = 8  # pixels around a tile of the trained size
START = 25  # seconds until a process trains, kernels included


def main() -> int:
    """Do what is asked; 1 if something is left to do."""
    if is_worker():
        return serve(lambda told: cell(arguments().parse_args(told)))
    given = arguments().parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    arms, seeds = arms_of(given.arms, USUAL, ARMS), numbers(given.seeds)
    if given.probe:
        probe(given, arms, len(seeds))
        return 0
    cells = [cell_of(given, arm, seed) for seed in seeds for arm in arms]
    return work_off_and_tell(__file__, cells, how_of(given, given.output), lambda: tell(cells, given), line)


def cell_of(given: argparse.Namespace, arm: str, seed: int) -> Cell:
    """An arm with a seed, and what its process is told."""
    folder = given.output / f"x{given.scale}" / f"{arm.replace(' + ', '_').replace(' ', '_')}-{seed}"
    told = ["--data", given.data, "--output", str(folder), "--arms", arm, "--seeds", str(seed)]
    told += ["--steps", str(given.steps), "--scale", str(given.scale), "--workers", str(given.workers)]
    return Cell.in_folder(f"{arm}, seed {seed}", folder, [*told, *again(given, "set", "model_arg")])


def cell(given: argparse.Namespace) -> None:
    """Train one arm with one seed, judge it, and write what came out."""
    model, own = ARMS[given.arms]
    args = {**own, **parse_model_args(given.model_arg or [])}
    changes: dict[str, Any] = {
        "steps": given.steps,
        "eval_steps": given.steps,
        "save_every": max(1, given.steps // 4),
        "seed": int(given.seeds),
        "workers": given.workers,
        "batch_size": BATCH,
        "patch": PATCH,
        "scale": given.scale,
        "crops": 64,
        "memory": True,
        "compile": False,
        "ema_decay": min(0.999, 1 - 10 / max(given.steps, 20)),  # or a short run's average is of its first weights
    }
    changes |= parse(given.set or [], Recipe, tasks.find("upscale").settings)
    setup = tasks.recipe_for("upscale", model, "small", **changes)
    data: Album = setup.task.open(given.data, setup.settings)
    began = time.monotonic()
    result = train(Run(model, given.data, given.output, setup, args), data=data)
    trained_in = time.monotonic() - began
    trained = tasks.load_trained(result.weights)
    last = result.records[-1]
    found = {
        "arm": given.arms,
        "seed": int(given.seeds),
        "scale": given.scale,
        "steps": given.steps,
        "data": data.fingerprint,
        "last": last.test,
        "averaged": last.averaged,
        "photos": judged(trained, data),
        "parameters": result.parameters,
        "macs": setup.task.macs(trained.job),
        "crops_per_second": result.per_second,
        "peak_memory": result.peak_memory,
        "seconds": trained_in,
        "recipe": setup.recipe.as_dict(),
        "settings": setup.settings.as_dict(),
        "model_args": args,
    }
    keep(given.output / "result.json", found)


def judged(trained: Trained[Any, Any], data: Album) -> list[dict[str, Any]]:
    """Every test photo: its set, PSNR and SSIM whole, PSNR in tiles of the trained size, and that of bicubic."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = trained.network.to(device)
    settings = trained.job.settings.changed(tile=trained.job.settings.patch, overlap=AROUND)
    works = {
        look: UpscaleWork(dataclasses.replace(trained.job, settings=settings.changed(look=look)), data, device)
        for look in ("whole", "tiles")
    }
    rows: list[dict[str, Any]] = []
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        for index in range(len(data.test)):
            large = cut_to(data.test[index], trained.job.settings.scale).to(device)
            _, peak, similarity, bicubic = works["whole"].judged(network, large)
            rows.append(
                {
                    "set": data.sets[data.set_of[index]],
                    "psnr": peak,
                    "ssim": similarity,
                    "tiles": works["tiles"].judged(network, large)[1],
                    "bicubic": bicubic,
                }
            )
    return rows


def line(found: Mapping[str, Any]) -> str:
    """A cell in a line."""
    return f"{mean(found, 'psnr'):.3f} dB after {found['seconds']:.0f} s"


def mean(found: Mapping[str, Any], field: str, name: str | None = None) -> float:
    """The mean of a number over the photos of a set, or over all."""
    return statistics.mean(photo[field] for photo in found["photos"] if name in (None, photo["set"]))


def tell(cells: Sequence[Cell], given: argparse.Namespace) -> str:
    """Write all that is done as JSON, and give it as a table, bicubic first."""
    done = results(cells)
    about = {"machine": machine(), "parallel": given.parallel, "cells": done}
    keep(given.output / f"upscale-x{given.scale}.json", about)
    if not done:
        return "nothing is done yet"
    sets = list(dict.fromkeys(photo["set"] for photo in done[0]["photos"]))
    columns = (*sets, "all", "spread", "SSIM", "in tiles", "parameters", "GMACs", "crops/s, shared", "GB")
    lines = [f"| arm | seeds | {' | '.join(columns)} |"]
    lines += [f"|---|---|{'---|' * len(columns)}"]
    bicubic = " | ".join(f"{mean(done[0], 'bicubic', name):.2f}" for name in sets)
    lines += [f"| bicubic | | {bicubic} | {mean(done[0], 'bicubic'):.2f} | | | | | | | |"]
    for arm in dict.fromkeys(found["arm"] for found in done):
        lines.append(row([found for found in done if found["arm"] == arm], sets))
    return "\n".join(lines)


def row(mine: Sequence[Mapping[str, Any]], sets: Sequence[str]) -> str:
    """One arm: means over its seeds."""

    def over_seeds(field: str, name: str | None = None) -> float:
        return statistics.mean(mean(found, field, name) for found in mine)

    values = [mean(found, "psnr") for found in mine]
    by_set = " | ".join(f"{over_seeds('psnr', name):.2f}" for name in sets)
    return (
        f"| {mine[0]['arm']} | {len(mine)} | {by_set} "
        f"| {statistics.mean(values):.3f} | {min(values):.3f} to {max(values):.3f} | {over_seeds('ssim'):.4f} "
        f"| {over_seeds('tiles'):.3f} | {mine[0]['parameters'] / 1e3:.0f}k | {mine[0]['macs'] / 1e9:.2f} "
        f"| {statistics.median(found['crops_per_second'] for found in mine):.0f} "
        f"| {max(found['peak_memory'] for found in mine) / 2**30:.1f} |"
    )


def probe(given: argparse.Namespace, arms: Sequence[str], seeds: int) -> None:
    """Seconds and memory of a step of each arm by itself, and how long all cells would take."""
    rows: list[dict[str, Any]] = []
    for arm in arms:
        began = time.monotonic()
        steps = stepping(arm, given.scale)
        first = [next(steps) for _ in range(3)]
        seconds = statistics.median(next(steps) for _ in range(5))
        memory = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
        rows.append({"arm": arm, "seconds": seconds, "gb": memory, "first": first})
        keep(given.output / f"probe-x{given.scale}.json", {"machine": machine(), "rows": rows})
        took = time.monotonic() - began
        print(f"{arm}: {1000 * seconds:.1f} ms a step, {memory:.1f} GB ({took:.0f} s)", flush=True)
    total = seeds * sum(given.steps * found["seconds"] + START for found in rows)
    print(f"all cells one after the other: about {total / 60:.0f} minutes, less several at a time")


def stepping(arm: str, scale: int) -> Iterator[float]:
    """Training steps of an arm without end, each with the seconds it took."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batch, patch = (BATCH, PATCH) if device.type == "cuda" else (1, 16)
    model, args = ARMS[arm]
    network = make_upscaler(model, {**args, "scale": scale, "drop_path_rate": 0.0}).to(device).train()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-4)
    small = torch.rand(batch, 3, patch, patch, device=device)
    large = torch.rand(batch, 3, scale * patch, scale * patch, device=device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def loss() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            out = network(small)
        return F.l1_loss(out, large)

    while True:
        yield step_seconds(loss, optimizer, device)


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="photos", help="folder with train, Set5, Set14, BSD100 and Urban100")
    parser.add_argument("--output", required=True, type=Path, help="folder for runs and JSON")
    parser.add_argument("--scale", default=2, type=int, choices=(2, 3, 4), help="how many times larger")
    parser.add_argument("--arms", help="some of the arms, with commas")
    add_options(parser, parallel=4, workers=2, minutes=60.0)
    parser.add_argument("--steps", default=4000, type=int, help="training steps of each cell")
    parser.add_argument("--model-arg", action="append", help="what all networks are made with; may be given again")
    parser.add_argument(
        "--probe", action="store_true", help="only measure a step of each arm, and say how long it takes"
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(without_traceback(main))
