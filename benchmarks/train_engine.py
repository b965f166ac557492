"""What the engine costs: its images per second beside a loop written by hand, and its loader beside bare decoding.

Usage:
    python benchmarks/train_engine.py [--model inline_deit_tiny] [--size 64] [--batch 64] [--output FILE.json]

Both loops train the same network on the same synthetic tensors, in turns, in one run: forward, backward, clipping,
AdamW, learning rate. Then JPEGs of 224 pixels a side are read by the training loader, with as many workers as there are
cores, and by as many processes that do no more than PIL's part of the work.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.optim import create_optimizer_v2
from torch import nn
from torch.nn import functional as F

from affinear.bench import machine
from affinear.tasks.classify import TASK, ClassifySettings, recipe_for
from affinear.tasks.classify import network as networks
from affinear.tasks.classify.data import ArraySource, Augment, Batching, Images, Skipped, open_data, train_loader
from affinear.train import Run
from affinear.train.devices import accelerated, device
from affinear.train.engine import ready, settled
from affinear.train.kit import build, make_schedule
from affinear.train.stepping import Stepper
from affinear.train.task import Job

BAR = 0.95
CLASSES = 100
SIDE = 224


def main() -> None:
    """Measure, print, and save if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="inline_deit_tiny", help="The network.")
    parser.add_argument("--size", type=int, default=64, help="Side of the synthetic images.")
    parser.add_argument("--batch", type=int, default=64, help="Images of one step.")
    parser.add_argument("--rounds", type=int, default=9, help="Turns of each loop.")
    parser.add_argument("--steps", type=int, default=5, help="Steps of one turn.")
    parser.add_argument("--no-compile", action="store_true", help="Compile neither.")
    parser.add_argument("--images", type=int, default=600, help="JPEGs to read; 0 leaves that part out.")
    parser.add_argument("--output", type=Path, help="Where to save the numbers: .json.")
    asked = parser.parse_args()
    found: dict[str, Any] = {
        "machine": machine.describe(device()),
        "asked": {k: str(v) for k, v in vars(asked).items()},
    }
    found["engine"] = engine_against_bare(asked)
    if asked.images:
        found["loader"] = loader_against_decoding(asked.images)
    if asked.output is not None:
        asked.output.write_text(json.dumps(found, indent=2), encoding="utf-8")


def engine_against_bare(asked: argparse.Namespace) -> dict[str, Any]:
    """Images per second of both loops, in turns."""
    count, size = asked.batch, asked.size
    pixels = np.random.default_rng(0).integers(0, 256, (count, 3, size, size), dtype=np.uint8)
    source = ArraySource("synthetic", pixels, np.arange(count) % CLASSES)
    images = Images("synthetic", source, source, tuple(map(str, range(CLASSES))), (size, size), 3)
    setup = recipe_for(asked.model, "tiny", epochs=1000, batch_size=count, image_size=(size, size), workers=0)
    if asked.no_compile:
        setup = setup.changed(compile=False)
    job = settled(Run(asked.model, "synthetic", Path("nowhere"), setup), images)
    with accelerated(job.recipe) as accelerator:
        kit = build(accelerator, TASK, job, images)
        stepper, number = Stepper(kit), itertools.count()
        kit.called.train()
        batch = next(ready(kit.train_batches, kit.work))
        bare = bare_step(job, batch)
        turns = {"engine": lambda: stepper.step(itertools.repeat(batch), next(number)), "bare": bare}
        times: dict[str, list[float]] = {name: [] for name in turns}
        for turn in range(asked.rounds + 2):
            for name, step in turns.items():
                seconds = timed(step, asked.steps, accelerator.device)
                if turn >= 2:  # compilation, caches, cuDNN's trials
                    times[name].append(seconds / asked.steps)
    rates = {name: count / statistics.median(seconds) for name, seconds in times.items()}
    # Each turn's ratio is of neighbours in time, so whatever slows the machine slows both.
    ratio = statistics.median(b / e for e, b in zip(times["engine"], times["bare"], strict=True))
    print(f"engine {rates['engine']:,.1f} images/s, bare loop {rates['bare']:,.1f} images/s: {ratio:.1%} of it")
    print(f"bar: at least {BAR:.0%}: {'met' if ratio >= BAR else 'missed'}")
    return {"images_per_second": rates, "ratio": ratio, "bar": BAR, "met": ratio >= BAR, "seconds": times}


