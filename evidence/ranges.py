"""The evidence for long ranges: every mechanism on the kinds of the Long Range Arena that are at hand.

    PYTHONPATH=src python evidence/ranges.py --cifar cifar-10 --output outputs --probe
    PYTHONPATH=src python evidence/ranges.py --cifar cifar-10 --output outputs --minutes 20 --parallel 6
    PYTHONPATH=src python evidence/ranges.py --cifar cifar-10 --output outputs --minutes 4 --seeds 0 --fit

Without a GPU, `--set batch_size=16 --set steps=400 --judge 2000` takes about an hour; images are learnt a little by
then, reviews hardly.

Data that is made up is made once, by all cores, and kept in the output folder. Then every kind, arm and seed that is
not trained yet is, several processes at a time, all by the recipe of its kind made shorter. `ranges.json` is written
after each, and the same command goes on with those that are left; one that was stopped begins anew. With `--fit` the
number of steps of each kind is found out in the beginning, from how fast all arms are side by side, so that all end in
time; a later call with more seeds takes as many. `--probe` makes small data and measures each arm alone on the
GPU: milliseconds of a step and memory, in `ranges_alone.json`; from that it says how long the whole would take.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import multiprocessing
import os
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from affinear import tasks
from affinear.tasks.ranges import keeping
from affinear.tasks.ranges.opening import open_ranges
from affinear.tasks.ranges.sequences import Ranges, Rows, Split
from affinear.train import Recipe, Run
from affinear.train.engine import ready, settled
from affinear.train.spelling import parse
from pages.ranges import CHANCE, PUBLISHED
from running.briefly import opened, seconds_of_a_step, train_briefly
from running.cells import Cell, is_worker, results, serve
from running.files import keep
from running.machine import machine
from running.options import add_options, again, how_of, listed, numbers
from running.pacing import Pacing, agreed, begin
from running.steps import alone
from running.telling import work_off_and_tell

MODEL = "sequence_small"
ARMS = ("softmax", "linear", "mala", "mala_released", "nala", "inline", "none")
# A tenth of what is published or less.
STEPS = {"image": 4_000, "text": 3_000, "listops": 5_000, "pathfinder": 8_000}
# Rates are higher since there are fewer steps, and gradients are clipped for that. Of reviews there are more at a time
# and less of each, as small differences tell their classes apart.
CHANGES: Mapping[str, dict[str, Any]] = {
    "image": {"lr": 2e-3, "batch_size": 128},
    "text": {"lr": 3e-3, "batch_size": 64, "length": 2_048, "dropout": 0.0},
    "listops": {"lr": 1e-3, "dropout": 0.0},
    "pathfinder": {"lr": 1e-3},
}
# Of the time, with --fit: what has a bar first.
SHARES = {"image": 0.22, "text": 0.48, "listops": 0.18, "pathfinder": 0.12}
BESIDE = 4.0  # seconds that a training takes beside its steps
WARM, TIMED = 3, 8  # steps
SIZES = {"listops": (96_000, 2_000, 2_000), "pathfinder": (96_000, 2_000, 10_000)}
SMALL = (512, 16, 256)  # for probing
PARTS = 16  # that data is made in, each with a seed of its own; not the number of cores, which would make other data


def main() -> int:
    """Do what is asked; 1 if something is left to do."""
    if is_worker():
        return serve(lambda told: cell(arguments().parse_args(told)))
    given = arguments().parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    kinds = chosen_kinds(given)
    arms, seeds = listed(given.arms), numbers(given.seeds)
    if given.probe:
        probe(given, kinds, arms, seeds)
        return 0
    files = {kind: data_file(given, kind) for kind in kinds}
    cells = [one_cell(given, kind, arm, seed, files[kind]) for seed, kind, arm in itertools.product(seeds, kinds, arms)]
    judged = {kind: open_ranges(str(file)).sizes[1] for kind, file in files.items()}
    if given.fit:
        begin(pace_folder(given), pacing_of(given, cells))
    return work_off_and_tell(__file__, cells, how_of(given, given.output), lambda: tell(cells, given, judged), line)


def chosen_kinds(given: argparse.Namespace) -> list[str]:
    """The kinds whose data is at hand."""
    at_hand = {"image": given.cifar, "text": given.text, "listops": "made up", "pathfinder": "made up"}
    asked = listed(given.kinds)
    for kind in asked:
        if kind not in at_hand:
            raise ValueError(f"--kinds: expected some of {', '.join(at_hand)}, got {kind!r}")
        if at_hand[kind] is None:
            print(f"{kind}: no data was given, so it is left out", flush=True)
    return [kind for kind in asked if at_hand[kind] is not None]


def data_file(given: argparse.Namespace, kind: str) -> Path:
    """The data of a kind in one file, made if it is not there."""
    path = given.output / "data" / file_name(kind, given.judge)
    if not path.is_file():
        began = time.monotonic()
        data = made(kind, SIZES[kind]) if kind in SIZES else open_ranges(given.cifar if kind == "image" else given.text)
        data = judged_by_some(data, given.judge)
        path.parent.mkdir(exist_ok=True)
        keeping.keep(data, path)
        print(
            f"{kind}: {data.sizes[0]:,} and {data.sizes[1]:,} sequences in {time.monotonic() - began:.0f} s", flush=True
        )
    return path


def file_name(kind: str, judge: int | None) -> str:
    """What the file of a kind is called."""
    return f"{kind if judge is None else f'{kind}-{judge}'}.safetensors"


def judged_by_some(data: Ranges, most: int | None) -> Ranges:
    """The same data to learn from, and at most so many sequences to choose and be judged by, evenly among all."""
    if most is None:
        return data
    fewer = tasks.find("ranges").limited(data, most)
    return dataclasses.replace(fewer, name=f"{data.name}, judged by at most {most}", train=data.train)


def made(kind: str, sizes: Sequence[int]) -> Ranges:
    """So many sequences, made up by all cores; the same on every machine."""
    shares = [[(size + part) // PARTS for size in sizes] for part in range(PARTS)]
    specs = [
        f"{kind}:train={max(1, train)},validation={max(1, val)},test={max(1, test)},seed={part}"
        for part, (train, val, test) in enumerate(shares)
    ]
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("fork")) as pool:
        return joined(list(pool.map(open_ranges, specs)), kind)


def joined(parts: Sequence[Ranges], name: str) -> Ranges:
    """Data sets of one kind as one."""
    splits = [
        Split(
            tuple(_joined([split.rows[c] for split in splits]) for c in range(len(splits[0].rows))),
            np.concatenate([split.labels for split in splits]),
            title,
        )
        for title in ("train", "validation", "test")
        for splits in [[getattr(part, title) for part in parts]]
    ]
    return dataclasses.replace(parts[0], name=name, train=splits[0], validation=splits[1], test=splits[2])


def _joined(columns: Sequence[Rows]) -> Rows:
    lengths = np.concatenate([column.lengths for column in columns])
    starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    return Rows(np.concatenate([column.tokens for column in columns]), starts)


def one_cell(given: argparse.Namespace, kind: str, arm: str, seed: int, data: Path) -> Cell:
    """A kind, an arm and a seed."""
    folder = given.output / "ranges" / kind / f"{arm}-{seed}"
    told = ["--cell", kind, "--arms", arm, "--seeds", str(seed), "--data", str(data), "--output", str(folder)]
    told += ["--share", str(given.share), "--workers", str(given.workers), *again(given, "set")]
    if given.fit:
        told += ["--pace", str(pace_folder(given)), "--folder", str(given.output / "data"), *_judge(given)]
    return Cell.in_folder(f"{kind}, {arm}, seed {seed}", folder, told)


def _judge(given: argparse.Namespace) -> list[str]:
    return [] if given.judge is None else ["--judge", str(given.judge)]


def pacing_of(given: argparse.Namespace, cells: Sequence[Cell]) -> Pacing:
    """What there is to do, and in which time."""
    waiting = [one.title.split(", ") for one in cells if not one.is_done]
    trainings = dict(Counter(f"{kind} {arm}" for kind, arm, _ in waiting))
    shares = {kind: SHARES[kind] for kind in dict.fromkeys(kind for kind, _, _ in waiting)}
    crowd = min(given.parallel, len(waiting))
    return Pacing(trainings, shares, time.time() + 60 * given.minutes, crowd, BESIDE)


def pace_folder(given: argparse.Namespace) -> Path:
    """Where processes agree on how many steps there are."""
    return given.output / "ranges" / "pace"


def changes_of(given: argparse.Namespace, kind: str, seed: int, steps: int) -> dict[str, Any]:
    """What differs from the published recipe."""
    changes: dict[str, Any] = {
        "steps": steps,
        "warmup_steps": max(1, steps // 10),
        "clip_grad": 1.0,
        "seed": seed,
        "workers": given.workers,
        "compile": False,
        "test_batch": 256,
        **CHANGES[kind],
    }
    return changes | parse(given.set or [], Recipe, tasks.find("ranges").settings)


def run_of(given: argparse.Namespace, kind: str, arm: str, seed: int, steps: int, data: Path) -> tuple[Run, Ranges]:
    """What is trained, and its data, which a process opens once."""
    setup = tasks.recipe_for("ranges", MODEL, kind, **changes_of(given, kind, seed, steps))
    return Run(MODEL, str(data), given.output, setup, {"mechanism": arm}), opened(str(data), setup)


def steps_of(given: argparse.Namespace, kind: str) -> int:
    """Of every training of a kind: what was agreed on, or else the usual number."""
    if given.pace is None:
        return max(2, round(STEPS[kind] * given.share))

    def measure(name: str) -> float:
        what, arm = name.split()
        file = given.folder / file_name(what, given.judge)
        return seconds_of_a_step(*run_of(given, what, arm, 0, 1_000, file), WARM, TIMED)

    return agreed(given.pace, measure)[kind]


def cell(given: argparse.Namespace) -> None:
    """Train one arm of one kind with one seed, and write what came out."""
    kind, seed = given.cell, int(given.seeds)
    steps, began = steps_of(given, kind), time.monotonic()
    run, data = run_of(given, kind, given.arms, seed, steps, Path(given.data))
    brief = train_briefly(run, data)
    found = {
        "kind": kind,
        "arm": given.arms,
        "seed": seed,
        "score": dict(brief.score.numbers),
        "losses": brief.losses,
        "parameters": brief.parameters,
        "ms_per_step_shared": 1000 * brief.seconds / brief.recipe["steps"],
        "peak_memory": brief.peak_memory,
        "seconds": time.monotonic() - began,
        "learnt_from": data.sizes[0],
        "recipe": brief.recipe,
        "settings": brief.settings,
    }
    keep(given.output / "result.json", found)


def line(found: Mapping[str, Any]) -> str:
    """A cell in a line."""
    return f"accuracy {found['score']['accuracy']:.1%} after {found['seconds']:.0f} s"


def tell(cells: Sequence[Cell], given: argparse.Namespace, judged: Mapping[str, int]) -> str:
    """Write all that is done as JSON, with how many sequences each kind is judged by, and give it as a table."""
    done = results(cells)
    found = {"machine": machine(), "parallel": given.parallel, "judged": judged, "cells": done}
    keep(given.output / "ranges.json", found)
    lines = ["| kind | arm | seeds | accuracy, mean | lowest to highest | above chance | steps | ms/step, shared |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for kind, arm in dict.fromkeys((found["kind"], found["arm"]) for found in done):
        mine = [found for found in done if (found["kind"], found["arm"]) == (kind, arm)]
        values = [100 * found["score"]["accuracy"] for found in mine]
        mean, pace = statistics.mean(values), statistics.median(found["ms_per_step_shared"] for found in mine)
        lines.append(
            f"| {kind} | {arm} | {len(mine)} | {mean:.1f} % | {min(values):.1f} to {max(values):.1f} "
            f"| {mean - CHANCE[kind]:+.1f} | {mine[0]['recipe']['steps']:,} | {pace:.1f} |"
        )
    lines += [f"Published, 50,000 steps, {kind}: {numbers}" for kind, numbers in PUBLISHED.items()]
    lines += ["Of pathfinder, how far the dots are apart tells 60 %, without following a contour."]
    return "\n".join(lines)


def probe(given: argparse.Namespace, kinds: Sequence[str], arms: Sequence[str], seeds: Sequence[int]) -> None:
    """Measure each arm by itself, and say how long the whole would take."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows: list[dict[str, Any]] = []
    for kind in kinds:
        data = made(kind, SMALL) if kind in SIZES else open_ranges(given.cifar if kind == "image" else given.text)
        for arm in arms:
            rows.append(probed(given, kind, arm, data, device))
            told = "{kind}, {arm}: {ms:.1f} ms a step, {gigabytes:.2f} GB, {parameters:,} parameters"
            print(told.format(**rows[-1]), flush=True)
            keep(given.output / "ranges_alone.json", {"machine": machine(), "rows": rows})
    steps = {kind: STEPS[kind] * given.share for kind in kinds}
    total = sum(row["ms"] * steps[row["kind"]] for row in rows) * len(seeds) / 60_000
    print(f"The whole, if processes only took turns: {total:.0f} minutes for {len(seeds)} seeds", flush=True)


