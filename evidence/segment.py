"""The evidence for segmentation: CamVid from fresh weights, and what UperNet costs, on one GPU, within a given time.

    PYTHONPATH=src python evidence/segment.py choose --data camvid --output outputs --minutes 5
    PYTHONPATH=src python evidence/segment.py camvid --data camvid --output outputs --minutes 8
    PYTHONPATH=src python evidence/segment.py alone --output outputs
    PYTHONPATH=src python evidence/segment.py upernet --output outputs
    PYTHONPATH=src python evidence/segment.py growth --output outputs
    PYTHONPATH=src python evidence/segment.py counted --output outputs
    PYTHONPATH=src python evidence/segment.py page --output outputs --page results/segmentation

`choose` trains `mavit_tiny` by the small recipe and variants of it, judges them by the validation photos, and writes
the best one to `chosen.json`, which `camvid` then takes for all arms; without that file it takes the recipe as it is.
`camvid` trains every arm with every seed that is not trained yet by the small recipe, two processes at a time, each
of which does run after run, all by the same settings, and judges them on the test photos: all arms with the first seed,
then `mavit_tiny` with the others, then the rest. It writes `camvid.json` after each. `--steps` says how many;
`--longer mavit_tiny` trains that one beside them until the time is over, and is judged as it is then; what else runs
then is begun anew by the same command. `--steps 2 --parallel 1` is a trial. `alone` measures each arm by itself: images per
second and memory of a training step, parameters and multiply-adds. `upernet` does so for UperNet at 512 x 2048, two
images at a time. `growth` takes one image through forward and backward of a backbone, from 512 x 512 up to 4096 x 4096,
and `counted` counts what is kept for backward, which needs no GPU. All write after every row. `page` writes the page
about all of it.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import timm
import torch
from timm.optim import create_optimizer_v2
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from affinear import tasks
from affinear.bench.timing import synchronize
from affinear.models.catalogue import count_macs
from affinear.models.heads import Segmenter
from affinear.tasks.segment.drawing import map_file
from affinear.tasks.segment.opening import open_scenes
from affinear.tasks.segment.pairs import Scenes
from affinear.tasks.segment.settings import Segmentation
from affinear.tasks.segment.work import pixel_loss
from affinear.train import Recipe
from affinear.train.settings import parse_size
from affinear.train.spelling import parse
from affinear.train.task import Job
from packing.pack_scenes import ABOUT
from pages.segmentation import by_arm, miou, written
from running.cells import Cell, is_worker, results, serve, work_off
from running.crops import Kept, kept
from running.files import keep
from running.kept import left_behind
from running.learning import learn
from running.machine import machine
from running.options import add_options, arms_of, how_of, numbers, without_traceback
from running.scenes import judge, learner_of
from running.steps import step_seconds
from running.telling import work_off_and_tell

LINEAR, SWIN = "mavit_tiny_linear", "swin_tiny_patch4_window7_224"
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "mavit_tiny": ("mavit_tiny", {}),
    "mavit_tiny_linear": (LINEAR, {}),
    "around softmax": (LINEAR, {"mechanism": "softmax"}),
    "around linear": (LINEAR, {"mechanism": "linear"}),
    "around none": (LINEAR, {"mechanism": "none"}),
    "swin_tiny": (SWIN, {}),
    "resnet50": ("resnet50", {}),
    "around mala": (LINEAR, {"mechanism": "mala"}),
}
USUAL = tuple(ARMS)[:7]
OWN: dict[str, Any] = {"crop": "288x384", "balance": 0.5, "memory": True}
VARIANTS: dict[str, tuple[str, ...]] = {  # to be chosen from by validation photos
    "as it is": (),
    "shrunk": ("short_side=240", "crop=192x256"),
    "wider": ("zoom=0.6,2.0", "drop_path=0.1"),
    "unbalanced": ("balance=0",),
}
TRIED = "mavit_tiny"  # the arm that they are tried with
ALONE, BATCH, CLASSES = (352, 480), 16, 11  # whole photos
SHOWN = ("mavit_tiny", 0)  # the run whose maps are kept
JUDGING = 30.0  # seconds that are kept for judging what learns until the time is over
MOST = 20_000  # steps that it can take
PHOTOS = 6  # how many of them, evenly among the test photos
UPERNETS = {"mavit_small_linear": {}, "mavit_small": {}, "swin_small_patch4_window7_224": {}}
WIDE, WIDE_BATCH, WIDE_CLASSES = (512, 2048), 2, 150
PARTS = ("choose", "camvid", "alone", "upernet", "growth", "counted", "page")
GROWING = (512, 768, 1024, 1536, 2048, 3072, 4096)  # pixels a side
PATIENCE = 4.0  # seconds that a pass may take before larger images are left out


@dataclass(frozen=True)
class Training:
    """One arm with one seed.

    Attributes:
        arm: Its name.
        seed: Of everything random.
        folder: Where its run is.
        changes: Of the recipe.
        longer: Whether it learns until the time is over, its rate going down with the time.
    """

    arm: str
    seed: int
    folder: Path
    changes: tuple[str, ...] = ()
    longer: bool = False

    @property
    def result(self) -> Path:
        """The file that is there when it is done."""
        return self.folder.with_name(f"{self.folder.name}.json")


def main() -> int:
    """Do what is asked; 1 if something is left to do."""
    if is_worker():
        return serve(lambda told: cell(arguments().parse_args(told)))
    given = arguments().parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    if given.what in (["camvid"], ["choose"]):
        return trained(given)
    if given.what == ["page"]:
        print(written(given.page or given.output, given.output))
        return 0
    for what in given.what:
        if what not in MEASURED:
            raise ValueError(f"what: expected {what} by itself, got {', '.join(given.what)}; call it alone")
        rows: dict[tuple[str, int | None], dict[str, Any]] = {}
        for row in MEASURED[what](given):
            rows[row["name"], row.get("side")] = row  # of more turns than before, where it was there
            keep(given.output / f"{what}.json", {"machine": machine(), "rows": list(rows.values())})
    return 0


def trainings(given: argparse.Namespace) -> dict[str, Training]:
    """All of them by name, or the variants.

    The first seed of every arm comes before the others of the one with the bar, and those before the rest; what is to
    learn longer begins first.
    """
    if given.what == ["choose"]:
        return {name: Training(TRIED, 0, given.output / "choose" / name, VARIANTS[name]) for name in VARIANTS}
    arms, folder = arms_of(given.arms, USUAL, ARMS), given.output / "camvid"
    file = given.output / "chosen.json"
    chosen = tuple(json.loads(file.read_text())["set"]) if file.is_file() else ()
    seeds = numbers(given.seeds)
    pairs = sorted(
        ((arm, seed) for seed in seeds for arm in arms), key=lambda one: (one[1] != seeds[0]) * (1 + (one[0] != TRIED))
    )
    found = {
        _name(arm, "longer"): Training(arm, seeds[0], folder / _name(arm, "longer"), chosen, longer=True)
        for arm in arms_of(given.longer, (), ARMS)
    }
    return found | {_name(arm, seed): Training(arm, seed, folder / _name(arm, seed), chosen) for arm, seed in pairs}


def _name(arm: str, which: str | int) -> str:
    return f"{arm.replace(' ', '_')}-{which}"


def trained(given: argparse.Namespace) -> int:
    """Train what is left, and tell what came out so far."""
    every, until = trainings(given), time.time() + 60 * given.minutes - JUDGING
    told = (*sys.argv[1:], "--until", f"{until}", "--cell")
    cells = [Cell.in_files(name, one.folder.parent, told) for name, one in every.items()]
    how = how_of(given, given.output)
    if given.what == ["camvid"]:
        return work_off_and_tell(__file__, cells, how, lambda: tell(cells, given), line)
    left = work_off(__file__, cells, how, lambda one: line(one.read() or {}))
    choose(every, given.output)
    return int(bool(left))


def choose(every: Mapping[str, Training], output: Path) -> None:
    """Write down the variant that did best on validation photos, of those that are done."""
    scores = {name: miou(json.loads(one.result.read_text())) for name, one in every.items() if one.result.is_file()}
    if not scores:
        print("nothing is done yet, so nothing is chosen: the same command goes on")
        return
    best = max(scores, key=lambda name: scores[name])
    keep(output / "chosen.json", {"name": best, "set": every[best].changes, "validation": scores})
    print(f"chosen: {best}, of {', '.join(f'{name} {score:.1%}' for name, score in scores.items())}")


def cell(given: argparse.Namespace) -> None:
    """Train one arm with one seed, judge it, and write what came out."""
    one, began = trainings(given)[given.cell], time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    split = "validation" if given.what == ["choose"] else "test"
    data, task = opened(given.data, split), tasks.find("segment")
    job = task.settle(job_of(one, given, MOST if one.longer else given.steps), data)
    some = learned_from(given.data, split, job.settings, device)
    network = made(task, job, device)
    learner = learner_of(network, job, some, device)
    pace = learn(learner, said, given.until if one.longer else math.inf, one.longer)
    score, maps = judge(network, job, data, device)
    if (one.arm, one.seed) == SHOWN and given.what == ["camvid"]:  # the longer one ends last, and is shown
        show(maps, data, one.folder.with_name("maps"))
    found = {
        "arm": one.arm,
        "seed": one.seed,
        "longer": one.longer,
        "score": score.numbers,
        "classes": {part.name: part.numbers["miou"] for part in score.parts},
        "learned": len(data.train),
        "packed": packed(given.data),
        "photos": score.count,
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "pace": {**asdict(pace), "images_per_second": job.recipe.batch_size / pace.step_seconds},
        "seconds": time.monotonic() - began,
        "split": split,
        "changes": one.changes,
        "planned": job.recipe.steps,
        "recipe": job.recipe.as_dict(),
        "settings": job.settings.as_dict(),
    }
    keep(one.result, found)


def packed(folder: str) -> dict[str, Any] | None:
    """What `packing/pack_scenes.py` did to the photos; None where it did nothing."""
    about = Path(folder, ABOUT)
    return json.loads(about.read_text()) if about.is_file() else None


def made(task: Any, job: Job[Segmentation], device: torch.device) -> nn.Module:
    """The network of a job, its weights by the job's seed."""
    torch.manual_seed(job.recipe.seed)
    return task.network(job).to(device, memory_format=torch.channels_last)


