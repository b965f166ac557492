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
from tune_kernels import KERNELS, TABLE, calls_of, replay_time

import affinear as af
from affinear.ops import rotary_1d
from affinear.ops.triton import backend, convolving, launch
from affinear.ops.triton.convolving import Strip
from affinear.ops.triton.options import Options
from affinear.ops.triton.rules import rule_of

BLOCKS = launch.blocks_for
# Mechanism, whether with rotary positions, (B, H, N, D), and value channels in a block.
WIDE = {
    "mala 128": ("mala", False, (4, 16, 16384, 128), (128,)),
    "rotary 128": ("mala", True, (4, 16, 16384, 128), (128,)),
    "nala 128": ("nala", False, (4, 16, 16384, 128), (64, 128)),
}
BUILDS = [Options(*values) for values in product((16, 32, 64), (4, 8), (2, 3))]
MAPS = ((56, 64), (56, 224), (14, 256), (14, 896))  # sides and channels of maps in mavit_tiny
STRIPS = [
    Strip(rows, columns, channels, warps)
    for rows in (4, 8, 14)
    for columns, channels, warps in (
        (8, 64, 2), (8, 64, 4), (4, 64, 2), (4, 64, 1), (8, 32, 1), (8, 32, 2), (16, 32, 2), (16, 64, 4),
    )
]  # fmt: skip
GRADIENT_STRIPS = [
    Strip(rows, columns, channels, warps)
    for rows in (2, 4)
    for columns, channels, warps in (
        (4, 64, 4),
        (4, 64, 2),
        (8, 64, 4),
        (8, 32, 2),
        (8, 32, 4),
        (2, 64, 2),
        (2, 128, 4),
    )
]


def jobs() -> dict[str, Callable[[], Measure]]:
    """Every kernel with all its candidates."""
    found: dict[str, Callable[[], Measure]] = {
        f"wide {name} {kernel}": partial(wide, name, kernel) for name in WIDE for kernel in KERNELS
    }
    for side in (3, 5):
        for half in range(2):
            found[f"strips {side} {half}"] = partial(strips, side, STRIPS[half::2], False)
        found[f"gradient {side}"] = partial(strips, side, GRADIENT_STRIPS, True)
    return found


def use(kernel: str, options: Options, value_block: int) -> None:
    """Have one kernel built in another way than the table says, and values cut into blocks of so many channels."""

    def options_for(name: str, b: launch.Blocks, itemsize: int) -> Options:
        return options if name == kernel else TABLE(name, b, itemsize)

    def blocks_for(head_dim: int, value_dim: int, features: int, itemsize: int) -> launch.Blocks:
        b = BLOCKS(head_dim, value_dim, features, itemsize)
        return b._replace(BE=value_block, e_blocks=-(-value_dim // value_block))

    launch.options_for, launch.blocks_for = options_for, blocks_for


def wide(name: str, kernel: str) -> Measure:
    """One kernel at one width."""
    mechanism, rotary, (batch, heads, tokens, width), blocks = WIDE[name]
    found = af.mechanisms()[mechanism]
    rule = rule_of(found)
    assert rule is not None
    turns = None
    if rotary:
        turns = backend._turns(rotary_1d(tokens, width, device=GPU), torch.empty(1, dtype=BFLOAT16))  # pyright: ignore
    call = launch.Call(rule, found.scale_for(width), None, None, None, turns)
    candidates = [(options, block) for options in BUILDS for block in blocks]

    def inputs(number: int) -> list[list[Tensor]]:
        return [
            [torch.randn(number, tokens, heads, width, device=GPU, dtype=BFLOAT16) for _ in range(4)] for _ in range(2)
        ]

    works: list[tuple[Options, int]] = []
    few = inputs(1)
    for options, block in candidates:
        use(kernel, options, block)
        try:
            calls_of(kernel, few, call)[0]()
            torch.cuda.synchronize()
            works.append((options, block))
        except Exception as error:
            print(f"{name} {kernel} {options} {block}: {type(error).__name__}", flush=True)
    del few

    def measure() -> Iterator[Row]:
        many = inputs(batch)
        for options, block in works:
            use(kernel, options, block)
            calls = calls_of(kernel, many, call)
            row: Row = {"what": "wide", "case": name, "kernel": kernel, "options": str(options), "value_block": block}
            yield {**row, "ms": replay_time(calls, 5)}
            del calls
            gc.collect()
            torch.cuda.empty_cache()

    return measure


def strips(side: int, candidates: Sequence[Strip], gradient: bool) -> Measure:
    """X + depthwise(x), or the gradient of its kernel, at some maps of mavit_tiny."""

    def steps(size: int, channels: int, strip: Strip, batch: int) -> list[Callable[[], object]]:
        weight, bias = torch.randn(channels, 1, side, side, device=GPU), torch.randn(channels, device=GPU)
        sets = 1 if batch < BATCH else 4
        xs = [torch.randn(batch, size, size, channels, device=GPU, dtype=BFLOAT16) for _ in range(2 * sets)]
        if gradient:
            return [
                lambda x=x, g=g: convolving.taps_gradient(g, x, weight, strip=strip)
                for x, g in zip(xs[::2], xs[1::2], strict=True)
            ]
        return [lambda x=x: convolving.convolve(x, weight, bias, itself=True, strip=strip) for x in xs]

    works: list[Strip] = []
    for strip in candidates:
        try:
            for size, channels in MAPS:
                steps(size, channels, strip, 1)[0]()
            torch.cuda.synchronize()
            works.append(strip)
        except Exception as error:
            print(f"{side} {strip}: {type(error).__name__}", flush=True)

    def measure() -> Iterator[Row]:
        for size, channels in MAPS:
            for strip in works:
                ms = replay_time(steps(size, channels, strip, BATCH), 5)
                speed = {"ms": ms, "gb_per_s": 4 * BATCH * size**2 * channels / ms / 1e6}
                row: Row = {"what": "gradient" if gradient else "strip", "side": side, "map": f"{size},{channels}"}
                yield {**row, "strip": str(tuple(strip)), **speed}

    return measure
