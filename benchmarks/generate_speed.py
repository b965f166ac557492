"""Sampling with a DiT at latents of 256 to 4096 pixels: images per second and memory by mechanism, against SDPA.

    PYTHONPATH=src python benchmarks/generate_speed.py --out generate-speed.json --minutes 6

A picture of 512 x 512 pixels is a latent of 64 x 64, which are 1,024 tokens; 1024 pixels are 4,096 of them, 2048 pixels
16,384 and 4096 pixels 65,536. Every network is the same DiT but for its mechanism; softmax goes through torch's
`scaled_dot_product_attention`. A cell is the whole sampler, `--steps` of Euler's without guidance and without an
autoencoder, in bfloat16; its forward passes are timed in turns with the other mechanisms' of that size, and images per
second are the batch over the median of a pass and the number of steps. `plain` is DiT as published; `parts` has MALA's
convolution, gate and rotary positions in every network alike. Rows are written as they come; what is there is not
measured again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn

import affinear.models  # noqa: F401  # pyright: ignore[reportUnusedImport]  # registers the names
from affinear.bench import machine
from affinear.bench.timing import seconds_of, synchronize
from affinear.models.making import make
from affinear.tasks.generate.task import AROUND

MECHANISMS = ("softmax", "linear", "mala", "mala_released", "nala", "inline", "none")
PIXELS = (256, 512, 1024, 2048, 4096)
REDUCED = 8  # pixels on a side for one of a latent's
CLASSES = 1000


def main() -> int:
    """Measure what is not there yet; 1 if the time was over before."""
    given = arguments().parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    told: dict[str, Any] = json.loads(given.out.read_text()) if given.out.is_file() else {"rows": []}
    told |= {"machine": machine.describe(device), "model": given.model, "steps": given.steps}
    rows: list[dict[str, Any]] = told["rows"]
    began = time.monotonic()
    for around in given.around.split(","):
        for pixels in map(int, given.pixels.split(",")):
            names = [name for name in given.mechanisms.split(",") if around == "parts" or name not in ONLY_WITH_PARTS]
            there = {row["mechanism"] for row in rows if (row["pixels"], row["around"]) == (pixels, around)}
            if there >= set(names):
                continue
            if time.monotonic() - began > 60 * given.minutes:
                print("the time is over; the same command goes on", flush=True)
                return 1
            rows[:] = [row for row in rows if (row["pixels"], row["around"]) != (pixels, around)]
            rows += size_of(given, names, around, pixels, device)
            beside = given.out.with_suffix(".part")
            beside.write_text(json.dumps(told, indent=1))
            beside.replace(given.out)
    print(table(rows))
    return 0


# Without rotary positions the released form is the other one, and without parts "none" has nothing at all.
ONLY_WITH_PARTS = ("mala_released", "none")


def size_of(
    given: argparse.Namespace, names: list[str], around: str, pixels: int, device: torch.device
) -> list[dict[str, Any]]:
    """All mechanisms at one size, in turns."""
    side = pixels // REDUCED
    tokens = (side // 2) ** 2
    batch = max(1, given.tokens // tokens)
    x = torch.randn(batch, 4, side, side, device=device)
    passes = {name: ready(given, name, around, x) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(given.turns + 2):  # two to warm up
        for name, ask in passes.items():
            spent = seconds_of(ask, device)
            if turn >= 2:
                seconds[name].append(spent)
    found: list[dict[str, Any]] = []
    for name in names:
        median = statistics.median(seconds[name])
        row: dict[str, Any] = {
            "mechanism": name,
            "around": around,
            "pixels": pixels,
            "tokens": tokens,
            "batch": batch,
            "compiled": not given.eager and device.type == "cuda",
            "seconds_of_a_pass": median,
            "turns": seconds[name],
            "images_per_second": batch / (given.steps * median),
            "peak_gb": peak(passes[name], device),
        }
        found.append(row)
        print(
            f"{around}, {pixels} px, {tokens:,} tokens x {batch}: {name} {row['images_per_second']:.3f} images/s, "
            f"{row['peak_gb']:.2f} GB",
            flush=True,
        )
    return found


def ready(given: argparse.Namespace, name: str, around: str, x: Tensor) -> Callable[[], Tensor]:
    """A forward pass of one network, in bfloat16, as the sampler asks for it."""
    own = {"learn_sigma": False, "num_classes": CLASSES, **(AROUND if around == "parts" else {})}
    network: nn.Module = make(given.model, {"mechanism": name, **own, **given.small}).eval().to(x.device)
    network.to(torch.bfloat16)
    if not given.eager and x.device.type == "cuda":
        torch._dynamo.config.recompile_limit = 256  # every network is another program for the same lines
        for block in network.get_submodule("blocks").children():  # which all have the same
            block.compile(dynamic=False)
    noisy, labels = x.to(torch.bfloat16), torch.zeros(len(x), dtype=torch.int64, device=x.device)
    times = torch.full((len(x),), 500.0, device=x.device)

    @torch.no_grad()
    def ask() -> Tensor:
        return network(noisy, times, labels)

    return ask


def peak(ask: Callable[[], Tensor], device: torch.device) -> float:
    """Gigabytes that one pass takes beyond what was there before it; 0 where nobody counts."""
    if device.type != "cuda":
        return 0.0
    synchronize(device)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    ask()
    synchronize(device)
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def table(rows: list[dict[str, Any]]) -> str:
    """Images per second beside softmax's, and memory."""
    lines = [
        "| around | pixels | tokens | mechanism | images/s | of SDPA's | GB of a pass |",
        "|---|---|---|---|---|---|---|",
    ]
    rates = {(row["around"], row["pixels"]): row for row in rows if row["mechanism"] == "softmax"}
    for row in rows:
        base = rates.get((row["around"], row["pixels"]))
        times = f"{row['images_per_second'] / base['images_per_second']:.2f}x" if base else "-"
        lines.append(
            f"| {row['around']} | {row['pixels']} | {row['tokens']:,} | {row['mechanism']} "
            f"| {row['images_per_second']:.3f} | {times} | {row['peak_gb']:.2f} |"
        )
    return "\n".join(lines)


def arguments() -> argparse.ArgumentParser:
    """What can be asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("generate-speed.json"))
    parser.add_argument("--model", default="dit_s_2")
    parser.add_argument("--mechanisms", default=",".join(MECHANISMS), help="with commas")
    parser.add_argument("--around", default="plain", help="plain, parts, or both with a comma")
    parser.add_argument("--pixels", default=",".join(map(str, PIXELS)), help="with commas")
    parser.add_argument("--tokens", type=int, default=131_072, help="of a whole batch; the batch follows")
    parser.add_argument("--steps", type=int, default=50, help="of the sampler")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=6.0, help="after which no size is begun")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--small", type=json.loads, default={}, help="JSON of the network's arguments, to try it out")
    return parser


if __name__ == "__main__":
    sys.exit(main())
