"""What segmentation costs on one GPU: images per second and memory, by backbone and by the size of images.

    PYTHONPATH=src python evidence/segment_costs.py alone --output outputs
    PYTHONPATH=src python evidence/segment_costs.py upernet --output outputs
    PYTHONPATH=src python evidence/segment_costs.py growth --output outputs
    PYTHONPATH=src python evidence/segment_costs.py counted --output outputs

`alone` measures each arm of `segment.py` by itself: images per second and memory of a training step that is one CUDA
graph, whole photos of CamVid, parameters and multiply-adds. `upernet` does so for UperNet at 512 x 2048, two images at
a time, eager. `growth` takes one image through forward and backward of a backbone, from 512 x 512 up to 4096 x 4096,
size by size, and `counted` counts what is kept for backward, which needs no GPU. All write after every row and end
after `--minutes`; the first three wait, when all is ready, for the file of `--begin`, if one is named. `segment.py
page` writes the page about all of it.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import timm
import torch
from timm.optim import create_optimizer_v2
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from affinear import tasks
from affinear.bench.timing import seconds_of, synchronize
from affinear.models.catalogue import count_macs
from affinear.models.heads import Segmenter
from affinear.tasks.segment.work import pixel_loss
from affinear.train.settings import parse_size
from running.captured import Captured
from running.files import keep
from running.kept import left_behind
from running.learning import Learner, half
from running.machine import machine
from running.options import arms_of, without_traceback
from running.steps import step_seconds
from segment import ARMS, LINEAR, USUAL

ALONE, BATCH, CLASSES = (352, 480), 16, 11  # whole photos
UPERNETS = {"mavit_small_linear": {}, "mavit_small": {}, "swin_small_patch4_window7_224": {}}
WIDE, WIDE_BATCH, WIDE_CLASSES = (512, 2048), 2, 150
GROWING = (512, 768, 1024, 1536, 2048, 3072, 4096)  # pixels a side
PATIENCE = 4.0  # seconds that a pass may take before larger images are left out
TOLD = 0.1  # seconds between looks for the file of `--begin`
WARMED = 3  # steps of what is measured alone that come before its graph


def main() -> int:
    """Measure what is asked for; 1 if the time was over before all was."""
    given = arguments().parse_args()
    for what in given.what:
        rows: dict[tuple[str, int | None], dict[str, Any]] = {}
        for row in MEASURED[what](given):
            rows[row["name"], row.get("side")] = row  # of more turns than before, where it was there
            keep(given.output / f"{what}.json", {"machine": machine(), "rows": list(rows.values())})
            if given.until is not None and time.time() > given.until:
                said(f"the time is over; what {what} has is kept")
                return 1
    return 0


def begin(given: argparse.Namespace) -> None:
    """Wait for the file of `--begin`, if there is one, and have the time run from then on, if it does not yet."""
    if given.begin is not None and not given.begin.is_file():
        said(f"waiting for {given.begin}")
        while not given.begin.is_file():
            time.sleep(TOLD)
    if given.until is None:
        given.until = time.time() + 60 * given.minutes


def said(text: str) -> None:
    """A line of what is measured."""
    print(text, flush=True)


def alone(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Each arm by itself: a training step as `camvid` has it, one CUDA graph."""
    chosen = {arm: ARMS[arm] for arm in arms_of(given.arms, USUAL, ARMS)}
    networks = {arm: (model, "semantic_fpn", args) for arm, (model, args) in chosen.items()}
    return measured(given, networks, given.size or ALONE, given.batch or BATCH, CLASSES, graph=True)


