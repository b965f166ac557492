"""What a ViT keeps when its attention becomes linear: train it, swap it, distil it with a tenth of its training.

    PYTHONPATH=src python evidence/linearize_vit.py --data cifar-10 --out linearize --minutes 8

Every piece is a run of the engine in a folder of --out: the teacher, and for each mechanism the layers, then the whole
network. Seeds are processes side by side on one GPU, which a ViT of 32 x 32 pixels does not fill. Rows are appended to
`rows-SEED.jsonl` as they come and printed, with where every seed is in between; `report.md` and `linearize.json` have
them together. When the time is over every run saves itself and ends, and the same command goes on. `--probe` trains a
hundred steps of each piece and says what all would take. The rows: the teacher; swapped and not trained; after the
first stage; after both. The bar is a point below the teacher. One arm, `mean`, has no attention: every token gets the
mean of all values, beside the same convolution. What it keeps is not owed to any mechanism.

Then, alone on the machine: images per second by size, teacher and student in turns, as plain calls and replayed as
CUDA graphs, and the size from which on a student is faster. `--part speed` does that alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import timm
import torch

import affinear
from affinear import tasks
from affinear.bench.timing import capture_or_why, in_turns, run_aside
from affinear.ops.mechanisms import identity
from affinear.train import Run, train
from affinear.train.checkpoint import LAST
from affinear.train.faults import Interrupted
from affinear.train.progress import Lines
from running import files
from running.ending import orderly
from running.machine import machine

MECHANISMS = ("mala", "linear", "nala", "inline", "mean")
MEAN = affinear.Mechanism("mean", identity, identity, torch.zeros_like, nonnegative=False, paper="none")
SIZES = (224, 320, 512, 768, 1024)
STAGES = (("layers", 0.15, 2e-3), ("whole", 0.85, 1e-3))  # share of the students' images, and peak of the rate
ADDED_RATE = 5.0  # what the rate is multiplied with for what the swap added
TENTH = 10
PROBED = 100
LAST_WORDS = 15.0  # seconds that runs get to save themselves


class Rows:
    """Rows of one seed, or of the speeds, kept as they come.

    Args:
        path: A file of JSON lines.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = read(path)

    def has(self, **key: Any) -> bool:
        """Whether there is such a row."""
        return any(all(row.get(name) == value for name, value in key.items()) for row in self.rows)

    def add(self, **row: Any) -> None:
        """Keep a row."""
        row["machine"] = machine()["device"]
        self.rows.append(row)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; none if it is not there."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


# ------------------------------------------------------------------------------------------------ one seed


def one_seed(given: argparse.Namespace, seed: int) -> None:
    """The teacher and all its students."""
    rows = Rows(given.out / f"rows-{seed}.jsonl")
    teacher = _teacher(given, seed, rows)
    for mechanism in given.mechanisms:
        _student(given, seed, teacher, mechanism, rows)


def _plain(given: argparse.Namespace, seed: int) -> dict[str, Any]:
    loading = {"compile": False, "workers": given.workers, "seed": seed, "batch_size": given.batch}
    return {**loading, "augment": "simple", "save_every": 200, "image_size": (32, 32)}


def _images(given: argparse.Namespace) -> int:
    task = tasks.find("classify")
    return task.open(given.data, task.settings()).sizes[0]


