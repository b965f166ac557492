"""What attention over many GPUs would cost: a calculation from measured kernels and stated links, not a measurement.

    python benchmarks/mesh_cost.py            # prints the tables of docs/mesh.md

One layer of 16 heads 64 wide in bfloat16, batch 1, forward and backward. The work per token is what the kernels took on
one H200 (`benchmarks/results`), divided over the GPUs; causal attention has the states to make besides, taken as half
of what full attention is. Messages take a latency for each step and their bytes over the slowest link on their way.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import ceil, log2
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
HEADS, WIDTH, BYTES = 16, 64, 2
STATE = HEADS * (WIDTH * WIDTH + WIDTH + WIDTH + 1)  # numbers
GPUS = (1, 8, 64, 512)
TOKENS = (2**20, 2**24, 2**27, 2**30)
GATHER_UP_TO = 8  # as affinear.ops.distributed.merging has it

NODE = 8  # GPUs that NVLink connects
NVLINK = 450e9  # bytes per second, one way
NETWORK = 50e9  # bytes per second and GPU, one way: 400 Gbit/s
NVLINK_LATENCY, NETWORK_LATENCY = 5e-6, 15e-6  # seconds per step


@dataclass(frozen=True)
class Link:
    """The slowest link between so many GPUs."""

    gpus: int

    @property
    def bandwidth(self) -> float:
        """Bytes per second."""
        return NVLINK if self.gpus <= NODE else NETWORK

    @property
    def latency(self) -> float:
        """Seconds per step."""
        return NVLINK_LATENCY if self.gpus <= NODE else NETWORK_LATENCY

    def time(self, steps: float, sent: float) -> float:
        """Seconds for so many steps, in which each GPU sends so many bytes."""
        return 0.0 if self.gpus == 1 else steps * self.latency + sent / self.bandwidth


def measured(table: str, heads: int, tokens: int) -> float:
    """Seconds per token of a layer, forward and backward, as the kernels took them."""
    report = json.loads((RESULTS / f"2026-11-16-ops-{table}-h200.json").read_text())
    for row in report["rows"]:
        shape = row["shape"]
        ours = row["contender"] == "affinear triton" and row["direction"] == "forward + backward"
        if ours and shape["heads"] == heads and shape["tokens"] == tokens and shape["width"] == WIDTH:
            return 1e-3 * row["ms"] / (shape["batch"] * tokens) * (HEADS / heads)
    raise SystemExit(f"no measurement of {heads} heads and {tokens} tokens in the table {table!r}")


def full_exchange(gpus: int) -> float:
    """Seconds of the sums, there and back: a tree up and down, in float64 both ways."""
    return 2 * Link(gpus).time(2 * ceil(log2(gpus)), 2 * 8 * STATE * (gpus - 1) / gpus)


def causal_exchange(gpus: int) -> float:
    """Seconds of the scan, there and back, in float32: gathered, or in doubling steps."""
    if gpus <= GATHER_UP_TO:
        return 2 * Link(gpus).time(ceil(log2(gpus)), 4 * STATE * (gpus - 1))
    steps = 1 + ceil(log2(gpus - 1))
    return 2 * Link(gpus).time(steps, 4 * STATE * steps)


def full_bytes(gpus: int) -> float:
    """Bytes that a GPU sends for full attention, forward and backward."""
    return 2 * 2 * 8 * STATE * (gpus - 1) / gpus


def ring_bytes(gpus: int, tokens: int) -> float:
    """Bytes that a GPU sends for ring attention: keys and values all the way round, and again with their gradients."""
    once = (gpus - 1) * 2 * (tokens / gpus) * HEADS * WIDTH * BYTES
    return 3 * once


def ulysses_bytes(gpus: int, tokens: int) -> float | None:
    """Bytes that a GPU sends for all-to-all of heads: three tensors there, one back, and their gradients."""
    if gpus > HEADS:
        return None
    return 2 * 4 * (tokens / gpus) * HEADS * WIDTH * BYTES * (gpus - 1) / gpus


def seconds(x: float) -> str:
    """A time to two digits."""
    for unit, factor in (("s", 1), ("ms", 1e3), ("µs", 1e6)):
        if x * factor >= 1 or unit == "µs":
            return f"{x * factor:.2g} {unit}" if x * factor < 100 else f"{x * factor:.0f} {unit}"
    raise AssertionError


def size(x: float) -> str:
    """Bytes to two digits."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if x >= factor or unit == "kB":
            return f"{x / factor:.2g} {unit}" if x / factor < 100 else f"{x / factor:.0f} {unit}"
    raise AssertionError


def count(tokens: int) -> str:
    """A power of two as people say it."""
    return f"{tokens // 2**30}B" if tokens >= 2**30 else f"{tokens // 2**20}M"


def table(head: list[str], rows: list[list[str]]) -> str:
    """In Markdown, numbers to the right."""
    lines = [head, ["---:"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def times() -> str:
    """Work and exchange of a layer, full and causal."""
    full = measured("non-causal", 16, 131072)
    causal = measured("causal", 16, 4096) + full / 2
    rows: list[list[str]] = []
    for tokens in TOKENS:
        for gpus in GPUS:
            cells = [count(tokens), str(gpus)]
            for per_token, exchange in ((full, full_exchange(gpus)), (causal, causal_exchange(gpus))):
                work = per_token * tokens / gpus
                share = f"{exchange / (work + exchange):.1%}" if gpus > 1 else "0"
                cells += [seconds(work), seconds(exchange) if gpus > 1 else "0", share]
            rows.append(cells)
    head = ["tokens", "GPUs", "full: work", "exchange", "share", "causal: work", "exchange", "share"]
    return table(head, rows)


def traffic() -> str:
    """Bytes that each GPU sends per layer, beside those of softmax attention over many GPUs."""
    rows: list[list[str]] = []
    for tokens in TOKENS:
        for gpus in GPUS[1:]:
            ulysses = ulysses_bytes(gpus, tokens)
            other = "more GPUs than heads" if ulysses is None else size(ulysses)
            rows.append([count(tokens), str(gpus), size(full_bytes(gpus)), size(ring_bytes(gpus, tokens)), other])
    return table(["tokens", "GPUs", "states", "ring attention", "Ulysses"], rows)


def main() -> None:
    """Print both tables."""
    print(times(), traffic(), sep="\n\n")


if __name__ == "__main__":
    main()
