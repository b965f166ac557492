"""The evidence for long ranges: every mechanism on the kinds of the Long Range Arena that are at hand.

    PYTHONPATH=src python evidence/ranges.py --cifar cifar-10 --text reviews.csv --output outputs --probe
    PYTHONPATH=src python evidence/ranges.py --kinds listops,pathfinder --output outputs --prepare
    PYTHONPATH=src python evidence/ranges.py --cifar cifar-10 --text reviews.csv --output outputs --minutes 6

Data that is made up is made once, by all cores, and kept in the output folder; `--prepare` does no more, and may do so
while other kinds are trained. Then every kind, arm and seed that is not trained yet is, by the recipe of its kind made
shorter, for as many steps as its kind has, on the same batches in the same order. `ranges.json` is written after each,
with all that calls before it have done, and the same command goes on with those that are left; one that was stopped
begins anew. `--fit` decides how many steps there are by how long they take beside whatever else runs. `--probe` makes
small data, times a step of each arm, alone, and says whether it is one CUDA graph.
Without a GPU, `--set batch_size=16 --steps image=400 --judge 2000` takes minutes for each arm.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from affinear import tasks
from affinear.tasks.ranges import keeping
from affinear.tasks.ranges.opening import open_ranges
from affinear.tasks.ranges.sequences import Ranges, Rows, Split
from affinear.train import Recipe, Run
from affinear.train.spelling import parse
from pages.ranges import CHANCE, PUBLISHED
from running.briefly import opened, seconds_of_a_step, train_briefly
from running.cells import Cell
from running.files import keep
from running.in_order import Doing
from running.kinds import PACED, PROBED, Trial, Turns, add_options, came_to, found_in, probe, steps_of, take_turns
from running.machine import machine
from running.options import again, listed, numbers, without_traceback

MODEL = "sequence_small"
ARMS = ("softmax", "linear", "mala", "mala_released", "nala", "inline", "none")
# A twentieth of what is published or less.
STEPS = {"image": 2_000, "text": 900, "listops": 2_000, "pathfinder": 3_000}
SHARES = {"image": 2.0, "text": 3.0, "listops": 4.0, "pathfinder": 3.0}  # of the time, where it is shared
# Rates are higher since there are fewer steps, and gradients are clipped for that. Of reviews there are more at a time,
# as small differences tell their classes apart.
CHANGES: Mapping[str, dict[str, Any]] = {
    "image": {"lr": 2e-3, "batch_size": 128},
    "text": {"lr": 3e-3, "batch_size": 64},
    "listops": {"lr": 1e-3, "batch_size": 64, "dropout": 0.0},
    "pathfinder": {"lr": 1e-3},
}
SIZES = {"listops": (96_000, 500, 2_000), "pathfinder": (32_000, 500, 4_000)}
SMALL = (512, 16, 256)  # for probing
PARTS = 16  # that data is made in, each with a seed of its own; not the number of cores, which would make other data
NICE = 10  # of processes that make data, so that trainings beside them are not held up


def main() -> int:
    """Do what is asked; 1 if something is left to do."""
    given = arguments().parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    kinds = chosen_kinds(given)
    arms, seeds = listed(given.arms), numbers(given.seeds)
    if given.probe:
        probe(trials(given, kinds, arms, len(seeds)), given.output / "ranges_alone.json")
        return 0
    files = {kind: data_file(given, kind) for kind in kinds}
    if given.prepare:
        return 0
    until, most = time.time() + 60 * given.minutes, steps_of(given.steps, STEPS)
    how = partial(cells_of, given, files), partial(pace_of, given, files)
    turns = Turns(given.output / "ranges", kinds, arms, seeds, most, SHARES, given.fit, given.least, until, *how)
    left = take_turns(turns, doing(given))
    print(tell(given))
    return int(bool(left))


def doing(given: argparse.Namespace) -> Doing:
    """How cells are done, and told of."""

    def told(one: Cell) -> str:
        tell(given)
        return line(one.read() or {})

    return Doing(lambda words: cell(arguments().parse_args(words)), told)


def at_hand(given: argparse.Namespace) -> dict[str, Any]:
    """Where the data of every kind comes from; None for nowhere."""
    return {"image": given.cifar, "text": given.text, "listops": "made up", "pathfinder": "made up"}


def chosen_kinds(given: argparse.Namespace) -> list[str]:
    """The kinds whose data is at hand."""
    places, asked = at_hand(given), listed(given.kinds)
    for kind in asked:
        if kind not in places:
            raise ValueError(f"--kinds: expected some of {', '.join(places)}, got {kind!r}")
        if places[kind] is None:
            print(f"{kind}: no data was given, so it is left out", flush=True)
    return [kind for kind in asked if places[kind] is not None]


def data_file(given: argparse.Namespace, kind: str) -> Path:
    """The data of a kind in one file, made if it is not there."""
    path = given.output / "data" / file_name(kind, given.judge)
    if not path.is_file():
        began = time.monotonic()
        data = made(kind, SIZES[kind]) if kind in SIZES else open_ranges(at_hand(given)[kind])
        data = judged_by_some(data, given.judge)
        path.parent.mkdir(exist_ok=True)
        keeping.keep(data, path)
        took = f"{data.sizes[0]:,} and {data.sizes[1]:,} sequences in {time.monotonic() - began:.0f} s"
        print(f"{kind}: {took}", flush=True)
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
    """So many sequences, made up by all cores, behind whatever else they do; the same on every machine."""
    shares = [[(size + part) // PARTS for size in sizes] for part in range(PARTS)]
    specs = [
        f"{kind}:train={max(1, train)},validation={max(1, val)},test={max(1, test)},seed={part}"
        for part, (train, val, test) in enumerate(shares)
    ]
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("fork"), os.nice, (NICE,)) as pool:
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


def cells_of(
    given: argparse.Namespace, files: Mapping[str, Path], kind: str, arm: str, seed: int, steps: int
) -> list[Cell]:
    """The one of a kind, an arm and a seed."""
    folder = given.output / "ranges" / kind / f"{arm}-{seed}"
    told = ["--cell", kind, "--arms", arm, "--seeds", str(seed), "--data", str(files[kind]), "--output", str(folder)]
    told += ["--steps", f"{kind}={steps}", *again(given, "set")]
    return [Cell.in_folder(f"{kind}, {arm}, seed {seed}", folder, told)]


def changes_of(given: argparse.Namespace, kind: str, seed: int, steps: int) -> dict[str, Any]:
    """What differs from the published recipe."""
    changes: dict[str, Any] = {
        "steps": steps,
        "warmup_steps": max(1, steps // 10),
        "clip_grad": 1.0,
        "seed": seed,
        "workers": 0,
        "compile": False,
        "test_batch": 256,
        **CHANGES[kind],
    }
    return changes | parse(given.set or [], Recipe, tasks.find("ranges").settings)


def run_of(given: argparse.Namespace, kind: str, arm: str, seed: int, steps: int, spec: str) -> tuple[Run, Ranges]:
    """What is trained, and its data, which a process opens once."""
    setup = tasks.recipe_for("ranges", MODEL, kind, **changes_of(given, kind, seed, steps))
    return Run(MODEL, spec, given.output, setup, {"mechanism": arm}), opened(spec, setup)


def pace_of(given: argparse.Namespace, files: Mapping[str, Path], kind: str, arm: str) -> float:
    """Seconds of a step."""
    run, data = run_of(given, kind, arm, 0, sum(PACED), str(files[kind]))
    return seconds_of_a_step(run, data, building=PACED[0], timed=PACED[1])


def cell(given: argparse.Namespace) -> None:
    """Train one arm of one kind with one seed, and write what came out."""
    kind, seed, began = given.cell, int(given.seeds), time.monotonic()
    run, data = run_of(given, kind, given.arms, seed, steps_of(given.steps, STEPS)[kind], given.data)
    found = {
        "kind": kind,
        "arm": given.arms,
        "seed": seed,
        **came_to(train_briefly(run, data)),
        "seconds": time.monotonic() - began,
        "learnt_from": data.sizes[0],
        "judged_by": data.sizes[1],
    }
    keep(given.output / "result.json", found)


def line(found: Mapping[str, Any]) -> str:
    """A cell in a line."""
    took = f"{found['ms_per_step']:.1f} ms a step, {found['seconds']:.0f} s{found['no_graph'] and ', no graph'}"
    return f"accuracy {found['score']['accuracy']:.1%}, {took}"


def tell(given: argparse.Namespace) -> str:
    """Write all that is done as JSON, with how many sequences each kind is judged by, and give it as a table."""
    done = found_in(given.output / "ranges", list(STEPS), ARMS)
    judged = {found["kind"]: found["judged_by"] for found in done}
    found = {"machine": machine(), "parallel": 1, "shared": given.shared, "judged": judged, "cells": done}
    keep(given.output / "ranges.json", found)
    lines = ["| kind | arm | seeds | accuracy, mean | lowest to highest | above chance | steps | ms a step |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for kind, arm in dict.fromkeys((found["kind"], found["arm"]) for found in done):
        mine = [found for found in done if (found["kind"], found["arm"]) == (kind, arm)]
        values = [100 * found["score"]["accuracy"] for found in mine]
        mean, pace = statistics.mean(values), statistics.median(found["ms_per_step"] for found in mine)
        lines.append(
            f"| {kind} | {arm} | {len(mine)} | {mean:.1f} % | {min(values):.1f} to {max(values):.1f} "
            f"| {mean - CHANCE[kind]:+.1f} | {mine[0]['recipe']['steps']:,} | {pace:.1f} |"
        )
    lines += [f"Published, 50,000 steps, {kind}: {numbers}" for kind, numbers in PUBLISHED.items()]
    lines += ["Of pathfinder, how far the dots are apart tells 60 %, without following a contour."]
    return "\n".join(lines)


def trials(given: argparse.Namespace, kinds: Sequence[str], arms: Sequence[str], seeds: int) -> Iterator[Trial]:
    """A short training of each kind and arm, on small data where it is made up."""
    steps = steps_of(given.steps, STEPS)
    for kind in kinds:
        spec = at_hand(given)[kind]
        if kind in SIZES:
            spec = str(given.output / "data" / f"{kind}-small.safetensors")
            Path(spec).parent.mkdir(exist_ok=True)
            keeping.keep(made(kind, SMALL), Path(spec), force=True)
        for arm in arms:
            yield Trial(kind, arm, *run_of(given, kind, arm, 0, PROBED, spec), steps[kind] * seeds)


def arguments() -> argparse.ArgumentParser:
    """What the command line takes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs"), help="folder for all that is written")
    parser.add_argument("--cifar", help="folder with the files of CIFAR-10; without it there is no image")
    parser.add_argument("--text", help="folder or table of reviews; without it there is no text")
    parser.add_argument("--kinds", default="image,text,listops,pathfinder")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--steps", action="append", metavar="KIND=N", help="of a kind; may be given again")
    parser.add_argument("--judge", type=int, metavar="N", help="judge by at most N sequences, the same for all arms")
    add_options(parser, minutes=20)
    parser.add_argument("--prepare", action="store_true", help="make the data of these kinds, and stop")
    parser.add_argument("--probe", action="store_true", help="time a step of each arm, alone, and stop")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    parser.add_argument("--data", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    raise SystemExit(without_traceback(main))