def bare_step(job: Job[ClassifySettings], batch: tuple[torch.Tensor, torch.Tensor]) -> Callable[[], Any]:
    """A step as one would write it without an engine."""
    (images, targets), recipe = batch, job.recipe
    network = networks.create(job).to(images.device).train()
    if recipe.channels_last:
        network.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        images = images.contiguous(memory_format=torch.channels_last)
    called = torch.compile(network, dynamic=False) if recipe.compile else network
    optimizer = create_optimizer_v2(network, "adamw", recipe.lr, recipe.weight_decay)
    schedule, number = make_schedule(optimizer, recipe, 1), itertools.count(1)

    def step() -> None:
        with torch.autocast(images.device.type, torch.bfloat16, enabled=recipe.precision == "bf16"):
            logits = called(images)
        loss = F.cross_entropy(logits.float(), targets, label_smoothing=job.settings.smoothing)
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), recipe.clip_grad or 1e9)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step_update(next(number))

    return step


def timed(step: Callable[[], Any], times: int, on: torch.device) -> float:
    """Seconds of so many steps."""
    if on.type == "cuda":
        torch.cuda.synchronize(on)
    began = time.perf_counter()
    for _ in range(times):
        step()
    if on.type == "cuda":
        torch.cuda.synchronize(on)
    return time.perf_counter() - began


def loader_against_decoding(count: int) -> dict[str, Any]:
    """Images per second of the loader, plain and cropped at random, beside processes that only use PIL."""
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder, multiprocessing.Pool(cores) as pool:
        paths = write_photos(Path(folder), count)
        images = open_data(folder)
        found: dict[str, Any] = {"cores": cores}
        for name, augment, work in (
            ("decoded", Augment(kind="none"), decode),
            ("cropped", Augment(kind="timm", color_jitter=None), crop),
        ):
            batching = Batching(32, (SIDE, SIDE), augment=augment, workers=cores)
            loader = train_loader(images, batching, Skipped())
            loaded, bare = list[float](), list[float]()
            for _ in range(4):  # the first is not counted: workers start, files come into memory
                began = time.perf_counter()
                seen = sum(len(targets) for _, targets in loader)
                loaded.append(seen / (time.perf_counter() - began))
                began = time.perf_counter()
                pool.map(work, paths, chunksize=32)
                bare.append(count / (time.perf_counter() - began))
            rates = {"loader": statistics.median(loaded[1:]), "bare": statistics.median(bare[1:])}
            print(
                f"{name}, {cores} cores: {rates['loader']:,.0f} JPEGs/s in batches, {rates['bare']:,.0f} by PIL alone"
            )
            found[name] = {**rates, "ratio": rates["loader"] / rates["bare"]}
    return found


def write_photos(folder: Path, count: int) -> list[str]:
    """JPEGs about as hard to decode as photos: smooth shapes with some grain, in train/ and val/."""
    draw = np.random.default_rng(0)
    paths: list[str] = []
    for number in range(count + 4):
        half = "train" if number < count else "val"
        place = folder / half / f"class {number % 2}"
        place.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(draw.integers(0, 256, (9, 9, 3), dtype=np.uint8)).resize(
            (SIDE, SIDE), Image.Resampling.BICUBIC
        )
        grain = np.asarray(coarse, np.int16) + draw.integers(-12, 13, (SIDE, SIDE, 3))
        path = place / f"{number}.jpg"
        Image.fromarray(np.clip(grain, 0, 255).astype(np.uint8)).save(path, quality=90)
        if half == "train":
            paths.append(str(path))
    return paths


def decode(path: str) -> None:
    """Decode, and nothing else."""
    with Image.open(path) as image:
        image.convert("RGB")


def crop(path: str) -> None:
    """Decode, and resize a part of the image, as random crops do on average."""
    with Image.open(path) as image:
        whole = image.convert("RGB")
    whole.resize((SIDE, SIDE), Image.Resampling.BICUBIC, box=(30, 30, 190, 190))


if __name__ == "__main__":
    main()
