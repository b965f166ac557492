"""The evidence for generation: DiT-S/2 on CIFAR-10 in pixels, by mechanism, on one GPU, within a given time.

    export AFFINEAR_INCEPTION=inception.safetensors        # see evidence/packing/pack_inception.py
    PYTHONPATH=src python evidence/generate.py --data sheets --output outputs --minutes 60

trains every arm with every seed that is not there yet, one after the other, all by the same recipe and for as many
steps, on the sheets that `evidence/packing/pack_cifar10.py` wrote, as many of them as there are, and judges the
averaged weights: FID, kernel distance, precision, recall. A step is one CUDA graph over images that lie on the device,
and so is one of Euler's from noise to images. Without `--steps` there are as many as the first seed of all arms
together can do in `--minutes`, found out in the beginning and kept in `state/plan.json`; arms at the end are left out
where that is less than `--least`. A cell writes `cells/NAME.json` and a picture when it is done, and `generate.json`
and `samples.png` hold all of them. When the time is over nothing new is begun, and the same command goes on. `--probe`
times a few steps of every arm.

Features of real images are computed once, and so is what is known of their distance: that of the last sheet from the
others, `check.json`; between test and training images it is about 3.2.

All seven arms fit into three calls of

    PYTHONPATH=src python evidence/generate.py --data sheets --output outputs --steps 3000 --made 5000 --minutes 9

A step is a graph in bfloat16, so the host has nothing to do with it: beside other trainings on an H200 one took 39 ms
without attention, 43 with MALA and 40 to 60 with softmax, by how many they were. Alone they were not timed.

In all arms convolution, gate and positions are the same; one of them has no attention.
"""

from __future__ import annotations

import argparse
import copy
import functools
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn

import affinear.models  # noqa: F401  # pyright: ignore[reportUnusedImport]  # registers the names
from affinear.bench.timing import synchronize
from affinear.models.making import make
from affinear.tasks.generate import TASK, metrics
from affinear.tasks.generate.drawing import as_bytes, grid
from affinear.tasks.generate.features import features_of
from affinear.tasks.generate.process import STEPS, Flow
from affinear.train import Recipe
from affinear.train.spelling import parse_model_args
from packing.pack_cifar10 import TEST, pictures_of
from pages.words import shown, table
from running.captured import Captured
from running.cells import Cell, results
from running.files import keep
from running.in_order import Doing, do_in_order
from running.learning import PART, Learner, half, learn, step_seconds_of
from running.machine import machine
from running.options import arms_of, numbers
from running.pacing import Room, planned

MODEL = "dit_s_2"
ARMS = ("softmax", "mala", "none", "linear", "nala", "inline", "mala_released")
SHAPE, CLASSES = (3, 32, 32), 10
UNTOLD, FLIPPED = 0.1, 0.5  # shares of images whose class is not told, and that are mirrored
BESIDE = 20.0  # seconds of a cell beside its steps: a network, graphs, images, and their features
JUDGED_AT_ONCE = 500  # images whose features are computed together
SHOWN = 2 * CLASSES  # images of a cell's picture
RECIPE = Recipe(lr=5e-4, min_lr=1e-5, weight_decay=0.0, warmup_lr=1e-6, clip_grad=1.0)


@dataclass(frozen=True, eq=False)
class Pictures:
    """Images and classes on the device.

    Attributes:
        images: (N, 3, 32, 32), uint8.
        classes: (N,), int64.
        sheets: How many images each sheet holds.
    """

    images: Tensor
    classes: Tensor
    sheets: tuple[int, ...]

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.images.device


@dataclass(frozen=True, eq=False)
class Real:
    """What is compared with.

    Attributes:
        moments: Of all real images.
        some: Features (M, D) of some, evenly among them.
    """

    moments: metrics.Moments
    some: Tensor


