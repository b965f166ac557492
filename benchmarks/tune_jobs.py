"""Candidates for the shapes of blocks and strips, as jobs of `speed.py`: all are built at once, then timed.

PYTHONPATH=src:benchmarks python benchmarks/speed.py --kind tune_jobs --out tune.json
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product

import torch
from speed_jobs import BATCH, BFLOAT16, GPU, Measure, Row
from torch import Tensor
from tune_kernels import TABLE, calls_of, replay_time

import affinear as af
from affinear.ops import rotary_1d
from affinear.ops.triton import backend, convolving, launch
from affinear.ops.triton.options import Options
from affinear.ops.triton.rules import rule_of

BLOCKS = launch.blocks_for
# Mechanism, whether with rotary positions, (B, H, N, D).
WIDE = {
    "mala 128": ("mala", False, (4, 16, 16384, 128)),
    "rotary 128": ("mala", True, (4, 16, 16384, 128)),
    "nala 128": ("nala", False, (4, 16, 16384, 128)),
    "nala 96": ("nala", False, (2, 16, 65536, 96)),
    "nala 64": ("nala", False, (128, 1, 3136, 64)),
    "nala rotary 96": ("nala", True, (2, 16, 65536, 96)),
}
FINE = [Options(bn, warps, stages, fine=True) for bn, warps, stages in product((32, 64, 128), (4, 8), (2, 3))]
# Counted without a GPU: instructions a row and spilled bytes are in NOTES.md.
PAIRED = [Options(*values) for values in ((64, 8, 2), (64, 8, 1), (64, 8, 3), (32, 8, 2), (32, 4, 2))]
SUMS = [Options(*values) for values in ((32, 8, 3), (32, 8, 2), (16, 8, 3), (64, 8, 2))]
STATES = [Options(*values, fine=True) for values in ((64, 8, 2), (64, 8, 1), (32, 8, 2), (32, 8, 3))]
# Case, kernel, value channels in a block, and how to build it.
BUILDS: dict[str, tuple[str, str, int, list[Options]]] = {
    "nala 128 attend": ("nala 128", "attend", 128, FINE[:8]),
    "nala 128 attend 64": ("nala 128", "attend", 64, FINE[:8]),
    "nala 128 paired_query": ("nala 128", "paired_query", 128, PAIRED),
    "nala 128 paired_state": ("nala 128", "paired_state", 128, SUMS),
    "nala 128 summarize_backward": ("nala 128", "summarize_backward whole", 128, STATES),
    "nala 96 paired_query": ("nala 96", "paired_query", 128, PAIRED[:3]),
    "nala 64 paired_query": ("nala 64", "paired_query", 64, [Options(64, 4, 2), Options(64, 4, 3), Options(64, 8, 2)]),
    "nala 64 paired_state": ("nala 64", "paired_state", 64, [Options(32, 4, 3), Options(64, 4, 3), Options(32, 4, 2)]),
    "nala rotary 96 summarize_backward": (
        "nala rotary 96", "summarize_backward whole", 128, [Options(32, 8, 2, fine=True), Options(16, 8, 3, fine=True)],
    ),
    "rotary 128 summarize": ("rotary 128", "summarize", 128, [Options(16, 4, 3), Options(16, 4, 4), Options(64, 8, 3)]),
    "rotary 128 summarize_backward": ("rotary 128", "summarize_backward", 128, FINE[4:]),
    "mala 128 attend": ("mala 128", "attend", 128, FINE[4:]),
    "rotary 128 attend": ("rotary 128", "attend", 128, FINE[4:]),
}  # fmt: skip
MAPS = ((56, 64), (56, 224), (14, 256), (14, 896), (7, 512))  # sides and channels of maps in mavit_tiny
# Rows, and columns at a time, by the side of the kernel: with the map itself added, with another one and a gate, and
# for the gradients of the kernel.
STRIPS = {
    (3, "strips"): ((7, 2), (7, 1), (4, 2), (4, 4), (14, 1), (8, 2)),
    (5, "strips"): ((4, 2), (4, 1), (4, 4), (2, 2), (5, 1), (3, 2)),
    (5, "gated"): ((4, 2), (4, 1), (2, 2), (3, 1)),
    (3, "gradient"): ((7, 2), (7, 1), (4, 2), (4, 4), (4, 1)),
    (5, "gradient"): ((4, 2), (4, 1), (2, 2), (2, 4), (3, 1)),
}


def jobs() -> dict[str, Callable[[], Measure]]:
    """Every kernel with all its candidates."""
    found: dict[str, Callable[[], Measure]] = {f"wide {name}": partial(wide, *build) for name, build in BUILDS.items()}
    for (side, what), sizes in STRIPS.items():
        for half in range(2):
            found[f"{what} {side} {half}"] = partial(strips, side, sizes[half::2], what)
    return found


def use(kernel: str, options: Options, value_block: int) -> None:
    """Have one kernel built in another way than the table says, and values cut into blocks of so many channels."""

    def options_for(name: str, b: launch.Blocks, itemsize: int, rotary: bool = False) -> Options:
        return options if name == kernel else TABLE(name, b, itemsize, rotary)

    def blocks_for(head_dim: int, value_dim: int, features: int, itemsize: int, whole: bool = False) -> launch.Blocks:
        b = BLOCKS(head_dim, value_dim, features, itemsize, whole)
        return b._replace(BE=value_block, e_blocks=-(-value_dim // value_block))

    launch.options_for, launch.blocks_for = options_for, blocks_for


def wide(name: str, kernel: str, block: int, candidates: Sequence[Options]) -> Measure:
    """One kernel at one width."""
    mechanism, rotary, (batch, heads, tokens, width) = WIDE[name]
    found = af.mechanisms()[mechanism]
    rule = rule_of(found)
    assert rule is not None
    turns = None
    if rotary:
        turns = backend._turns(rotary_1d(tokens, width, device=GPU), torch.empty(1, dtype=BFLOAT16))  # pyright: ignore
    call = launch.Call(rule, found.scale_for(width), None, None, None, turns)

    def inputs(number: int) -> list[list[Tensor]]:
        return [
            [torch.randn(number, tokens, heads, width, device=GPU, dtype=BFLOAT16) for _ in range(4)] for _ in range(2)
        ]

    works: list[Options] = []
    few = inputs(1)
    for options in candidates:
        use(kernel, options, block)
        try:
            calls_of(kernel, few, call)[0]()
            torch.cuda.synchronize()
            works.append(options)
        except Exception as error:
            print(f"{name} {kernel} {options} {block}: {type(error).__name__}", flush=True)
    del few

    def measure() -> Iterator[Row]:
        many = inputs(batch)
        for options in works:
            use(kernel, options, block)
            calls = calls_of(kernel, many, call)
            row: Row = {"what": "wide", "case": name, "kernel": kernel, "options": str(options), "value_block": block}
            yield {**row, "ms": replay_time(calls, 5)}
            del calls
            gc.collect()
            torch.cuda.empty_cache()

    return measure


def strips(side: int, sizes: Sequence[tuple[int, int]], what: str) -> Measure:
    """A convolution with its sum, and perhaps a gate, or the gradient of its kernel, at some maps of mavit_tiny."""

    def steps(size: int, channels: int, rows: int, columns: int, batch: int) -> list[Callable[[], object]]:
        strip = convolving.strip_for(side, size, size, channels)._replace(R=rows, U=columns)
        weight, bias = torch.randn(channels, 1, side, side, device=GPU), torch.randn(channels, device=GPU)
        sets = 1 if batch < BATCH else 4
        xs = [torch.randn(batch, size, size, channels, device=GPU, dtype=BFLOAT16) for _ in range(2 * sets)]
        if what == "gradient":
            return [
                lambda x=x, g=g: convolving.taps_gradient(g, x, weight, strip=strip)
                for x, g in zip(xs[::2], xs[1::2], strict=True)
            ]
        if what == "gated":
            return [
                lambda x=x, a=a, g=g: convolving.convolve(x, weight, bias, added=a, gate=g, strip=strip)
                for x, a, g in zip(xs, xs[1:] + xs[:1], xs[2:] + xs[:2], strict=True)
            ]
        return [lambda x=x: convolving.convolve(x, weight, bias, itself=True, strip=strip) for x in xs]

    works: list[tuple[int, int]] = []
    for rows, columns in sizes:
        try:
            for size, channels in MAPS:
                steps(size, channels, rows, columns, 1)[0]()
            torch.cuda.synchronize()
            works.append((rows, columns))
        except Exception as error:
            print(f"{side} {rows} {columns}: {type(error).__name__}", flush=True)

    def measure() -> Iterator[Row]:
        for size, channels in MAPS:
            for rows, columns in works:
                ms = replay_time(steps(size, channels, rows, columns, BATCH), 5)
                speed = {"ms": ms, "gb_per_s": 4 * BATCH * size**2 * channels / ms / 1e6}
                row: Row = {"what": what, "side": side, "map": f"{size},{channels}"}
                yield {**row, "rows": rows, "columns": columns, **speed}

    return measure