def upernet(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """UperNet at 512 x 2048."""
    networks: dict[str, tuple[str, str, dict[str, Any]]] = {
        name: (name, "upernet", args) for name, args in UPERNETS.items()
    }
    return measured(given, networks, given.size or WIDE, given.batch or WIDE_BATCH, WIDE_CLASSES)


def growth(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Peak memory and seconds of one image, forward and backward, for larger and larger images.

    Softmax is measured twice: by torch's fused kernel, which keeps no weights, and by the formula, which does. Weights
    are bfloat16, since under autocast softmax would go forward once more in its backward pass.
    """
    formula, fused = [SDPBackend.MATH], [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]
    arms: dict[str, tuple[dict[str, Any], list[SDPBackend]]] = {
        "linear": ({}, fused),
        "softmax, weights kept": ({"mechanism": "softmax"}, formula),
        "softmax, fused": ({"mechanism": "softmax"}, fused),
    }
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32  # which a CPU takes minutes less for
    networks = {name: timm.create_model(LINEAR, features_only=True, **args) for name, (args, _) in arms.items()}
    for network in networks.values():
        network.to(device, dtype).to(memory_format=torch.channels_last).train()  # pyright: ignore[reportCallIssue]
    sides = sides_of(given)
    for name, network in networks.items():
        with sdpa_kernel(arms[name][1], set_priority=True):
            grown_or_why(network, sides[0], device)  # which builds its kernels
    begin(given)
    for side in sides:
        for name in tuple(networks):
            row: dict[str, Any] = {"name": name, "side": side, "model": LINEAR, "dtype": str(dtype).split(".")[1]}
            with sdpa_kernel(arms[name][1], set_priority=True):
                row |= grown_or_why(networks[name], side, device)
            told = row.get("error") or "{peak_gb:.2f} GB, {seconds:.3f} s".format(**row)
            said(f"{name}, {side} px: {told}")
            if "error" in row or row["seconds"] > PATIENCE:
                del networks[name]
            yield row


def sides_of(given: argparse.Namespace) -> list[int]:
    """Sides of the images that grow, up to the one that is asked for."""
    most = given.size[0] if given.size else GROWING[-1]
    return [side for side in GROWING if side <= most] or [most]


def counted(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Bytes that one image's forward pass leaves for backward, in bfloat16, for larger and larger images; no GPU."""
    for side in sides_of(given):
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
    images = torch.randn(1, 3, side, side, dtype=next(network.parameters()).dtype, device=device)
    images = images.contiguous(memory_format=torch.channels_last)
    seconds, before = 0.0, 0
    for _ in range(2):
        network.zero_grad(set_to_none=True)
        before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        synchronize(device)
        began = time.perf_counter()
        maps = network(images)
        torch.stack([one.float().square().mean() for one in maps]).sum().backward()
        synchronize(device)
        seconds = time.perf_counter() - began
    peak = torch.cuda.max_memory_allocated() - before if device.type == "cuda" else 0
    return {"peak_gb": peak / 2**30, "seconds": seconds, "tokens": (side // 4) ** 2}


def grown_or_why(network: nn.Module, side: int, device: torch.device) -> dict[str, Any]:
    """The same, or why there is nothing: what fails at one size says nothing about another network."""
    try:
        return grown(network, side, device)
    except torch.OutOfMemoryError:
        return {"error": "out of memory"}
    except RuntimeError as error:
        return {"error": str(error).strip().splitlines()[0]}
    finally:
        network.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()


def measured(
    given: argparse.Namespace,
    networks: Mapping[str, tuple[str, str, dict[str, Any]]],
    size: tuple[int, int],
    batch: int,
    classes: int,
    *,
    graph: bool = False,
) -> Iterator[dict[str, Any]]:
    """Images per second, in turns, and peak memory of training steps, each network by itself; told after each turn.

    All networks are made, and build their kernels by one step, before anything is measured.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    stepping = graphed if graph else eager
    rows: dict[str, dict[str, Any]] = {}
    speeds: dict[str, list[float]] = {name: [] for name in networks}
    made: dict[str, Segmenter] = {}
    for name, (model, head, args) in networks.items():
        made[name] = Segmenter(model, head, classes, model_args=args)
        next(stepping(made[name], size, batch, device, given.compile))
        made[name] = made[name].cpu()
        with torch.device("meta"):
            macs = count_macs(Segmenter(model, head, classes, model_args=args).eval(), (3, *size))
        count = sum(parameter.numel() for parameter in made[name].parameters())
        about = {"size": size, "batch": batch, "compiled": given.compile, "dtype": "bfloat16 autocast", "graph": graph}
        rows[name] = {"name": name, "parameters": count, "gmacs": macs / 1e9, **about}
        said(f"{name} is made")
    torch.cuda.empty_cache()
    begin(given)
    for turn, name in itertools.product(range(given.turns), networks):
        seconds, peak = taken(stepping(made[name], size, batch, device, given.compile), given, device)
        made[name] = made[name].cpu()
        speeds[name].append(batch / statistics.median(seconds))
        row = rows[name]
        row |= {"peak_gb": peak, "images_per_second": statistics.median(speeds[name]), "turns": speeds[name]}
        said(
            f"turn {turn + 1}: {name} {speeds[name][-1]:.1f} images/s, {peak or float('nan'):.1f} GB, "
            f"{row['parameters'] / 1e6:.1f}M parameters, {row['gmacs']:.0f} GMACs"
        )
        yield row


def taken(steps: Iterator[float], given: argparse.Namespace, device: torch.device) -> tuple[list[float], float | None]:
    """Seconds of steps that come after some that are not counted, and the peak memory in GB."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    for _ in range(given.warm):
        next(steps)
    seconds = [next(steps) for _ in range(given.steps_timed)]
    return seconds, torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None


def eager(
    network: Segmenter, size: tuple[int, int], batch: int, device: torch.device, compiled: bool
) -> Iterator[float]:
    """Training steps without end, each with the seconds it took: forward, backward and AdamW."""
    network = network.to(device, memory_format=torch.channels_last).train()  # pyright: ignore[reportCallIssue]
    optimizer = create_optimizer_v2(network, opt="adamw", lr=1e-5, weight_decay=0.01)
    call = torch.compile(network) if compiled else network
    images, labels = noise(network, size, batch, device)

    def loss() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            logits = call(images)
        losses = [pixel_loss(found, labels) for found in logits]
        return sum(losses[1:], losses[0])

    while True:
        yield step_seconds(loss, optimizer, device)


def graphed(
    network: Segmenter, size: tuple[int, int], batch: int, device: torch.device, compiled: bool
) -> Iterator[float]:
    """The same of steps of `camvid`, which become one CUDA graph after some.

    Raises:
        RuntimeError: If they do not.
    """
    network = network.to(device, memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    call = torch.compile(network) if compiled else network
    images, labels = noise(network, size, batch, device)

    def loss(_: Tensor) -> Tensor:
        with half(device):
            logits = call(images)
        return pixel_loss(logits[0], labels)

    recipe = tasks.recipe_for("segment", LINEAR, "small").recipe
    captured = Captured(Learner(network, recipe, loss, device), device, eager=WARMED)
    while True:
        yield seconds_of(captured, device)
        if captured.why and device.type == "cuda":
            raise RuntimeError(f"a step became no graph: {captured.why}")


def noise(network: Segmenter, size: tuple[int, int], batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Images and labels."""
    images = torch.randn(batch, 3, *size, device=device).contiguous(memory_format=torch.channels_last)
    return images, torch.randint(network.num_classes, (batch, *size), device=device)


MEASURED = {"alone": alone, "upernet": upernet, "growth": growth, "counted": counted}


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=tuple(MEASURED), help="which parts")
    parser.add_argument("--output", required=True, type=Path, help="folder for JSON")
    parser.add_argument("--arms", help="alone: some of the arms, with commas")
    parser.add_argument("--minutes", default=60.0, type=float, help="end after so many, with the rows that are there")
    parser.add_argument("--begin", type=Path, help="a file to wait for, when all is ready; minutes count from it")
    parser.add_argument(
        "--size", type=parse_size, help="another height and width, such as 64x64; growth, counted: the largest"
    )
    parser.add_argument("--batch", type=int, help="alone, upernet: another number of images")
    parser.add_argument("--compile", action="store_true", help="alone, upernet: through torch.compile")
    parser.add_argument("--turns", default=3, type=int, help="alone, upernet: how often each network has its turn")
    parser.add_argument("--warm", default=5, type=int, help="alone, upernet: steps before the clock starts")
    parser.add_argument("--steps-timed", default=20, type=int, help="alone, upernet: steps that are timed in a turn")
    parser.set_defaults(until=None)
    return parser


if __name__ == "__main__":
    raise SystemExit(without_traceback(main))
