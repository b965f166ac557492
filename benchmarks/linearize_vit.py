"""What a ViT keeps when its attention becomes linear: train it, swap it, distil it with a tenth of its training.

    PYTHONPATH=src python benchmarks/linearize_vit.py --data cifar-10 --out linearize --seconds 420

Every piece is a run of the engine in a folder of --out, so that the same command goes on where it was stopped; numbers
are appended to results.jsonl as they come, and report.md has them in a table. No piece begins, and none goes on, after
--seconds. The rows: the teacher; swapped and not trained; after the first stage; after both. The bar is a point below
the teacher.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import signal
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import timm
import torch

import affinear
from affinear import tasks
from affinear.train import Run, train
from affinear.train.checkpoint import LAST
from affinear.train.faults import Interrupted

MODEL = "vit_small_patch16_224"
MECHANISMS = ("mala", "linear", "nala", "inline")
SIZES = (224, 512, 1024)


class Results:
    """Rows of results, kept as they come."""

    def __init__(self, folder: Path) -> None:
        self.path, self.table = folder / "results.jsonl", folder / "report.md"
        lines = self.path.read_text().splitlines() if self.path.is_file() else []
        self.rows: list[dict[str, Any]] = [json.loads(line) for line in lines]

    def has(self, **key: Any) -> bool:
        """Whether there is such a row."""
        return any(all(row.get(name) == value for name, value in key.items()) for row in self.rows)

    def add(self, **row: Any) -> None:
        """Keep a row, and write the table anew."""
        row["machine"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        self.rows.append(row)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(row, flush=True)
        self.table.write_text(self.written())

    def written(self) -> str:
        """Accuracy by row and mechanism, and speed by size."""
        lines = ["| mechanism | row | seeds | top-1 | below the teacher |", "|---|---|---|---|---|"]
        accuracy = [row for row in self.rows if row["kind"] == "accuracy"]
        teachers = {row["seed"]: row["top1"] for row in accuracy if row["row"] == "teacher"}
        for mechanism, name in dict.fromkeys((row["mechanism"], row["row"]) for row in accuracy):
            found = [row for row in accuracy if (row["mechanism"], row["row"]) == (mechanism, name)]
            below = statistics.mean(100 * (teachers[row["seed"]] - row["top1"]) for row in found)
            top1 = statistics.mean(100 * row["top1"] for row in found)
            lines.append(f"| {mechanism} | {name} | {len(found)} | {top1:.2f} % | {below:.2f} points |")
        lines += [
            "",
            "| mechanism | pixels | tokens | images/s | softmax images/s | times |",
            "|---|---|---|---|---|---|",
        ]
        for row in (row for row in self.rows if row["kind"] == "speed"):
            times = row["per_second"] / row["softmax"]
            numbers = f"{row['per_second']:.0f} | {row['softmax']:.0f} | {times:.2f}"
            lines.append(f"| {row['mechanism']} | {row['pixels']} | {row['tokens']} | {numbers} |")
        return "\n".join(lines) + "\n"


def main() -> None:
    """Do what fits into the time."""
    given = _arguments()
    given.out.mkdir(parents=True, exist_ok=True)
    results, ends = Results(given.out), time.monotonic() + given.seconds
    stop = threading.Timer(given.seconds, os.kill, (os.getpid(), signal.SIGTERM))  # the engine saves, and stops
    stop.daemon = True
    stop.start()
    try:
        for seed in range(given.seeds):
            teacher = _teacher(given, seed, results)
            for mechanism in given.mechanisms:
                if time.monotonic() < ends - 5:
                    _student(given, seed, teacher, mechanism, results)
            if not seed:
                _speeds(given, results, ends)
    except Interrupted as error:
        print(error)
    finally:
        stop.cancel()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=420)
    parser.add_argument("--epochs", type=int, default=30, help="of the teacher; its students get a tenth of them")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--mechanisms", nargs="+", default=list(MECHANISMS))
    parser.add_argument("--convolution", type=int, default=3)
    parser.add_argument("--model-args", type=json.loads, default={"patch_size": 4})
    return parser.parse_args()


def _plain(given: argparse.Namespace, seed: int) -> dict[str, Any]:
    compiled = {"compile": False, "workers": given.workers, "seed": seed, "batch_size": given.batch}
    return {**compiled, "augment": "simple", "save_every": 200, "image_size": (32, 32)}


def _teacher(given: argparse.Namespace, seed: int, results: Results) -> Path:
    """Train the softmax network."""
    folder = given.out / f"teacher-{seed}"
    changes = {"epochs": given.epochs, "lr": 1e-3, "eval_every": 10, "smoothing": 0.1, "mixup": 0.0, "cutmix": 0.0}
    setup = tasks.recipe_for("classify", MODEL, "finetune", **_plain(given, seed), **changes)
    began = time.monotonic()
    result = train(Run(MODEL, given.data, folder, setup, given.model_args))
    if not results.has(row="teacher", seed=seed):
        seconds = time.monotonic() - began
        results.add(kind="accuracy", mechanism="softmax", row="teacher", seed=seed, top1=result.score["top1"],
                    epochs=given.epochs, seconds=seconds, per_second=result.per_second)  # fmt: skip
    return folder


def _student(given: argparse.Namespace, seed: int, teacher: Path, mechanism: str, results: Results) -> None:
    """Swap, evaluate, and distil in two stages: together a tenth of the teacher's epochs, and no more."""
    key: dict[str, Any] = {"kind": "accuracy", "mechanism": mechanism, "seed": seed}
    swap: dict[str, Any] = {"gain": True, "feature_map": "learned", "convolution": given.convolution}
    if not results.has(**key, row="swapped"):
        trained = tasks.load_trained(teacher / LAST)
        network, _ = affinear.linearize(trained.network, mechanism, **swap)
        trained = dataclasses.replace(trained, network=network)
        score = tasks.evaluate(trained, given.data, batch_size=given.batch, workers=given.workers)
        results.add(**key, row="swapped", top1=score["top1"])
    task = tasks.find("classify")
    images = task.open(given.data, task.settings()).sizes[0]
    steps = given.epochs * (images // given.batch) // 10
    weights = teacher / LAST
    for stage, share, rate in (("layers", 0.3, 1e-3), ("whole", 0.7, 5e-4)):
        folder = given.out / f"{mechanism}-{seed}-{stage}"
        length = {"steps": math.floor(share * steps), "eval_steps": None, "warmup_steps": 20, "lr": rate}
        changes = {**_plain(given, seed), **length, **swap, "mechanism": mechanism, "teacher": str(teacher / LAST)}
        setup = tasks.recipe_for("distil", MODEL, stage, **changes)
        began = time.monotonic()
        result = train(Run(MODEL, given.data, folder, setup, given.model_args, weights))
        if not results.has(**key, row=stage):
            seconds = time.monotonic() - began
            results.add(**key, row=stage, top1=result.score["top1"], steps=length["steps"], seconds=seconds)
        weights = folder / LAST


def _speeds(given: argparse.Namespace, results: Results, ends: float) -> None:
    """Images per second of inference, in turns with softmax, of fresh networks."""
    if not torch.cuda.is_available():
        return
    for pixels in SIZES:
        softmax = timm.create_model(MODEL, img_size=pixels).cuda().eval().to(torch.bfloat16)
        batch = max(1, 64 * 224**2 // pixels**2)
        images = torch.randn(batch, 3, pixels, pixels, device="cuda", dtype=torch.bfloat16)
        for mechanism in given.mechanisms:
            if results.has(kind="speed", mechanism=mechanism, pixels=pixels) or time.monotonic() > ends - 10:
                continue
            student, _ = affinear.linearize(softmax, mechanism, gain=True, feature_map="learned",
                                            convolution=given.convolution)  # fmt: skip
            ours, theirs = _in_turns(student, softmax, images)
            results.add(kind="speed", mechanism=mechanism, pixels=pixels, tokens=(pixels // 16) ** 2 + 1,
                        per_second=batch / ours, softmax=batch / theirs)  # fmt: skip


@torch.no_grad()
def _in_turns(one: torch.nn.Module, other: torch.nn.Module, images: torch.Tensor) -> tuple[float, float]:
    """Median seconds of each, measured in turns."""
    found: tuple[list[float], list[float]] = ([], [])
    for turn in range(13):
        for model, times in zip((one, other), found, strict=True):
            torch.cuda.synchronize()
            began = time.perf_counter()
            model(images)
            torch.cuda.synchronize()
            if turn > 2:
                times.append(time.perf_counter() - began)
    return statistics.median(found[0]), statistics.median(found[1])


if __name__ == "__main__":
    main()
