"""Time and memory of the operator on a CPU, each as a ratio to what a user would write instead, in one run.

    python benchmarks/operator_cpu.py --output benchmarks/results/NAME.json

Rivals take turns, so that a noisy machine disturbs all of them alike; the ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
import weakref
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import affinear as af

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
SHAPE = (8, 4096, 4, 64)
LONG = (1, 65536, 4, 64)


def plain_mala(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """MALA as one would write it down: elu + 1, z, the key-value product, two terms."""
    scale, length = query.shape[-1] ** -0.5, key.shape[1]
    query, key = F.elu(query) + 1, F.elu(key) + 1
    z = scale * torch.einsum("bnhd,bhd->bnh", query, key.mean(1))[..., None]
    product = torch.einsum("bnhd,bnhe->bhde", key, value) * (scale / length)
    answer = torch.einsum("bnhd,bhde->bnhe", query, product)
    return answer * (1 + 1 / (z + 1e-6)) - z * value.mean(1, keepdim=True)


def causal_softmax(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Torch's own causal attention."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)


def causal_mala(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The library, causal."""
    return af.attention(query, key, value, causal=True)


COMPARISONS: dict[str, tuple[Attention, Attention]] = {
    "full, beside the plain formula": (af.attention, plain_mala),
    "causal, beside causal SDPA": (causal_mala, causal_softmax),
}


def forward(function: Attention, tokens: list[Tensor]) -> None:
    """Run without a graph."""
    with torch.no_grad():
        function(*tokens)


def forward_backward(function: Attention, tokens: list[Tensor]) -> None:
    """Run and differentiate with respect to all three."""
    leaves = [x.detach().requires_grad_() for x in tokens]
    function(*leaves).backward(tokens[0])


def compare(ours: Attention, rival: Attention, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of both, forward and forward + backward, and how many times faster ours is."""
    tokens = [torch.randn(SHAPE) for _ in range(3)]
    rows: dict[str, dict[str, float]] = {}
    for name, run in (("forward", forward), ("forward + backward", forward_backward)):
        times: tuple[list[float], list[float]] = ([], [])
        for turn in range(rounds + 1):
            for function, collected in zip((ours, rival), times, strict=True):
                start = time.perf_counter()
                run(function, tokens)
                if turn:  # the first turn warms up
                    collected.append(1e3 * (time.perf_counter() - start))
        mine, other = (statistics.median(collected) for collected in times)
        rows[name] = {"ours_ms": round(mine, 1), "rival_ms": round(other, 1), "times_faster": round(other / mine, 2)}
    return rows


class PeakMemory(TorchDispatchMode):
    """Bytes of all tensors made inside that are alive at once, at the worst moment."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, Tensor) and (address := (storage := x.untyped_storage()).data_ptr()) not in self.alive:
                self.alive[address] = storage.nbytes()
                weakref.finalize(storage, self.alive.pop, address, None)
        self.peak = max(self.peak, sum(self.alive.values()))
        return result


def memory(causal: bool, backward: bool) -> float:
    """Peak above inputs and output, as a multiple of the inputs; gradients count."""
    query, key, value = tokens = [torch.randn(LONG, requires_grad=backward) for _ in range(3)]
    cotangent = torch.randn(LONG)
    with PeakMemory() as tracker:
        tracker.alive.update({x.data_ptr(): 0 for x in (*tokens, cotangent)})
        out = af.attention(query, key, value, causal=causal)
        if backward:
            out.backward(cotangent)
    return round((tracker.peak - out.nbytes) / sum(x.nbytes for x in tokens), 2)


def machine() -> dict[str, str | int]:
    """Where and with what this was measured."""
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    return {
        "date": date.today().isoformat(),
        "cpu": cpu,
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit,
    }


def main() -> None:
    """Measure, print, and save if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=9, help="timed turns of each rival")
    parser.add_argument("--output", type=Path, help="JSON file to write; it must not exist")
    arguments = parser.parse_args()
    if arguments.output and arguments.output.exists():
        parser.error(f"{arguments.output} exists; results are not overwritten, choose another name")

    report: dict[str, Any] = {"machine": machine(), "shape": SHAPE, "long_shape": LONG, "speed": {}, "memory": {}}
    print(*(f"{key}: {value}" for key, value in report["machine"].items()), sep="  ")
    for name, (ours, rival) in COMPARISONS.items():
        report["speed"][name] = compare(ours, rival, arguments.rounds)
        for direction, row in report["speed"][name].items():
            print(
                f"{name:32s} {direction:20s} {row['ours_ms']:8.1f} ms  against {row['rival_ms']:8.1f} ms: "
                f"{row['times_faster']:.2f} times faster"
            )
    for causal in (False, True):
        for backward in (False, True):
            name = f"{'causal' if causal else 'full'}, {'forward + backward' if backward else 'forward'}"
            report["memory"][name] = memory(causal, backward)
            print(f"peak memory above inputs and output, {name:28s} {report['memory'][name]:.2f} times the inputs")
    if arguments.output:
        draft = arguments.output.with_suffix(".draft")
        draft.write_text(json.dumps(report, indent=2) + "\n")
        draft.replace(arguments.output)


if __name__ == "__main__":
    main()