def said(text: str) -> None:
    """A line in the log of a cell."""
    print(text, flush=True)


def job_of(one: Training, given: argparse.Namespace, steps: int) -> Job[Segmentation]:
    """What a training does: the small recipe with this experiment's sizes, and what is asked for beside."""
    model, args = ARMS[one.arm]
    own = [*(f"{name}={value}" for name, value in OWN.items()), *one.changes, *(given.set or [])]
    changes = parse(own, Recipe, tasks.find("segment").settings)
    setup = tasks.recipe_for("segment", model, "small", **{**changes, "steps": steps, "seed": one.seed})
    return Job(model, args, setup.recipe, cast(Segmentation, setup.settings))


@functools.cache
def learned_from(folder: str, split: str, settings: Segmentation, device: torch.device) -> Kept:
    """The photos of the training half on the device, once for all runs of a process."""
    return kept(opened(folder, split).train, settings, device)


@functools.cache
def opened(folder: str, split: str) -> Scenes:
    """The photos, decoded once for all runs of a process."""
    return open_scenes(folder, zero_is_class=False, test_split=split, memory=True)


def show(maps: Sequence[Tensor], data: Scenes, folder: Path) -> None:
    """Write some of the maps that a run found, in the data set's own numbers, each beside its photo's name."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(0, len(maps), max(1, len(maps) // PHOTOS)):
        name = Path(data.test.path(number)).stem
        (folder / f"{name}.png").write_bytes(map_file(maps[number].short().numpy(), data.test.numbers))


def line(found: Mapping[str, Any]) -> str:
    """A run that is done in a line."""
    return (
        f"mIoU {miou(found):.1%}, {found['seconds']:.0f} s in all, {found['pace']['seconds']:.0f} s of training, "
        f"{found['pace']['images_per_second']:.0f} images/s {found['pace']['why']}"
    )


def tell(cells: Sequence[Cell], given: argparse.Namespace) -> str:
    """Write all that is done as JSON, and give it as a table."""
    done = results(cells)
    chosen = given.output / "chosen.json"
    about = {"chosen": json.loads(chosen.read_text()) if chosen.is_file() else None, "parallel": given.parallel}
    keep(given.output / "camvid.json", {"machine": machine(), **about, "cells": done})
    lines = ["| arm | seeds | mIoU, mean | lowest to highest | aAcc | parameters | images/s, shared | GB |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for arm, mine in by_arm(done).items():
        values = [miou(found) for found in mine]
        right = statistics.mean(found["score"]["aacc"] for found in mine)
        lines.append(
            f"| {arm} | {len(mine)} | {statistics.mean(values):.1%} | {min(values):.1%} to {max(values):.1%} "
            f"| {right:.1%} | {mine[0]['parameters'] / 1e6:.1f}M "
            f"| {statistics.median(f['pace']['images_per_second'] for f in mine):.0f} "
            f"| {max(f['pace']['peak'] for f in mine) / 2**30:.1f} |"
        )
    return "\n".join(lines)


def alone(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Each arm by itself: a training step of the size that `camvid` has."""
    chosen = {arm: ARMS[arm] for arm in USUAL}
    networks = {arm: (model, "semantic_fpn", args) for arm, (model, args) in chosen.items()}
    return measured(given, networks, given.size or ALONE, given.batch or BATCH, CLASSES)


