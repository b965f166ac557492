"""The evidence for generation: DiT-S/2 on CIFAR-10 in pixels, by mechanism, on one GPU, within a given time.

    export AFFINEAR_INCEPTION=inception.safetensors        # see evidence/packing/pack_inception.py
    PYTHONPATH=src python evidence/generate.py check --data cifar-10 --output outputs
    PYTHONPATH=src python evidence/generate.py train --data cifar-10 --output outputs --minutes 60
    PYTHONPATH=src python evidence/generate.py speed --output outputs --minutes 4
    PYTHONPATH=src python evidence/generate.py train --data cifar-10 --output probe --probe

`train` trains every arm with every seed that is not there yet, some processes at a time, all by the same settings and
for as many steps, and judges the averaged weights: FID, kernel distance, precision, recall. Without `--steps` there are
as many as the slowest can do in `--minutes`, found out in the beginning. It writes `generate.json` after each, and
`samples.png`, a row of pictures for each arm. When the time is over the runs save themselves, and the same command goes
on. `speed` measures each arm by itself: images per second of the whole sampler, and memory. `check` measures the
distance of the test images from the training images, which is known: about 3.2 over Inception; and keeps the features
of the training images, so that no cell after it has to compute them.
`--probe` does a few steps of every arm and says how long the whole would take.

In all arms convolution, gate and positions are the same; one of them has no attention.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo
from PIL import Image, ImageDraw
from torch import Tensor, nn

import affinear.models  # noqa: F401  # pyright: ignore[reportUnusedImport]  # registers the names
from affinear import tasks
from affinear.bench.timing import seconds_of, synchronize
from affinear.models.making import make
from affinear.tasks.generate import TASK, metrics
from affinear.tasks.generate.features import features_of
from affinear.tasks.generate.process import Flow
from affinear.tasks.generate.samples import some
from affinear.tasks.generate.sampling import Way, sample
from affinear.tasks.images.batching import Batching
from affinear.train import Recipe, Run, train
from affinear.train.progress import Progress
from affinear.train.spelling import parse, parse_model_args
from running.cells import Cell, is_worker, results, serve
from running.files import keep
from running.machine import machine
from running.options import add_options, again, arms_of, how_of, numbers
from running.pace import Pace, timed
from running.telling import work_off_and_tell

MODEL = "dit_s_2"
ARMS = ("softmax", "mala", "linear", "none", "mala_released", "nala", "inline")
SHAPE, CLASSES = (3, 32, 32), 10
PROBED = 30  # steps of a probe
MOST_STEPS = 50_000  # however much time there is
LOSS = re.compile(r"^\d+ s: step (\d+), loss ([\d.]+)$", re.MULTILINE)


class Lines(Progress):
    """Says how a run goes, a line now and then."""

    def __init__(self, every: int) -> None:
        self.every, self.began = every, time.monotonic()

    def step(self, step: int, loss: float, amount: float) -> None:
        """After each step."""
        if step % self.every == 0:
            print(f"{time.monotonic() - self.began:.0f} s: step {step}, loss {loss:.4f}", flush=True)

    def testing(self) -> None:
        """Before it is judged."""
        print(f"{time.monotonic() - self.began:.0f} s: making images", flush=True)


def main() -> int:
    """Do what is asked; 1 if something is left to do."""
    if is_worker():
        return serve(lambda told: cell(arguments().parse_args(told)))
    given = arguments().parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    if given.what == "speed":
        return speed(given)
    if given.what == "check":
        return check(given)
    if given.probe:
        given.steps, given.made, given.reference = PROBED, 500, 1000
    return trained(given)


def trained(given: argparse.Namespace) -> int:
    """Train what is left of all arms and seeds, and tell what came out so far."""
    arms = chosen(given.arms)
    seeds = numbers(given.seeds)
    given.crowd = min(given.parallel, len(arms) * len(seeds))
    given.rounds = -(-len(arms) * len(seeds) // given.crowd)
    given.until = time.time() + 60 * given.minutes
    cells = [cell_of(given, arm, seed) for seed in seeds for arm in arms]
    began = time.monotonic()
    # A cell compiles, and torch remembers only so many programs for the same lines.
    how = how_of(given, given.output, fresh=compiles(given), threads=2)
    code = work_off_and_tell(__file__, cells, how, lambda: tell(cells, given), line)
    if given.probe:
        foretell(cells, given, time.monotonic() - began)
    return code


def line(found: Mapping[str, Any]) -> str:
    """A cell in a line."""
    return f"{found['score']['frechet']:.2f} after {found['seconds']:.0f} s"


def chosen(arms: str | None) -> list[str]:
    """The arms that are asked for."""
    try:
        return arms_of(arms, ARMS, ARMS)
    except ValueError as error:
        raise SystemExit(str(error)) from None


def cell_of(given: argparse.Namespace, arm: str, seed: int) -> Cell:
    """An arm with a seed, and what its process is told."""
    folder = given.output / ("probe" if given.probe else "runs") / f"{arm}-{seed}"
    told = ["train", "--data", given.data, "--output", str(folder), "--arms", arm, "--seeds", str(seed)]
    for name in ("steps", "made", "sample_steps", "batch", "workers", "reference", "limit", "crowd", "rounds", "until"):
        if getattr(given, name) is not None:
            told += [f"--{name.replace('_', '-')}", str(getattr(given, name))]
    told += ["--features", given.features, *(["--eager"] if given.eager else [])]
    return Cell.in_folder(f"{arm}, seed {seed}", folder, [*told, *again(given, "set", "model_arg")])


def cell(given: argparse.Namespace) -> None:
    """Train one arm with one seed, judge it, and write what came out."""
    if given.steps is None:
        given.steps = fitted(given)
    changes: dict[str, Any] = {
        "steps": given.steps,
        "eval_steps": given.steps,
        "save_every": 0,
        "seed": int(given.seeds),
        "workers": given.workers,
        "batch_size": given.batch,
        "made": given.made,
        "sample_steps": given.sample_steps,
        "features": given.features,
        "reference_limit": given.reference,
        "ema_decay": min(0.999, 1 - 10 / max(given.steps, 20)),  # or a short run's average is of its first weights
        "compile": compiles(given),
        "channels_last": False,
        "log_every": 100,
    }
    changes |= parse(given.set or [], Recipe, TASK.settings)
    setup = tasks.recipe_for("generate", MODEL, "small", **changes)
    data = TASK.open(given.data, TASK.settings())
    if given.limit:
        data = TASK.limited(data, given.limit)
    elif given.reference is None and (known := given.output.parent / reference_name(given)).is_file():
        data = dataclasses.replace(data, known=np.load(known))
    network = {**TASK.variant(MODEL, given.arms), **model_args(given)}
    began = time.monotonic()
    run = Run(MODEL, given.data, given.output, setup, network)
    result = train(run, data=data, progress=Lines(max(1, given.steps // 20)))
    found = {
        "arm": given.arms,
        "seed": int(given.seeds),
        "score": dict(result.score),
        "train_loss": result.records[-1].train_loss,
        "parameters": result.parameters,
        "images_per_second": result.per_second,
        "training_seconds": sum(record.seconds for record in result.records),
        "peak_memory": result.peak_memory,
        "seconds": time.monotonic() - began,
        "steps": given.steps,
        "recipe": setup.recipe.as_dict(),
        "settings": setup.settings.as_dict(),
        "around": network,
    }
    keep(given.output / "result.json", found)


def compiles(given: argparse.Namespace) -> bool:
    """Whether networks are compiled."""
    return torch.cuda.is_available() and not given.eager


def fitted(given: argparse.Namespace) -> int:
    """As many steps as the slowest of all cells can do in the time that is left."""
    pace = Pace(given.output.parent, given.crowd, given.rounds, given.until, judging=given.judging)
    return pace.steps(given.output.name, MOST_STEPS, lambda: seconds_of_a_step(given))


def seconds_of_a_step(given: argparse.Namespace) -> float:
    """What a training step takes on images that are drawn, with all that runs beside it."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    own = {"in_chans": SHAPE[0], "num_classes": CLASSES, "learn_sigma": False}
    network = make(MODEL, {**TASK.variant(MODEL, given.arms), **own, **model_args(given)}).to(device).train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=device.type == "cuda")
    flow, images = Flow(), torch.randn(given.batch, *SHAPE, device=device)
    labels = torch.arange(given.batch, device=device) % CLASSES

    def step() -> None:
        noise, times = torch.randn_like(images), flow.times(given.batch, device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = flow.losses(network(flow.noisy(images, noise, times), times, labels), images, noise, times).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return timed(step, lambda: synchronize(device))


def model_args(given: argparse.Namespace) -> dict[str, Any]:
    """What makes the network smaller, for trying the script out."""
    return parse_model_args(given.model_arg or [])


def tell(cells: Sequence[Cell], given: argparse.Namespace) -> str:
    """Write all that is done as JSON and as pictures, and give it as a table."""
    done = results(cells)
    about = {"machine": machine(), "parallel": given.parallel, "features": given.features, "cells": done}
    about |= {"losses": [found for one in cells if (found := losses_of(one.log))]}
    keep(given.output / ("probe.json" if given.probe else "generate.json"), about)
    pictures([one.result.parent for one in cells if one.is_done], given.output / "samples.png")
    name = "FID" if given.features == "inception" else "distance over random features"
    lines = [
        f"| arm | seeds | {name} | kernel distance x 1000 | precision | recall | loss | parameters | images/s, shared |"
    ]
    lines += ["|---|---|---|---|---|---|---|---|---|"]
    for arm in dict.fromkeys(found["arm"] for found in done):
        mine = [found for found in done if found["arm"] == arm]
        mean = {key: statistics.mean(found["score"][key] for found in mine) for key in mine[0]["score"]}
        lines.append(
            f"| {arm} | {len(mine)} | {mean['frechet']:.2f} | {1000 * mean['kernel']:.2f} | {mean['precision']:.3f} "
            f"| {mean['recall']:.3f} | {statistics.mean(found['train_loss'] for found in mine):.4f} "
            f"| {mine[0]['parameters'] / 1e6:.1f}M | {statistics.median(f['images_per_second'] for f in mine):.0f} |"
        )
    return "\n".join(lines)


def losses_of(log: Path) -> dict[str, Any] | None:
    """What a cell's log says of its loss, whether it came to its end or not; None if it says nothing."""
    found = LOSS.findall(log.read_text(errors="replace")) if log.is_file() else []
    arm, _, seed = log.stem.rpartition("-")
    if not found:
        return None
    return {"arm": arm, "seed": int(seed), "at": [int(at) for at, _ in found], "loss": [float(x) for _, x in found]}


def pictures(folders: Sequence[Path], path: Path) -> None:
    """The last pictures of every run, one beside the other, under the name of its arm."""
    found = [(one, sorted((one / "glimpses").glob("step-*.png"))) for one in folders]
    shown = [(one, Image.open(files[-1])) for one, files in found if files]
    if not shown:
        return
    # The first two pictures of each class: a grid has classes as rows and noises as columns.
    width = max(image.width for _, image in shown) // 4
    page = Image.new("RGB", (len(shown) * (width + 8), max(image.height for _, image in shown) + 16), "white")
    for number, (one, image) in enumerate(shown):
        page.paste(image.crop((0, 0, width, image.height)), (number * (width + 8), 16))
        ImageDraw.Draw(page).text((number * (width + 8) + 2, 2), one.name.rpartition("-")[0], fill="black")
    beside = path.with_suffix(".part")
    page.save(beside, "PNG")
    beside.replace(path)


def foretell(cells: Sequence[Cell], given: argparse.Namespace, seconds: float) -> None:
    """How long the whole would take, by what the probe took."""
    done = results(cells)
    if not done:
        return
    # All processes share the GPU, so the sum of their rates is what it does.
    rate = given.parallel * statistics.mean(found["images_per_second"] for found in done)
    overhead = statistics.mean(found["seconds"] - found["training_seconds"] for found in done)
    print(
        f"about {rate:.0f} training images/s by all together, compiling included; so a thousand steps of all "
        f"{len(cells)} cells take at most {1000 * given.batch * len(cells) / rate / 60:.1f} minutes, plus "
        f"{overhead:.0f} s for each round of {given.parallel} (start, {given.made} images made and judged); it took "
        f"{seconds:.0f} s"
    )


def speed(given: argparse.Namespace) -> int:
    """Images per second of the sampler and peak memory, each arm by itself on the GPU, in turns."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    arms, began = chosen(given.arms), time.monotonic()
    networks = {arm: ready(arm, given, device) for arm in arms}
    rows: dict[str, dict[str, Any]] = {arm: {"arm": arm, "images_per_second": []} for arm in arms}
    for turn in range(given.turns + 1):  # the first warms up
        for arm in arms:
            if time.monotonic() - began > 60 * given.minutes:
                print("the time is over", flush=True)
                return 1
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            seconds = sampled(networks[arm], given, device)
            if turn:
                rows[arm]["images_per_second"].append(given.speed_batch / seconds)
                rows[arm]["peak_gb"] = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
            print(f"turn {turn}: {arm} {given.speed_batch / seconds:.1f} images/s", flush=True)
            about = {"batch": given.speed_batch, "sampler": "euler", "steps": given.sample_steps, "guidance": 1.0}
            about |= {"compiled": not given.eager and device.type == "cuda", "dtype": "bfloat16", "tokens": 256}
            keep(given.output / "speed.json", {"machine": machine(), **about, "rows": list(rows.values())})
    lines = ["| arm | images/s, median | GB |", "|---|---|---|"]
    for row in rows.values():
        lines.append(
            f"| {row['arm']} | {statistics.median(row['images_per_second']):.1f} | {row['peak_gb'] or 0:.2f} |"
        )
    print("\n".join(lines))
    return 0


@torch.no_grad()
def check(given: argparse.Namespace) -> int:
    """The distance of the test images from the training images, by the code that judges networks."""
    device, began = torch.device("cuda" if torch.cuda.is_available() else "cpu"), time.monotonic()
    data = TASK.open(given.data, TASK.settings())
    network = features_of(given.features, SHAPE[0], device)
    batching = Batching(250, SHAPE[1:], mean=(0.5,) * 3, std=(0.5,) * 3)
    halves = [
        torch.cat([network(part.to(device)) for part in some(half, batching, given.reference, 250)])
        for half in (data.train, data.test)
    ]
    if given.reference is None:  # cells that come later need not compute them again
        place = given.output / "runs"
        place.mkdir(exist_ok=True)
        np.save(place / "part.npy", halves[0].cpu().numpy())
        (place / "part.npy").replace(place / reference_name(given))
    found = {
        "features": given.features,
        "images": [len(half) for half in halves],
        "frechet": metrics.frechet(*map(metrics.moments, halves)),
        "kernel": metrics.kernel_distance(halves[0][: len(halves[1])], halves[1]),
        "precision_recall": metrics.precision_recall(halves[0][: len(halves[1])], halves[1]),
        "seconds": time.monotonic() - began,
        "machine": machine(),
    }
    print(json.dumps(found))
    keep(given.output / "check.json", found)
    return 0


def reference_name(given: argparse.Namespace) -> str:
    """The file with the features of all training images, beside the runs."""
    return f"reference-{given.features}.npy"


def ready(arm: str, given: argparse.Namespace, device: torch.device) -> nn.Module:
    """An arm's network, compiled unless told otherwise; its weights do not matter here."""
    own = {"in_chans": SHAPE[0], "num_classes": CLASSES, "learn_sigma": False}
    made = make(MODEL, {**TASK.variant(MODEL, arm), **own, **model_args(given)}).to(device).eval()
    made.to(torch.bfloat16)
    if not given.eager and device.type == "cuda":
        torch._dynamo.config.recompile_limit = 256  # every arm is another program for the same lines
        for block in made.get_submodule("blocks").children():  # which all have the same
            block.compile(dynamic=False)
    return made


@torch.no_grad()
def sampled(network: nn.Module, given: argparse.Namespace, device: torch.device) -> float:
    """Seconds of the whole sampler for one batch, from noise to images."""
    noise = torch.randn(given.speed_batch, *SHAPE, device=device)
    labels = torch.arange(given.speed_batch, device=device) % CLASSES

    def ask(x: Tensor, times: Tensor, told: Tensor) -> Tensor:
        return network(x.to(torch.bfloat16), times, told)

    return seconds_of(lambda: sample(ask, Flow(), Way("euler", given.sample_steps), noise, labels), device)


def arguments() -> argparse.ArgumentParser:
    """What can be asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "speed", "check"))
    parser.add_argument("--data", default="cifar-10", help="folder of CIFAR-10 in its binary or its Python layout")
    parser.add_argument("--output", type=Path, default=Path("outputs"))
    parser.add_argument("--arms", help=f"some of {', '.join(ARMS)}, with commas; all unless told")
    add_options(parser, parallel=4, workers=2, minutes=9.0, seeds="0")
    parser.add_argument("--steps", type=int, help="of every cell; as many as there is time for unless told")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--made", type=int, default=10_000, help="images that are made to be judged")
    parser.add_argument("--sample-steps", type=int, default=50, help="Euler's, for each of them")
    parser.add_argument("--features", default="inception", choices=("inception", "random"))
    parser.add_argument("--reference", type=int, help="training images they are compared with; all unless told")
    parser.add_argument("--limit", type=int, help="training images at most, for trying the script out")
    parser.add_argument("--judging", type=float, default=40.0, help="seconds that making and judging images takes")
    parser.add_argument("--crowd", type=int, default=1, help="of a cell: how many run at a time")
    parser.add_argument("--rounds", type=int, default=1, help="of a cell: how many come one after the other")
    parser.add_argument("--until", type=float, default=math.inf, help="of a cell: when to stop, in seconds since 1970")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument(
        "--probe", action="store_true", help=f"{PROBED} steps of every arm, and how long the whole takes"
    )
    parser.add_argument("--speed-batch", type=int, default=512)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--model-arg", action="append", help="of the network: name=value")
    return parser


if __name__ == "__main__":
    sys.exit(main())