@functools.cache
def opened(folder: Path, limit: int | None) -> Pictures:
    """All sheets of training images in a folder, once for all cells of a process."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    sheets = sorted(path for path in folder.glob("*.webp") if path.stem != TEST)
    if not sheets:
        raise ValueError(f"--data: expected sheets of CIFAR-10 in {folder}, as evidence/packing/pack_cifar10.py writes")
    parts = [pictures_of([path]) for path in sheets]
    images, classes = (torch.cat([torch.from_numpy(part[i][:limit]) for part in parts]).to(device) for i in (0, 1))
    return Pictures(images, classes, tuple(len(part[1][:limit]) for part in parts))


# ------------------------------------------------------------------------------------------------ learning


def network_of(arm: str, given: argparse.Namespace) -> nn.Module:
    """An arm's network, with fresh weights."""
    own = {"in_chans": SHAPE[0], "num_classes": CLASSES, "learn_sigma": False}
    return make(MODEL, {**TASK.variant(MODEL, arm), **own, **parse_model_args(given.model_arg or [])})


def recipe_of(steps: int, batch: int, seed: int) -> Recipe:
    """How a network is trained in so many steps."""
    average = min(0.999, 1 - 10 / max(steps, 20))  # or a short run's average is of its first weights
    return RECIPE.changed(
        steps=steps, batch_size=batch, warmup_steps=min(500, steps // 10), ema_decay=average, seed=seed
    )


def learner_of(arm: str, seed: int, steps: int, pictures: Pictures, given: argparse.Namespace) -> Learner:
    """A network that learns to draw; images, noise and times are the same in all arms."""
    torch.manual_seed(seed)
    device, flow = pictures.device, Flow()
    network = network_of(arm, given).to(device)
    order, flips, untold = draws(len(pictures.images), steps, given.batch, seed, device)
    torch.manual_seed(seed)  # again: arms have drawn weights of different sizes

    def loss(at: Tensor) -> Tensor:
        chosen, mirrored, hidden = (one.index_select(0, at)[0] for one in (order, flips, untold))
        images = pictures.images[chosen].float() / 127.5 - 1
        images = torch.where(mirrored[:, None, None, None], images.flip(3), images)
        labels = pictures.classes[chosen].masked_fill(hidden, CLASSES)
        noise, times = torch.randn_like(images), flow.times(len(images), device)
        with half(device):
            told = network(flow.noisy(images, noise, times), times, labels)
        return flow.losses(told, images, noise, times).mean()

    return Learner(network, recipe_of(steps, given.batch, seed), loss, device)


def draws(count: int, steps: int, batch: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers of images (steps, batch), every one as often as any other; which are mirrored, and whose class is hid."""
    random = torch.Generator().manual_seed(seed)
    wanted = steps * batch
    order = torch.cat([torch.randperm(count, generator=random) for _ in range(-(-wanted // count))])[:wanted]
    flips, untold = (torch.rand(steps, batch, generator=random) < share for share in (FLIPPED, UNTOLD))
    return order.view(steps, batch).to(device), flips.to(device), untold.to(device)


# ------------------------------------------------------------------------------------------------ drawing


class Sampler:
    """Euler's steps from noise to images, a batch at a time; a step is one CUDA graph.

    Args:
        network: That was trained; it is asked in bfloat16 on a GPU.
        batch: Images at a time.
        steps: Of Euler's.
        device: Where.
    """

    def __init__(self, network: nn.Module, batch: int, steps: int, device: torch.device) -> None:
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.network, self.steps = copy.deepcopy(network).to(self.dtype).eval(), steps
        times = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
        self.times, self.lengths = (x.float().to(device) for x in (STEPS * times[:-1], times[1:] - times[:-1]))
        self.at = torch.zeros(1, dtype=torch.long, device=device)
        self.x = torch.zeros(batch, *SHAPE, device=device)
        self.labels = torch.arange(batch, device=device) % CLASSES
        self.call = Captured(self._step, device, eager=3)

    @torch.no_grad()
    def _step(self) -> None:
        times = self.times.index_select(0, self.at).expand(len(self.x))
        told = self.network(self.x.to(self.dtype), times, self.labels)
        self.x += self.lengths.index_select(0, self.at) * told.float()
        self.at += 1

    def __call__(self, noise: Tensor) -> Tensor:
        """Images (B, 3, 32, 32), uint8, that are made of noise; classes come in turns."""
        self.x.copy_(noise)
        self.at.zero_()
        for _ in range(self.steps):
            self.call()
        return as_bytes(self.x)


def drawn(network: nn.Module, count: int, given: argparse.Namespace, device: torch.device) -> tuple[Tensor, float]:
    """So many images (N, 3, 32, 32), uint8, the same noise in all arms; and how many a second after the first batch."""
    batch = min(given.sample_batch, count)
    sampler, found = Sampler(network, batch, given.sample_steps, device), list[Tensor]()
    random = torch.Generator(device).manual_seed(0)
    began, rest = time.time(), 0
    while sum(map(len, found)) < count:
        found.append(sampler(torch.randn(batch, *SHAPE, device=device, generator=random)))
        if len(found) == 1:
            synchronize(device)
            began = time.time()
        else:
            rest += batch
    synchronize(device)
    return torch.cat(found)[:count], rest / (time.time() - began)


# ------------------------------------------------------------------------------------------------ judging


class Judge:
    """Distances of images from the real ones.

    Args:
        pictures: The real ones.
        name: Of the features.
        folder: Where what is known of the real ones is kept for other processes, and `check.json` beside it.
        count: Real images that some of the distances are of.
    """

    def __init__(self, pictures: Pictures, name: str, folder: Path, count: int) -> None:
        self.network = features_of(name, SHAPE[0], pictures.device)
        kept = folder / f"real-{name}-{len(pictures.images)}-{count}.pt"
        if not kept.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            features = self.features(pictures.images)
            keep(folder.parent / "check.json", known(features, pictures.sheets, name))
            exact, some = metrics.moments(features), torch.linspace(0, len(features) - 1, min(count, len(features)))
            chosen = features[some.long().to(features.device)]
            torch.save([exact.mean.cpu(), exact.covariance.cpu(), chosen.cpu()], kept.with_suffix(".part"))
            kept.with_suffix(".part").replace(kept)
        mean, covariance, some = torch.load(kept, weights_only=True)
        self.real = Real(metrics.Moments(mean, covariance), some.to(pictures.device))

    @torch.no_grad()
    def features(self, images: Tensor) -> Tensor:
        """Features (N, D) of images, uint8."""
        return torch.cat([self.network(part) for part in images.split(JUDGED_AT_ONCE)])

    def __call__(self, made: Tensor) -> dict[str, float]:
        """All distances of images that were made."""
        features, some = self.features(made), self.real.some
        precision, recall = metrics.precision_recall(some, features)
        return {
            "frechet": metrics.frechet(self.real.moments, on_the_host(metrics.moments(features))),
            "kernel": metrics.kernel_distance(some, features),
            "precision": precision,
            "recall": recall,
        }


def known(features: Tensor, sheets: Sequence[int], name: str) -> dict[str, Any]:
    """How far the real images of the last sheet are from those of the others."""
    if len(sheets) < 2:
        return {}
    others, last = features.split([sum(sheets[:-1]), sheets[-1]])
    one, other = (on_the_host(metrics.moments(half)) for half in (others, last))
    kernel = metrics.kernel_distance(others[: len(last)], last)
    found = {"features": name, "images": [len(others), len(last)], "frechet": metrics.frechet(one, other)}
    return {**found, "kernel": kernel, "machine": machine()}


def on_the_host(moments: metrics.Moments) -> metrics.Moments:
    """Where roots of large matrices take seconds, whatever the GPU."""
    return metrics.Moments(moments.mean.cpu(), moments.covariance.cpu())


@functools.cache
def judge_of(data: Path, limit: int | None, name: str, folder: Path, count: int) -> Judge:
    """What judges, once for all cells of a process."""
    return Judge(opened(data, limit), name, folder, count)


# ------------------------------------------------------------------------------------------------ cells


def cell(given: argparse.Namespace) -> None:
    """Train one arm with one seed, judge it, and write what came out; nothing if the time was over before."""
    arm, _, seed = cast(str, given.cell).rpartition("-")
    pictures = opened(given.data, given.limit)
    judge = judge_of(given.data, given.limit, given.features, given.output / "state", given.made)
    steps: int = given.steps
    learner = learner_of(arm, int(seed), steps, pictures, given)
    pace = learn(learner, lambda said: print(said, flush=True), until=given.until)
    if pace.steps < steps:
        print(f"the time was over after {pace.steps} of {steps} steps", flush=True)
        return
    began = time.time()
    made, rate = drawn(learner.network, given.made, given, pictures.device)
    print(f"{time.time() - began:.1f} s: {len(made)} images are made", flush=True)
    (given.output / "cells").mkdir(exist_ok=True)
    grid(made[:SHOWN], CLASSES).save(given.output / "cells" / f"{given.cell}.png")
    score = judge(made)
    print(f"{time.time() - began:.1f} s: and judged", flush=True)
    settings = {"made": given.made, "sample_steps": given.sample_steps, "features": given.features}
    found = {
        "arm": arm,
        "seed": int(seed),
        "steps": steps,
        "images": len(pictures.images),
        "score": score,
        "losses": pace.losses,
        "parameters": sum(p.numel() for p in learner.network.parameters()),
        "step_ms": 1e3 * pace.step_seconds,
        "graph": not pace.why,
        "seconds": pace.seconds,
        "peak_memory": pace.peak,
        "made_per_second": rate,
        "judging_seconds": time.time() - began,
        "recipe": learner.recipe.as_dict(),
        "settings": settings,
        "model_args": parse_model_args(given.model_arg or []),
    }
    keep(given.output / "cells" / f"{given.cell}.json", found)


def seconds_of(given: argparse.Namespace, arm: str) -> float:
    """Of a step of an arm."""
    learner = learner_of(arm, 0, 40, opened(given.data, given.limit), given)
    return step_seconds_of(learner, building=14, timed=16)


def cells_of(given: argparse.Namespace, arms: Sequence[str], steps: int, until: float) -> list[Cell]:
    """Every arm with every seed."""
    told = (*sys.argv[1:], "--steps", str(steps), "--until", str(until), "--cell")
    folder = given.output / "cells"
    return [Cell.in_files(f"{arm}-{seed}", folder, told) for seed in numbers(given.seeds) for arm in arms]


def chosen(arms: str | None) -> list[str]:
    """The arms that are asked for."""
    try:
        return arms_of(arms, ARMS, ARMS)
    except ValueError as error:
        raise SystemExit(str(error)) from None


def line(found: Mapping[str, Any]) -> str:
    """A cell in a line."""
    return (
        f"{found['score']['frechet']:.2f} after {found['steps']} steps of {found['step_ms']:.1f} ms; judged in "
        f"{found['judging_seconds']:.0f} s, {found['made_per_second']:.0f} images/s"
    )


def tell(cells: Sequence[Cell], given: argparse.Namespace) -> str:
    """Write all that is done as JSON and as pictures, and give it as a table."""
    done = results(cells)
    losses = [
        {"arm": one["arm"], "seed": one["seed"], "loss": one["losses"], "at": _parts(one["steps"])} for one in done
    ]
    about = {"machine": machine(), "features": given.features, "cells": done, "losses": losses}
    keep(given.output / "generate.json", about)
    pictures([one.result.with_suffix(".png") for one in cells if one.is_done], given.output / "samples.png")
    rows: list[list[str]] = []
    for arm in dict.fromkeys(found["arm"] for found in done):
        mine = [found for found in done if found["arm"] == arm]
        forms = {"frechet": ".2f", "kernel": ".4f", "precision": ".3f", "recall": ".3f"}
        scores = [shown([found["score"][name] for found in mine], form) for name, form in forms.items()]
        rows.append([arm, str(len(mine)), *scores, shown([found["made_per_second"] for found in mine], ".0f")])
    name = "FID" if given.features == "inception" else "distance over random features"
    return table(("arm", "seeds", name, "kernel distance", "precision", "recall", "images made/s"), rows)


def _parts(steps: int) -> list[int]:
    """The last step of each part that a loss is the mean of."""
    return [*range(PART, steps, PART), steps]


def pictures(files: Sequence[Path], path: Path) -> None:
    """The pictures of all cells, one below the other, under their names."""
    found = [(file, Image.open(file)) for file in files if file.is_file()]
    if not found:
        return
    height = max(image.height for _, image in found) + 16
    page = Image.new("RGB", (max(image.width for _, image in found), height * len(found)), "white")
    for number, (file, image) in enumerate(found):
        page.paste(image, (0, number * height + 16))
        ImageDraw.Draw(page).text((2, number * height + 2), file.stem, fill="black")
    beside = path.with_suffix(".part")
    page.save(beside, "PNG")
    beside.replace(path)


def main() -> int:
    """Train what is left of all arms and seeds, and tell what came out so far; 1 if something is left to do."""
    given = parsed(sys.argv[1:])
    given.output.mkdir(parents=True, exist_ok=True)
    if given.probe:
        for arm in chosen(given.arms):
            began = time.time()
            print(f"{arm}: {1e3 * seconds_of(given, arm):.1f} ms a step", end=", ", flush=True)
            print(f"all of it {time.time() - began:.0f} s", flush=True)
        return 0
    return train_all(given)


def train_all(given: argparse.Namespace) -> int:
    """Train and judge what is left in this process; 1 if something is left to do."""
    until, arms, steps = time.time() + 60 * given.minutes, chosen(given.arms), given.steps
    cells: list[Cell] = []

    def told(one: Cell) -> str:
        found = one.read()
        tell(cells, given)
        return line(found) if found else "not done in time"

    judge_of(given.data, given.limit, given.features, given.output / "state", given.made)  # is as long for any plan
    if steps is None:
        room = Room(until, BESIDE, given.least)
        plan = planned(given.output / "state", arms, room, lambda arm: seconds_of(given, arm))
        arms, steps = plan.arms, plan.steps
    cells += cells_of(given, arms, steps, until)
    left = do_in_order(cells, Doing(lambda words: cell(parsed(words)), told), until)
    print(tell(cells, given))
    return int(bool(left))


def parsed(told: Sequence[str]) -> argparse.Namespace:
    """What the command line says."""
    return arguments().parse_args(told)


def arguments() -> argparse.ArgumentParser:
    """What can be asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="what evidence/packing/pack_cifar10.py wrote")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--arms", help=f"some of {', '.join(ARMS)}, with commas; all unless told")
    parser.add_argument("--seeds", default="0", help="which, with commas")
    parser.add_argument("--minutes", type=float, default=9, help="in which all that is left is done")
    parser.add_argument("--steps", type=int, help="of every cell; as many as there is time for unless told")
    parser.add_argument("--least", type=int, default=2, help="steps that all arms should have: the last are left out")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--made", type=int, default=10_000, help="images that are made to be judged")
    parser.add_argument("--sample-steps", type=int, default=25, help="Euler's, for each of them")
    parser.add_argument("--sample-batch", type=int, default=1000, help="images that are made at a time")
    parser.add_argument("--features", default="inception", choices=("inception", "random"))
    parser.add_argument("--limit", type=int, help="images of a sheet at most, for trying the script out")
    parser.add_argument("--model-arg", action="append", help="of the network: name=value, for trying the script out")
    parser.add_argument("--probe", action="store_true", help="time some steps of every arm, and stop")
    parser.add_argument("--cell", help="one cell, in this process")
    parser.add_argument("--until", type=float, default=math.inf, help="of --cell: when to stop, in seconds since 1970")
    return parser


if __name__ == "__main__":
    sys.exit(main())