def _teacher(given: argparse.Namespace, seed: int, rows: Rows) -> Path:
    """Train the softmax network."""
    folder = given.out / f"teacher-{seed}"
    changes: dict[str, Any] = {"lr": 1e-3, "smoothing": 0.1, "mixup": 0.0, "cutmix": 0.0}
    if given.steps:
        changes |= {"steps": given.steps, "eval_steps": None, "warmup_steps": given.steps // 10}
    else:
        changes |= {"epochs": given.epochs, "eval_every": given.epochs}
    setup = tasks.recipe_for("classify", given.model, "finetune", **_plain(given, seed), **changes)
    began = time.monotonic()
    result = train(Run(given.model, given.data, folder, setup, given.model_args), progress=Lines())
    if not rows.has(row="teacher"):
        rows.add(kind="accuracy", mechanism="softmax", row="teacher", seed=seed, top1=result.score["top1"],
                 steps=_steps(given), seconds=time.monotonic() - began, per_second=result.per_second)  # fmt: skip
    return folder


def _steps(given: argparse.Namespace) -> int:
    return given.steps or given.epochs * (_images(given) // given.batch)


def _student(given: argparse.Namespace, seed: int, teacher: Path, mechanism: str, rows: Rows) -> None:
    """Swap, evaluate, and distil in two stages: together a tenth of the images that its teacher saw, and no more."""
    key: dict[str, Any] = {"kind": "accuracy", "mechanism": mechanism, "seed": seed}
    swap: dict[str, Any] = {"gain": True, "feature_map": "learned", "convolution": given.convolution}
    if not rows.has(**key, row="swapped"):
        trained = tasks.load_trained(teacher / LAST)
        network, _ = affinear.linearize(trained.network, mechanism, **swap)
        trained = dataclasses.replace(trained, network=network)
        score = tasks.evaluate(trained, given.data, batch_size=given.batch, workers=given.workers)
        rows.add(**key, row="swapped", top1=score["top1"])
    weights = teacher / LAST
    for stage, share, rate in STAGES:
        folder = given.out / f"{mechanism}-{seed}-{stage}"
        batch = given.student_batch or given.batch
        steps = max(1, math.floor(share * _steps(given) * given.batch / TENTH / batch))
        length = {"steps": steps, "eval_steps": None, "warmup_steps": min(20, steps // 4), "lr": rate}
        taught = {**length, "batch_size": batch, "added_rate": ADDED_RATE, "teacher": str(teacher / LAST)}
        changes = {**_plain(given, seed), **taught, **swap, "mechanism": mechanism}
        setup = tasks.recipe_for("distil", given.model, stage, **changes)
        began = time.monotonic()
        result = train(Run(given.model, given.data, folder, setup, given.model_args, weights), progress=Lines())
        if not rows.has(**key, row=stage):
            rows.add(**key, row=stage, top1=result.score["top1"], steps=steps, seconds=time.monotonic() - began)
        weights = folder / LAST


# ------------------------------------------------------------------------------------------------ all seeds


def all_seeds(given: argparse.Namespace, ends: float) -> bool:
    """Processes, one for each seed, until all are done or the time is over; whether all are done."""
    running: dict[int, subprocess.Popen[bytes]] = {}
    waiting, told, failed = list(range(given.seeds)), dict[int, int](), list[int]()
    began = looked = time.monotonic()
    try:
        while (waiting or running) and time.monotonic() < ends - LAST_WORDS:
            while waiting and len(running) < given.parallel:
                seed = waiting.pop(0)
                running[seed], told[seed] = _start(given, seed), len(read(given.out / f"rows-{seed}.jsonl"))
            time.sleep(1)
            for seed in told:
                told[seed] = _tell(given, seed, told[seed], began)
            for seed, process in list(running.items()):
                if process.poll() is not None:
                    del running[seed]
                    if process.returncode:
                        failed.append(seed)
                        print(f"seed {seed} FAILED, see {given.out}/seed-{seed}.txt", flush=True)
            if time.monotonic() - looked > 20:
                looked = time.monotonic()
                for seed in running:
                    print(f"{looked - began:4.0f} s  seed {seed}: {_latest(given, seed)}", flush=True)
    finally:
        for process in running.values():
            process.send_signal(signal.SIGTERM)  # the engine saves, and stops
        for process in running.values():
            try:
                process.wait(timeout=LAST_WORDS)
            except subprocess.TimeoutExpired:
                process.kill()
    return not (waiting or running or failed)


def _start(given: argparse.Namespace, seed: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, *sys.argv[1:], "--seed", str(seed)]
    with (given.out / f"seed-{seed}.txt").open("ab") as log:
        environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2")}
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment)


def _tell(given: argparse.Namespace, seed: int, told: int, began: float) -> int:
    """Print the rows that are new; how many there are now."""
    rows = read(given.out / f"rows-{seed}.jsonl")
    for row in rows[told:]:
        passed = f"{time.monotonic() - began:4.0f} s"
        print(f"{passed}  seed {seed}: {row['mechanism']} {row['row']} {100 * row['top1']:.2f} %", flush=True)
    if len(rows) > told:
        write(given.out)
    return len(rows)


def _latest(given: argparse.Namespace, seed: int) -> str:
    lines = (given.out / f"seed-{seed}.txt").read_text(errors="replace").splitlines()
    return lines[-1][:150] if lines else "begins"


# ------------------------------------------------------------------------------------------------ speed


def speeds(given: argparse.Namespace, ends: float) -> None:
    """Images per second of inference, in turns with softmax, of fresh networks."""
    rows = Rows(given.out / "rows-speed.jsonl")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for pixels in given.sizes:
        softmax = timm.create_model(given.speed_model, img_size=pixels).to(device, dtype).eval()
        batch = max(1, given.speed_batch * 224**2 // pixels**2)
        images = torch.randn(batch, 3, pixels, pixels, device=device, dtype=dtype)
        for mechanism in given.mechanisms:
            if rows.has(kind="speed", mechanism=mechanism, pixels=pixels) or time.monotonic() > ends:
                continue
            student, _ = affinear.linearize(softmax, mechanism, gain=True, feature_map="learned",
                                            convolution=given.convolution)  # fmt: skip
            told: dict[str, Any] = {"tokens": (pixels // 16) ** 2 + 1, "batch": batch}
            calls = [_caller(network, images) for network in (student, softmax)]
            told["eager"], told["softmax_eager"] = _rates(calls, batch, device)
            if device.type == "cuda":
                graphs = [_graph(call) for call in calls]
                if all(graphs):
                    replays = [graph.replay for graph in graphs if graph is not None]
                    told["graph"], told["softmax_graph"] = _rates(replays, batch, device)
            rows.add(kind="speed", mechanism=mechanism, pixels=pixels, **told)
            print(f"{mechanism} at {pixels} px: {_times(told)}", flush=True)
            write(given.out)


def _caller(network: torch.nn.Module, images: torch.Tensor) -> Callable[[], object]:
    return lambda: network(images)


def _pair(row: dict[str, Any], mode: str) -> str:
    """Both networks' images a second, with three digits at least."""
    rates = (row[mode], row[f"softmax_{mode}"])
    student, teacher = (f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}" for rate in rates)
    return f"{student} images/s, softmax {teacher}"


def _times(row: dict[str, Any]) -> str:
    modes = [mode for mode in ("eager", "graph") if mode in row]
    return ", ".join(f"{mode} {_pair(row, mode)}" for mode in modes)


@torch.no_grad()
def _graph(call: Callable[[], object]) -> torch.cuda.CUDAGraph | None:
    """The call as a graph; None, and why is said, where there can be none."""
    run_aside([call])
    graph, why = capture_or_why(call)
    if graph is None:
        print(f"no graph: {why}", flush=True)
    return graph


@torch.no_grad()
def _rates(calls: Sequence[Callable[[], object]], batch: int, device: torch.device) -> list[float]:
    """Images per second of each, measured in turns; the first turns do not count."""
    warm, turns = (3, 10) if device.type == "cuda" else (1, 3)
    return [batch / took for took in in_turns(calls, device, turns, warm)]


def crossing(rows: Sequence[dict[str, Any]], mode: str) -> str:
    """From which size on a student is faster than its teacher, as far as was measured."""
    timed = [row for row in rows if mode in row]
    slower = [row["pixels"] for row in timed if row[mode] <= row[f"softmax_{mode}"]]
    faster = [row["pixels"] for row in timed if row["pixels"] > max(slower, default=0)]
    tokens = {row["pixels"]: row["tokens"] for row in timed}
    if not timed:
        return "not measured"
    if not faster:
        return f"not faster at any size up to {max(slower)} px ({tokens[max(slower)]:,} tokens)"
    first = f"{min(faster)} px ({tokens[min(faster)]:,} tokens)"
    return f"faster at {first} and above" + (
        f", not at {max(slower)} px" if slower else ", the least that was measured"
    )


# ------------------------------------------------------------------------------------------------ report


def write(out: Path) -> str:
    """Write all rows into one file, and tables of them; the tables."""
    rows = [row for file in sorted(out.glob("rows-*.jsonl")) for row in read(file)]
    told = tables(rows)
    files.write(out / "linearize.json", json.dumps(rows, indent=1))
    files.write(out / "report.md", told)
    return told


def tables(rows: Sequence[dict[str, Any]]) -> str:
    """Accuracy by row and mechanism, and speed by size."""
    lines = ["| mechanism | row | seeds | top-1, % | points below the teacher |", "|---|---|---|---|---|"]
    accuracy = [row for row in rows if row["kind"] == "accuracy"]
    teachers = {row["seed"]: row["top1"] for row in accuracy if row["row"] == "teacher"}
    for mechanism, name in dict.fromkeys((row["mechanism"], row["row"]) for row in accuracy):
        found = [row for row in accuracy if (row["mechanism"], row["row"]) == (mechanism, name)]
        top1 = [100 * row["top1"] for row in found]
        below = [100 * (teachers[row["seed"]] - row["top1"]) for row in found]
        lines.append(f"| {mechanism} | {name} | {len(found)} | {_spread(top1)} | {_spread(below)} |")
    speed = [row for row in rows if row["kind"] == "speed"]
    if speed:
        lines += ["", "| mechanism | pixels | tokens | images/s, plain calls | as a graph |", "|---|---|---|---|---|"]
    for row in sorted(speed, key=lambda row: (row["mechanism"], row["pixels"])):
        pairs = [_pair(row, mode) if mode in row else "" for mode in ("eager", "graph")]
        lines.append(f"| {row['mechanism']} | {row['pixels']} | {row['tokens']} | {pairs[0]} | {pairs[1]} |")
    for mechanism in dict.fromkeys(row["mechanism"] for row in speed):
        mine = [row for row in speed if row["mechanism"] == mechanism]
        lines += ["", f"{mechanism}, plain calls: {crossing(mine, 'eager')}; as graphs: {crossing(mine, 'graph')}."]
    return "\n".join(lines) + "\n"


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.2f}" + (f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else "")


def probe(given: argparse.Namespace) -> None:
    """Train a hundred steps of the teacher and ten of each student, of one seed, and say what all would take."""
    steps = _steps(given)
    given.steps, given.seeds, given.parallel, given.mechanisms = PROBED, 1, 1, given.mechanisms[:1]
    given.out = given.out / "probe"
    given.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    one_seed(given, 0)
    rows = read(given.out / "rows-0.jsonl")
    teacher = next(row for row in rows if row["row"] == "teacher")
    second = teacher["per_second"] / given.batch
    print(f"{time.monotonic() - began:.0f} s in all; {second:.1f} steps of the teacher a second", flush=True)
    print(f"{steps} steps of a teacher: {steps / second / 60:.1f} min, one seed alone, without starting and judging")


def main() -> int:
    """Do what fits into the time; 1 if something is left to do."""
    given = arguments().parse_args()
    affinear.register(MEAN)
    ends = time.monotonic() + 60 * given.minutes
    given.out.mkdir(parents=True, exist_ok=True)
    if given.seed is not None:
        try:
            one_seed(given, given.seed)
        except Interrupted as error:
            print(error)
        return 0
    if given.probe:
        probe(given)
        return 0
    done = True
    if given.part in ("all", "accuracy"):
        spared = given.speed_seconds if given.part == "all" else 0
        done = all_seeds(given, ends - spared)
    if given.part in ("all", "speed"):
        speeds(given, ends)
    print(write(given.out))
    print("all is done" if done else "something is left; the same command goes on")
    return int(not done)


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder with the standard files of CIFAR-10")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8, help="after which all runs save themselves and end")
    parser.add_argument("--part", choices=("all", "accuracy", "speed", "table"), default="all")
    parser.add_argument("--model", default="vit_small_patch16_224")
    parser.add_argument("--model-args", type=json.loads, default={"patch_size": 4})
    parser.add_argument("--epochs", type=int, default=20, help="of the teacher; its students get a tenth of them")
    parser.add_argument("--steps", type=int, help="of the teacher, instead of epochs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--parallel", type=int, default=3, help="seeds at a time")
    parser.add_argument("--workers", type=int, default=4, help="processes that load images, of each seed")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument(
        "--student-batch", type=int, help="of the students, who see as many images; --batch if not given"
    )
    parser.add_argument("--mechanisms", nargs="+", default=list(MECHANISMS))
    parser.add_argument("--convolution", type=int, default=3)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="pixels, of the speeds")
    parser.add_argument("--speed-model", default="vit_small_patch16_224")
    parser.add_argument("--speed-batch", type=int, default=64, help="at 224 pixels; fewer at more")
    parser.add_argument("--speed-seconds", type=float, default=75, help="of --minutes that are kept for the speeds")
    parser.add_argument("--probe", action="store_true", help="train a little, and say what all would take")
    parser.add_argument("--seed", type=int, help="one seed, in this process")
    return parser


if __name__ == "__main__":
    with orderly():
        raise SystemExit(main())
