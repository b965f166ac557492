"""How each kernel is built, by the size of the state it holds: measured on an H200, see benchmarks/NOTES.md.

Tokens in a block change how sums are grouped: `summarize` and `attention`, which both make states, must agree on them.
Where rotary positions want another build, the kernel is there twice, the second time as "... rotary". A kernel that
goes backwards over tokens with two features of each of 128 channels may have room for the "whole" of their state.
Kernels "paired_..." and "... whole" were counted, not measured: `tune_jobs.py` has their candidates.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """How a kernel is built.

    Attributes:
        BN: Tokens in a block.
        warps: Warps of a program.
        stages: Blocks of tokens in flight, and one.
        registers: Most registers of a thread; None leaves it to the compiler.
        fine: Whether bfloat16 tokens have the state in float16 instead of two halves. Of the two products that these
            take, each of two groups of four warps would do all: the compiler keeps a product and its sequel together.
            It also takes half of the shared memory.
        lean: Stages on chips with less shared memory than a Hopper, where the others do not fit; None is the same.
    """

    BN: int
    warps: int
    stages: int
    registers: int | None = None
    fine: bool = False
    lean: int | None = None


# Largest product of features and value channels in a program, for up to 128 features. Beyond, there is "double" for two
# features of each of 128 channels, and "wide" for all others.
SIZES = {"small": 64 * 64, "medium": 128 * 64, "large": 128 * 128}

OPTIONS = {
    "small": {
        "summarize": Options(64, 4, 3, 128),
        "attention": Options(64, 4, 3),
        "attend": Options(64, 4, 3, 128),
        "attend_backward": Options(64, 4, 3),
        "paired_query": Options(64, 4, 2),
        "paired_state": Options(32, 4, 3),
        "summarize_backward": Options(64, 4, 3),
    },
    "medium": {
        "summarize": Options(64, 4, 3),
        "attention": Options(64, 4, 3),
        "attend": Options(64, 4, 2),
        "attend_backward": Options(16, 4, 3),
        "paired_query": Options(64, 4, 2),
        "paired_state": Options(32, 4, 3),
        "summarize_backward": Options(64, 4, 3),
    },
    "large": {
        "summarize": Options(32, 4, 3),
        "summarize rotary": Options(16, 4, 3),
        "attention": Options(32, 4, 3),
        "attention rotary": Options(16, 4, 3),
        "attend": Options(64, 4, 2),
        "attend rotary": Options(64, 4, 3),
        "attend_backward": Options(32, 8, 3),
        "paired_query": Options(64, 8, 2),
        "paired_state": Options(32, 8, 3),
        "summarize_backward": Options(64, 8, 3, fine=True),
        "summarize_backward rotary": Options(64, 8, 3, fine=True, lean=2),
    },
    "double": {
        "summarize": Options(32, 8, 3),
        "attention": Options(32, 8, 1),
        "attend": Options(64, 8, 3, fine=True),
        "attend_backward": Options(16, 8, 1),
        "paired_query": Options(64, 8, 2),
        "paired_state": Options(32, 8, 3),
        "summarize_backward": Options(16, 8, 1),
        "summarize_backward whole": Options(64, 8, 2, fine=True),
        "summarize_backward whole rotary": Options(32, 8, 2, fine=True),
    },
    "wide": dict.fromkeys(
        ("summarize", "attention", "attend", "attend_backward", "summarize_backward"),
        Options(16, 8, 1),
    ),
}
# Products of float32 numbers are taken by the threads, which want small blocks.
OPTIONS_FLOAT32 = {
    size: dict.fromkeys(options, Options(32 if size == "small" else 16, 8, 1)) for size, options in OPTIONS.items()
}