def upernet(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """UperNet at 512 x 2048."""
    networks: dict[str, tuple[str, str, dict[str, Any]]] = {
        name: (name, "upernet", args) for name, args in UPERNETS.items()
    }
    return measured(given, networks, given.size or WIDE, given.batch or WIDE_BATCH, WIDE_CLASSES)


def growth(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Peak memory and seconds of one image, forward and backward, for larger and larger images.

    Softmax is measured twice: by torch's fused kernel, which keeps no weights, and by the formula, which does.
    """
    formula, fused = [SDPBackend.MATH], [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]
    arms: dict[str, tuple[dict[str, Any], list[SDPBackend]]] = {
        "linear": ({}, fused),
        "softmax, weights kept": ({"mechanism": "softmax"}, formula),
        "softmax, fused": ({"mechanism": "softmax"}, fused),
    }
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sides = [side for side in GROWING if given.size is None or side <= given.size[0]]
    for name, (args, kernels) in arms.items():
        network = timm.create_model(LINEAR, features_only=True, **args)
        network = network.to(device, memory_format=torch.channels_last).train()  # pyright: ignore[reportCallIssue]
        for side in sides:
            row: dict[str, Any] = {"name": name, "side": side, "model": LINEAR, "dtype": "bfloat16 autocast"}
            try:
                with sdpa_kernel(kernels, set_priority=True):
                    row |= grown(network, side, device)
            except torch.OutOfMemoryError:
                row["error"] = "out of memory"
            yield row
            print(
                f"{name}, {side} px: {row.get('error') or '{peak_gb:.2f} GB, {seconds:.3f} s'.format(**row)}",
                flush=True,
            )
            if "error" in row or row["seconds"] > PATIENCE:
                break
        del network


def counted(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Bytes that one image's forward pass leaves for backward, in bfloat16, for larger and larger images; no GPU."""
    for side in (side for side in GROWING if given.size is None or side <= given.size[0]):
        tokens = frozenset((side // stride) ** 2 for stride in (4, 8, 16, 32))
        for name, mechanism in (("linear", {}), ("softmax", {"mechanism": "softmax"})):

            def make(args: dict[str, Any] = mechanism) -> nn.Module:
                return timm.create_model(LINEAR, features_only=True, **args).bfloat16().train()

            left = left_behind(make, (1, 3, side, side), tokens)
            row = {"side": side, "model": LINEAR, "dtype": "bfloat16", "tokens": max(tokens)}
            if name == "linear":
                yield {**row, "name": name, "kept_gb": (left.activations + left.weights) / 2**30}
                continue
            yield {**row, "name": "softmax, fused", "kept_gb": left.activations / 2**30}
            yield {**row, "name": "softmax, weights kept", "kept_gb": (left.activations + left.weights) / 2**30}


def grown(network: nn.Module, side: int, device: torch.device) -> dict[str, float]:
    """Peak memory above the weights', and the seconds of the second pass."""
    images = torch.randn(1, 3, side, side, device=device).contiguous(memory_format=torch.channels_last)
    seconds, before = 0.0, 0
    for _ in range(2):
        network.zero_grad(set_to_none=True)
        before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        synchronize(device)
        began = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16):
            maps = network(images)
        torch.stack([one.float().square().mean() for one in maps]).sum().backward()
        synchronize(device)
        seconds = time.perf_counter() - began
    peak = torch.cuda.max_memory_allocated() - before if device.type == "cuda" else 0
    return {"peak_gb": peak / 2**30, "seconds": seconds, "tokens": (side // 4) ** 2}


def measured(
    given: argparse.Namespace,
    networks: Mapping[str, tuple[str, str, dict[str, Any]]],
    size: tuple[int, int],
    batch: int,
    classes: int,
) -> Iterator[dict[str, Any]]:
    """Images per second, in turns, and peak memory of training steps, each network by itself; told after each turn."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows: dict[str, dict[str, Any]] = {}
    speeds: dict[str, list[float]] = {name: [] for name in networks}
    for turn, (name, (model, head, args)) in itertools.product(range(given.turns), networks.items()):
        network = Segmenter(model, head, classes, model_args=args)
        steps = stepping(network, size, batch, classes, device, given.compile)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for _ in range(given.warm):
            next(steps)
        seconds = [next(steps) for _ in range(given.steps_timed)]
        speeds[name].append(batch / statistics.median(seconds))
        if turn == 0:
            with torch.device("meta"):
                macs = count_macs(Segmenter(model, head, classes, model_args=args).eval(), (3, *size))
            rows[name] = {
                "name": name,
                "parameters": sum(parameter.numel() for parameter in network.parameters()),
                "gmacs": macs / 1e9,
                "peak_gb": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None,
            }
        del network, steps
        if device.type == "cuda":
            torch.cuda.empty_cache()
        about = {"size": size, "batch": batch, "compiled": given.compile, "dtype": "bfloat16 autocast"}
        row = rows[name]
        row |= {**about, "images_per_second": statistics.median(speeds[name]), "turns": speeds[name]}
        print(
            f"turn {turn + 1}: {name} {speeds[name][-1]:.1f} images/s, {row['peak_gb'] or float('nan'):.1f} GB, "
            f"{row['parameters'] / 1e6:.1f}M parameters, {row['gmacs']:.0f} GMACs",
            flush=True,
        )
        yield row


def stepping(
    network: nn.Module, size: tuple[int, int], batch: int, classes: int, device: torch.device, compiled: bool
) -> Iterator[float]:
    """Training steps without end, each with the seconds it took: forward, backward and AdamW."""
    network = network.to(device, memory_format=torch.channels_last).train()  # pyright: ignore[reportCallIssue]
    optimizer = create_optimizer_v2(network, opt="adamw", lr=1e-5, weight_decay=0.01)
    call = torch.compile(network) if compiled else network
    images = torch.randn(batch, 3, *size, device=device).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(classes, (batch, *size), device=device)

    def loss() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            logits = call(images)
        losses = [pixel_loss(found, labels) for found in logits]
        return sum(losses[1:], losses[0])

    while True:
        yield step_seconds(loss, optimizer, device)


MEASURED = {"alone": alone, "upernet": upernet, "growth": growth, "counted": counted}


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=PARTS, help="which part; of alone, upernet and growth several")
    parser.add_argument("--page", type=Path, help="page: folder of README.md and its JSON")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--longer", help="camvid: arms that are trained once more, until the time is over")
    parser.add_argument("--data", default="camvid", help="CamVid's folder, with images/ and annotations/")
    parser.add_argument("--output", required=True, type=Path, help="folder for runs and JSON")
    parser.add_argument("--arms", help="some of the arms, with commas")
    add_options(parser, parallel=2, workers=1, minutes=60.0)
    parser.add_argument("--steps", default=2000, type=int, help="training steps of each cell")
    parser.add_argument(
        "--size", type=parse_size, help="alone, upernet: another height and width, such as 64x64; growth: the largest"
    )
    parser.add_argument("--batch", type=int, help="alone, upernet: another number of images")
    parser.add_argument("--compile", action="store_true", help="alone, upernet: through torch.compile")
    parser.add_argument("--turns", default=3, type=int, help="alone, upernet: how often each network has its turn")
    parser.add_argument("--warm", default=5, type=int, help="alone, upernet: steps before the clock starts")
    parser.add_argument("--steps-timed", default=20, type=int, help="alone, upernet: steps that are timed in a turn")
    return parser


if __name__ == "__main__":
    raise SystemExit(without_traceback(main))