def probed(given: argparse.Namespace, kind: str, arm: str, data: Ranges, device: torch.device) -> dict[str, Any]:
    """One arm alone: the median of some training steps, and the most memory."""
    setup = tasks.recipe_for("ranges", MODEL, kind, **changes_of(given, kind, 0, STEPS[kind]))
    job = settled(Run(MODEL, "", Path(), setup, {"mechanism": arm}), data)
    network = setup.task.network(job).to(device).train()
    work = setup.task.work(job, data, device)
    batch = next(ready(work.train_loader(), work))
    batch = type(batch)(*(part.to(device) for part in batch))
    found = alone(network, work.loss, itertools.repeat(batch, given.probe_steps), device)
    return {
        "kind": kind,
        "arm": arm,
        "ms": 1000 * found.seconds,
        "gigabytes": found.gigabytes,
        "parameters": found.parameters,
        "batch": job.recipe.batch_size,
        "tokens": job.settings.length,
    }


def arguments() -> argparse.ArgumentParser:
    """What the command line takes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs"), help="folder for all that is written")
    parser.add_argument("--cifar", help="folder with the files of CIFAR-10; without it there is no image")
    parser.add_argument("--text", help="folder or table of reviews; without it there is no text")
    parser.add_argument("--kinds", default="image,listops,pathfinder,text")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--judge", type=int, metavar="N", help="judge by at most N sequences, the same for all arms")
    parser.add_argument("--share", type=float, default=1.0, help="of the steps that each kind has here")
    add_options(parser, parallel=6, workers=0, minutes=20)
    parser.add_argument("--fit", action="store_true", help="as many steps as end in --minutes, found out first")
    parser.add_argument("--probe", action="store_true", help="measure each arm alone, and stop")
    parser.add_argument("--probe-steps", type=int, default=15)
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    parser.add_argument("--data", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--pace", type=Path, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
