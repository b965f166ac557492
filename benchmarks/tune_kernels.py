"""Measure candidates for the table of launch parameters, `affinear/ops/triton/options.py`, on the GPU at hand.

    PYTHONPATH=src python benchmarks/tune_kernels.py --size small
    PYTHONPATH=src python benchmarks/tune_kernels.py --size large --seconds 120

Prints the time of every candidate and the rows of the table that win. `summarize` and `attention` make the same states
and have to agree on the tokens in a block: take the same for both. Look at the whole operator afterwards
(`affinear bench ops`); what wins alone may lose beside its neighbours.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import product

import torch
from torch import Tensor

import affinear as af
from affinear.ops.triton import launch
from affinear.ops.triton.options import Options
from affinear.ops.triton.rules import rule_of

# Mechanism and (B, H, N, D) whose states are of a size.
CASES = {
    "small": ("mala", (128, 1, 3136, 64)),
    "medium": ("nala", (128, 1, 3136, 64)),
    "large": ("mala", (4, 16, 16384, 128)),
    "wide": ("mala", (4, 16, 4096, 256)),
}
KERNELS = ("summarize", "attend", "attend_backward", "summarize_backward")
BLOCKS, WARPS, STAGES, REGISTERS = (16, 32, 64, 128), (4, 8), (2, 3), (None, 128)
TABLE = launch.options_for


def candidates() -> list[Options]:
    """What is tried, in order of the table."""
    return [Options(*values) for values in product(BLOCKS, WARPS, STAGES, REGISTERS)]


def use(kernel: str, options: Options) -> None:
    """Have one kernel built in another way than the table says."""

    def options_for(name: str, blocks: launch.Blocks, itemsize: int, rotary: bool = False) -> Options:
        return options if name == kernel else TABLE(name, blocks, itemsize, rotary)

    launch.options_for = options_for


def replay_time(calls: Sequence[Callable[[], object]], repeats: int = 11) -> float:
    """Median milliseconds of a call, replayed as a graph of them all."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times: list[float] = []
    for _ in range(repeats + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / len(calls))
    return statistics.median(times[3:])


def calls_of(kernel: str, inputs: Sequence[list[Tensor]], call: launch.Call) -> list[Callable[[], object]]:
    """Launches of one kernel, one for each set of inputs; what it needs of the others is made beforehand."""
    if kernel == "summarize":
        return [lambda x=x: launch.summarize_tokens(x[1], x[2], call) for x in inputs]
    states = [launch.summarize_tokens(x[1], x[2], call) for x in inputs]
    pairs = list(zip(inputs, states, strict=True))
    if kernel == "attend":
        return [lambda x=x, s=s: launch.attend_tokens(x[0], s, call) for x, s in pairs]
    if kernel in ("attend_backward", "paired_query", "paired_state"):  # the last two one after the other
        return [lambda x=x, s=s: launch.attend_tokens_backward(x[3], x[0], s, call) for x, s in pairs]
    grads = [launch.attend_tokens_backward(x[3], x[0], s, call)[1] for x, s in pairs]
    triples = [(*pair, grad) for pair, grad in zip(pairs, grads, strict=True)]
    return [lambda x=x, s=s, g=g: launch.summarize_tokens_backward(g, x[1], x[2], s, call) for x, s, g in triples]


def main() -> None:
    """Measure one size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=CASES, required=True)
    parser.add_argument("--seconds", type=float, default=600, help="stop before the next candidate after so many")
    arguments = parser.parse_args()
    name, (batch, heads, tokens, width) = CASES[arguments.size]
    mechanism = af.mechanisms()[name]
    rule = rule_of(mechanism)
    assert rule is not None
    call = launch.Call(rule, mechanism.scale_for(width), None, None, None, None)
    # Two sets of inputs, so that none finds its own in the cache.
    inputs = [
        [torch.randn(batch, tokens, heads, width, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
        for _ in range(2)
    ]
    began = time.monotonic()
    for kernel in KERNELS:
        best: tuple[float, Options] | None = None
        for options in candidates():
            if time.monotonic() - began > arguments.seconds:
                break
            use(kernel, options)
            try:
                milliseconds = replay_time(calls_of(kernel, inputs, call))
            except Exception as error:  # too much shared memory, mostly: not a candidate on this card
                print(f"{kernel:20} {options} {type(error).__name__}", flush=True)
                continue
            print(f"{kernel:20} {options} {milliseconds * 1000:8.1f} us", flush=True)
            best = min(best or (milliseconds, options), (milliseconds, options), key=lambda pair: pair[0])
        if best is not None:
            print(f'        "{kernel}": {best[1]},  # {best[0] * 1000:.1f} us', flush=True)


if __name__ == "__main__":
    main()
