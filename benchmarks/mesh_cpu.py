"""Attention over processes of one machine: two of them beside one, bytes sent, and two ways of the causal scan.

    python benchmarks/mesh_cpu.py --output benchmarks/results/NAME.json

Wants two idle cores. One process with one thread and two processes with one thread each take turns on the same call, of
131,072 tokens forward and backward; the ratio is that of the medians. Then four processes count the bytes that a call
sends, from 4,096 to 4 million tokens, and time the scan of states gathered at once and in doubling steps.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import affinear as af
from affinear.ops.distributed import merging

SHAPE = (1, 131072, 4, 64)
LENGTHS = (4096, 65536, 2**20, 2**22)
STATE = (1, 16, 64, 64)  # batch, heads and widths of a state that is scanned


def join(rank: int, size: int, store: str) -> dist.ProcessGroup:
    """Meet the other processes; each works with one thread."""
    torch.set_num_threads(1)
    wait = datetime.timedelta(minutes=10)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=size, timeout=wait)
    group = dist.group.WORLD
    assert group is not None
    return group


def train(tokens: list[Tensor], causal: bool, mesh: dist.ProcessGroup | None) -> None:
    """One call, forward and backward."""
    query, key, value = (x.requires_grad_() for x in tokens)
    out = af.attention(query, key, value, causal=causal, mesh=mesh)
    torch.autograd.grad(out, (query, key, value), tokens[2].detach())


def speed(rank: int, store: str, output: str, rounds: int) -> None:
    """What two processes do in turns: the first alone with all tokens, both with a half each."""
    group = join(rank, 2, store)
    whole = [torch.randn(SHAPE) for _ in range(3)]
    half = [x.chunk(2, dim=1)[rank].contiguous() for x in whole]
    report: dict[str, Any] = {}
    for causal in (False, True):
        alone: list[float] = []
        together: list[float] = []
        for turn in range(rounds + 1):
            for shared, times in ((False, alone), (True, together)):
                dist.barrier()
                start = time.perf_counter()
                if shared:
                    train(half, causal, group)
                elif rank == 0:
                    train(whole, causal, None)
                dist.barrier()
                if turn:  # the first turn warms up
                    times.append(1e3 * (time.perf_counter() - start))
        one, two = statistics.median(alone), statistics.median(together)
        row = {"one_process_ms": round(one, 1), "two_processes_ms": round(two, 1), "times_faster": round(one / two, 2)}
        report["causal" if causal else "full"] = row
    if rank == 0:
        Path(output).write_text(json.dumps(report))
    dist.destroy_process_group()


class Sent(TorchDispatchMode):
    """Bytes of every message that leaves this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace and "wait_tensor" not in func.name():
            self.bytes += args[0].nbytes
        return func(*args, **(kwargs or {}))


def traffic(rank: int, store: str, output: str, rounds: int) -> None:
    """What four processes send, and how long their scans take."""
    group = join(rank, 4, store)
    report: dict[str, Any] = {"bytes": {}, "scan_ms": {}}
    for causal in (False, True):
        for length in LENGTHS:
            with Sent() as sent:
                train([torch.randn(1, length // 4, 1, 16) for _ in range(3)], causal, group)
            report["bytes"][f"{'causal' if causal else 'full'}, {length} tokens"] = sent.bytes
    batch, heads, features, values = STATE
    tokens = torch.randn(batch, 100, heads, features), torch.randn(batch, 100, heads, values)
    state = af.summarize(*tokens)
    for name, limit in (("gathered", 8), ("in steps", 1)):
        merging.GATHER_UP_TO = limit
        times: list[float] = []
        for turn in range(4 * rounds + 1):
            dist.barrier()
            start = time.perf_counter()
            merging.before(state, group)
            if turn:
                times.append(1e3 * (time.perf_counter() - start))
        report["scan_ms"][name] = round(statistics.median(times), 2)
    if rank == 0:
        Path(output).write_text(json.dumps(report))
    dist.destroy_process_group()


def machine() -> dict[str, str | int]:
    """Where and with what this was measured."""
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
    lines = Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
    cpu = next((line.partition(":")[2].strip() for line in lines if "model name" in line), platform.processor())
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu,
        "cores": os.cpu_count() or 0,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit,
    }


def main() -> None:
    """Measure, print, and save if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7, help="timed turns")
    parser.add_argument("--output", type=Path, help="JSON file to write; it must not exist")
    arguments = parser.parse_args()
    if arguments.output and arguments.output.exists():
        parser.error(f"{arguments.output} exists; results are not overwritten, choose another name")
    os.environ["OMP_NUM_THREADS"] = "1"
    report: dict[str, Any] = {"machine": machine(), "load_before": os.getloadavg()[0], "shape": SHAPE}
    for name, work, processes in (("speed", speed, 2), ("traffic", traffic, 4)):
        with tempfile.TemporaryDirectory() as folder:
            output = f"{folder}/report.json"
            mp.spawn(work, (f"{folder}/store", output, arguments.rounds), processes)
            report[name] = json.loads(Path(output).read_text())
    print(json.dumps(report, indent=2))
    if arguments.output:
        draft = arguments.output.with_suffix(".draft")
        draft.write_text(json.dumps(report, indent=2) + "\n")
        draft.replace(arguments.output)


if __name__ == "__main__":
    main()
