"""Whole networks against each other, from random weights: accuracy on CIFAR-10 at 64 pixels, and speed at 224 and 1024.

    PYTHONPATH=src python evidence/networks.py --data cifar-10 --output outputs --minutes 6

times each of twelve networks of the smallest published size alone, and then trains each once for each seed, with one
recipe. `networks.json` is written after every network, seed by seed; when the time is over the same command goes on. A
training step is one CUDA graph where the network allows it, and passes are timed with and without, so that the host's
speed can be told from the GPU's. Needs torch, torchvision, timm, accelerate, safetensors and numpy.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import affinear.models  # noqa: F401  # pyright: ignore[reportUnusedImport]  # registers the names
from affinear.bench import machine
from affinear.bench.timing import capture_or_why, run_aside, synchronize
from affinear.models.catalogue import count_macs
from affinear.models.making import make, outline, takes
from affinear.tasks.classify.data import ArraySource, open_data
from running.files import keep

NETWORKS = (
    "mavit_tiny",
    "nalaformer_tiny",
    "inline_deit_tiny",
    "inline_pvt_tiny",
    "inline_swin_tiny",
    "inline_cswin_tiny",
    "ravlt_tiny",
    "mila_tiny",
    "rmt_tiny",
    "secvit_tiny",
    "swin_tiny_patch4_window7_224",
    "convnext_tiny",
)
SIZES = {224: 64, 1024: 4}  # pixels a side, and images at a time
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
WARMUP = 0.1  # of all steps
EAGER = 12  # steps before one is captured
SHIFT = 8  # pixels of 64 by which an image is moved at most
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Halves = tuple[Tensor, Tensor, Tensor, Tensor]


def main() -> int:
    """Train and time what is missing, write it, print it, and return 1 if something is left to do."""
    given = arguments().parse_args()
    until = math.inf if given.minutes is None else time.monotonic() + 60 * given.minutes
    settings = {name: getattr(given, name) for name in ("pixels", "epochs", "batch", "lr", "weight_decay", "limit")}
    names = given.networks.split(",") if given.networks else NETWORKS
    path = given.output / "networks.json"
    found = read(path, settings)
    data = halves(given.data, given.limit)
    left = False
    for entry, kind, work in jobs(names, range(given.seeds), data, given):
        if "error" not in found[kind].get(entry, {"error": "not done yet"}):
            continue
        if time.monotonic() > until:
            left = True
            break
        found[kind][entry] = work()
        keep(path, found)
        print(f"{entry}: {told(found[kind][entry])}", file=sys.stderr, flush=True)
    print(table(found, names))
    if left:
        print("The time is over; the same command goes on.")
    return int(left)


def jobs(
    names: tuple[str, ...] | list[str], seeds: range, data: Halves, given: argparse.Namespace
) -> Iterator[tuple[str, str, Callable[[], dict[str, Any]]]]:
    """What there is to do: speeds, which are quick, and then the trainings, all networks of a seed before the next."""
    sizes = [size for size in SIZES if size <= given.largest]
    for size in sizes:
        for name in names:
            yield f"{name}, {size} px", "speeds", lambda name=name, size=size: guarded(speed, name, size)
    for seed in seeds:
        for name in names:
            yield f"{name}, seed {seed}", "runs", lambda name=name, seed=seed: guarded(train, name, seed, data, given)


def guarded(work: Callable[..., dict[str, Any]], name: str, *rest: Any) -> dict[str, Any]:
    """What a piece of work gives, or why there is nothing: one network that fails leaves the others to go on."""
    try:
        return {"network": name, **work(name, *rest)}
    except (RuntimeError, ValueError) as error:
        return {"network": name, "error": (str(error).strip().splitlines() or [type(error).__name__])[0]}
    finally:
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()


# Training


def halves(data: str, limit: int | None) -> Halves:
    """Images (N, 3, 32, 32) in bytes and their classes, to learn from and to be tested with, on the device."""
    images = open_data(data)
    tensors: list[Tensor] = []
    for source in (images.train, images.test):
        if not isinstance(source, ArraySource):
            raise ValueError(f"data: expected small images that fit into memory, as CIFAR-10's do, got {data}")
        pixels, labels = torch.as_tensor(source.pixels), torch.as_tensor(source.labels).long()
        pixels = pixels if pixels.shape[1] in (1, 3) else pixels.permute(0, 3, 1, 2)
        tensors += [pixels[:limit].contiguous().to(DEVICE), labels[:limit].to(DEVICE)]
    return tensors[0], tensors[1], tensors[2], tensors[3]


def train(name: str, seed: int, data: Halves, given: argparse.Namespace) -> dict[str, Any]:
    """Train one network and test it."""
    images, labels, test_images, test_labels = data
    torch.manual_seed(seed)
    classes, channels = int(max(labels.max(), test_labels.max())) + 1, images.shape[1]
    network = network_of(name, given.pixels, num_classes=classes, in_chans=channels)
    order = torch.Generator(DEVICE).manual_seed(seed)
    batch = min(given.batch, len(images))
    steps = given.epochs * (len(images) // batch)
    step = Step(network, (batch, channels, given.pixels, given.pixels), given.weight_decay)
    began, number = time.perf_counter(), 0
    for _ in range(given.epochs):
        for chosen in torch.randperm(len(images), generator=order, device=DEVICE).split(batch):
            if len(chosen) < batch:
                continue
            step.set_rate(given.lr * schedule(number, steps))
            step(varied(prepared(images[chosen], given.pixels), order), labels[chosen])
            number += 1
    loss = step.loss.item()
    seconds = time.perf_counter() - began
    return {
        "seed": seed,
        "top1": accuracy(network, test_images, test_labels, given.pixels, batch),
        "loss": loss,
        "steps": number,
        "seconds": seconds,
        "images_per_second": number * batch / seconds,
        "graphed": step.graph is not None,
        "not_graphed_because": step.why,
    }


class Step:
    """A training step, captured as a CUDA graph after some eager ones, where that is possible."""

    def __init__(self, network: nn.Module, shape: tuple[int, ...], weight_decay: float) -> None:
        self.network = network.train()
        decayed = [weight for weight in network.parameters() if weight.ndim > 1]
        others = [weight for weight in network.parameters() if weight.ndim <= 1]
        groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        graphs = DEVICE.type == "cuda"
        rate: Any = torch.zeros((), device=DEVICE) if graphs else 0.0  # what a graph reads has to be a tensor
        self.optimizer = torch.optim.AdamW(
            groups, lr=rate, weight_decay=weight_decay, capturable=graphs, foreach=graphs
        )
        self.images, self.labels = torch.zeros(shape, device=DEVICE), torch.zeros(shape[0], dtype=torch.long).to(DEVICE)
        self.loss = torch.zeros((), device=DEVICE)
        self.graph: Any = None
        self.why = "" if graphs else "no GPU"
        self.side = torch.cuda.Stream() if graphs else None
        self.number = 0

    def set_rate(self, value: float) -> None:
        """The learning rate of the next step."""
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(value)
            else:
                group["lr"] = value

    def __call__(self, images: Tensor, labels: Tensor) -> None:
        """One step on these images."""
        self.images.copy_(images)
        self.labels.copy_(labels)
        if self.number == EAGER and not self.why:
            self.graph, self.why = capture_or_why(self.compute)  # which computes nothing
        self.number += 1
        if self.graph is not None:
            self.graph.replay()
        elif self.side is None or self.why:
            self.compute()
        else:  # eager steps on a stream of their own, as capturing asks for
            run_aside([self.compute], self.side)

    def compute(self) -> None:
        """Forward, backward, and the optimizer."""
        self.optimizer.zero_grad(set_to_none=True)
        with half():
            logits = self.network(self.images)
        loss = F.cross_entropy(logits.float(), self.labels, label_smoothing=0.1)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0, foreach=True)
        self.optimizer.step()
        self.loss.copy_(loss.detach())


def half() -> torch.autocast:
    """bfloat16 on a GPU; graphs do not get along with its cache of weights."""
    return torch.autocast(DEVICE.type, torch.bfloat16, enabled=DEVICE.type == "cuda", cache_enabled=False)


def schedule(number: int, steps: int) -> float:
    """Share of the learning rate: up in a line, down along a cosine."""
    warm = max(1, round(WARMUP * steps))
    if number < warm:
        return (number + 1) / warm
    return 0.5 + 0.5 * math.cos(math.pi * (number - warm) / max(1, steps - warm))


def prepared(images: Tensor, pixels: int) -> Tensor:
    """Bytes as normalised numbers, resized."""
    mean, std = (torch.tensor(numbers[: images.shape[1]], device=DEVICE)[:, None, None] for numbers in (MEAN, STD))
    images = (images.float() / 255 - mean) / std
    return F.interpolate(images, size=(pixels, pixels), mode="bilinear", align_corners=False, antialias=False)


def varied(images: Tensor, generator: torch.Generator) -> Tensor:
    """Images mirrored by chance and moved by some pixels, zeros where nothing is left."""
    count, _, height, width = images.shape
    mirrored = torch.rand(count, generator=generator, device=DEVICE) < 0.5
    images = torch.where(mirrored[:, None, None, None], images.flip(-1), images)
    moved = torch.randint(2 * SHIFT + 1, (2, count, 1), generator=generator, device=DEVICE)
    rows, columns = (torch.arange(side, device=DEVICE) + by for side, by in zip((height, width), moved, strict=True))
    padded = F.pad(images, (SHIFT,) * 4)
    return padded[torch.arange(count, device=DEVICE)[:, None, None], :, rows[:, :, None], columns[:, None]].permute(
        0, 3, 1, 2
    )


@torch.no_grad()
def accuracy(network: nn.Module, images: Tensor, labels: Tensor, pixels: int, batch: int) -> float:
    """Share of the images that are told right."""
    network.eval()
    right = torch.zeros((), dtype=torch.long, device=DEVICE)
    for some, truth in zip(images.split(batch), labels.split(batch), strict=True):
        with half():
            right += (network(prepared(some, pixels)).argmax(1) == truth).sum()
    return right.item() / len(images)


# Speed


@torch.no_grad()
def speed(name: str, size: int) -> dict[str, Any]:
    """Images per second and memory of inference, in bfloat16, this network alone."""
    batch = SIZES[size] if DEVICE.type == "cuda" else 1
    network = network_of(name, size).eval()
    images = torch.randn(batch, 3, size, size, device=DEVICE).contiguous(memory_format=torch.channels_last)

    def forward() -> Tensor:
        with half():
            return network(images)

    before = torch.cuda.memory_allocated() if DEVICE.type == "cuda" else 0
    forward()
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    eager = rate_of(forward, batch)
    memory = torch.cuda.max_memory_allocated() - before if DEVICE.type == "cuda" else None
    graphed, why = graphed_rate(forward, batch)
    return {
        "size": size,
        "batch": batch,
        "parameters": sum(weight.numel() for weight in network.parameters()),
        "gmacs": count_macs(outline(name, sized(name, size)).eval(), (3, size, size)) / 1e9,
        "eager_images_per_second": eager,
        "graphed_images_per_second": graphed,
        "not_graphed_because": why,
        "activation_bytes": memory,
    }


def rate_of(call: Callable[[], object], batch: int) -> float:
    """Images per second, the median of three rounds of a seventh of a second or more."""
    rounds: list[float] = []
    for _ in range(4):  # the first one warms up
        began, calls = time.perf_counter(), 0
        while calls < 3 or time.perf_counter() - began < 0.15:
            call()
            calls += 1
            if calls % 4 == 0:
                synchronize(DEVICE)
        synchronize(DEVICE)
        rounds.append(calls * batch / (time.perf_counter() - began))
    return statistics.median(rounds[1:])


def graphed_rate(call: Callable[[], object], batch: int) -> tuple[float | None, str]:
    """The same of a CUDA graph; None, and why, where there is none."""
    if DEVICE.type != "cuda":
        return None, "no GPU"
    run_aside([call])
    graph, why = capture_or_why(call)
    return (None if graph is None else rate_of(graph.replay, batch)), why


def network_of(name: str, size: int, **given: Any) -> nn.Module:
    """The network with fresh weights, for images of this size, without stochastic depth, channels last in memory."""
    network = make(name, {**sized(name, size), "drop_path_rate": 0.0, **given})
    return network.to(DEVICE, memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


def sized(name: str, size: int) -> dict[str, Any]:
    """The size of images, for networks that want to be told."""
    return {"img_size": size} if "img_size" in takes(name) else {}


# What was found


def read(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """What was found before, if it was found in the same way."""
    if not path.is_file():
        return {"settings": settings, "machine": machine.describe(DEVICE), "runs": {}, "speeds": {}}
    found = json.loads(path.read_text(encoding="utf-8"))
    if found["settings"] != settings:
        raise ValueError(f"output: {path} was made with {found['settings']}, not {settings}; give another folder")
    return found


def told(entry: dict[str, Any]) -> str:
    """One result in a few words."""
    if "error" in entry:
        return f"failed: {entry['error']}"
    if "top1" in entry:
        return f"{100 * entry['top1']:.1f} %, {entry['seconds']:.1f} s, {entry['images_per_second']:,.0f} images/s"
    graphed = entry["graphed_images_per_second"]
    return f"{entry['eager_images_per_second']:,.0f} images/s, graphed {'-' if graphed is None else f'{graphed:,.0f}'}"


def table(found: dict[str, Any], names: tuple[str, ...] | list[str]) -> str:
    """A line for each network, as Markdown."""
    sizes = sorted({entry["size"] for entry in found["speeds"].values() if "size" in entry})
    heads = ["network", "top-1"]
    for size in sizes:
        heads += [f"GMACs at {size}", "images/s", "graphed", "MB of activations"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    keys = (("gmacs", 1), ("eager_images_per_second", 1), ("graphed_images_per_second", 1), ("activation_bytes", 1e6))
    for name in names:
        top1 = [100 * run["top1"] for run in found["runs"].values() if run["network"] == name and "top1" in run]
        spread = f" ± {statistics.stdev(top1):.1f}" if len(top1) > 1 else ""
        cells = [name, f"{statistics.fmean(top1):.1f}{spread} ({len(top1)})" if top1 else "-"]
        cells += [number(found["speeds"].get(f"{name}, {size} px", {}), *key) for size in sizes for key in keys]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def number(entry: dict[str, Any], key: str, unit: float) -> str:
    """A number of an entry, or a dash."""
    value = entry.get(key)
    return "-" if value is None else f"{value / unit:,.1f}"


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder with the standard files of CIFAR-10, or 'digits'")
    parser.add_argument("--output", required=True, type=Path, help="folder for networks.json")
    parser.add_argument("--networks", help="some of them, or others of timm's, with commas")
    parser.add_argument("--seeds", default=3, type=int, help="how many")
    parser.add_argument("--epochs", default=4, type=int, help="passes over the images")
    parser.add_argument("--batch", default=512, type=int, help="images of a training step")
    parser.add_argument("--pixels", default=64, type=int, help="side to which images are resized for training")
    parser.add_argument("--lr", default=1e-3, type=float, help="learning rate at its height")
    parser.add_argument("--weight-decay", default=0.05, type=float, help="of AdamW")
    parser.add_argument("--largest", default=1024, type=int, help="side of the largest images that are timed")
    parser.add_argument("--limit", type=int, help="at most so many images of each half, for a trial")
    parser.add_argument("--minutes", type=float, help="stop after so many, between two networks")
    return parser


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except ValueError as error:  # of what was asked for: a sentence, which needs no traceback
        raise SystemExit(f"{error}.") from None
