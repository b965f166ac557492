"""Build beforehand, and side by side, what calls will need: else the first of them builds it, one kernel at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from .attention import attention
from .mechanisms import Mechanism, find
from .rotary import Rotary, rotary_1d
from .triton.backend import why_not
from .validation import check_groups

MOST_THREADS = 16
Size = tuple[int, int, int, int]


@dataclass(frozen=True)
class WarmUp:
    """What came of `warm_up`.

    Attributes:
        kernels: Names of the kernels that were built, each as often as there are variants of it.
        seconds: How long it took, with one call of every shape.
        reason: Why there was nothing to build; empty where there was.
    """

    kernels: tuple[str, ...]
    seconds: float
    reason: str = ""

    def __str__(self) -> str:
        if self.reason:
            return f"nothing to build: {self.reason}"
        return f"{len(self.kernels)} kernels in {self.seconds:.1f} s"


def warm_up(
    *shapes: Size,
    mechanism: str | Mechanism = "mala",
    dtype: torch.dtype = torch.bfloat16,
    causal: bool = False,
    rotary: bool = False,
    backward: bool = True,
    key_heads: int | None = None,
    values: int | None = None,
    device: torch.device | str | None = None,
    threads: int | None = None,
) -> WarmUp:
    """Build the kernels that calls of these shapes need, side by side, and call each shape once.

    A kernel takes seconds to build where it is new, and Triton keeps it in a folder of yours: the next process only
    loads it. Lengths and batch sizes share kernels; widths, dtypes, mechanisms and options do not, and sequences of up
    to 256 tokens have their own.

    Args:
        shapes: Of queries, (B, N, H, D) each: batch, tokens, heads, width.
        mechanism: A registered name, or a `Mechanism`.
        dtype: Of the tokens.
        causal: Whether calls are causal.
        rotary: Whether they have rotary positions, one table for all heads.
        backward: Whether there will be gradients.
        key_heads: Heads of keys and values, H if None.
        values: Width of the values, D if None.
        device: The GPU; None is the current one.
        threads: How many kernels are built at a time; None is one for each core, up to 16.

    Returns:
        What was built and how long it took. Without a GPU, or where the kernels do not serve such calls, that there was
        nothing to build, and why: the torch backend needs none of this.

    Raises:
        ValueError: If the arguments do not fit.

    Example:
        >>> import affinear as af
        >>> told = af.warm_up((128, 3136, 1, 64), (128, 196, 3, 64), mechanism="mala", rotary=True)
        >>> print(told)  # doctest: +SKIP
        7 kernels in 6.1 s
    """
    rule, threads = find(mechanism), _threads(threads)
    place = torch.device("cuda" if device is None else device)
    for shape in shapes:
        _check(shape, key_heads)
    if place.type != "cuda" or not torch.cuda.is_available():
        return WarmUp((), 0.0, "there is no GPU here, and the torch backend has no kernels")
    began = time.perf_counter()
    with torch.cuda.device(place):
        place = torch.device("cuda", torch.cuda.current_device())
        calls = list[Callable[[], object]]()
        for shape in shapes:
            _, length, heads, width = shape
            tokens = _tokens(shape, key_heads or heads, values or width, dtype, place, backward)
            tables = rotary_1d(length, width, device=place) if rotary else None
            reason = why_not(rule, tokens[0], values or width, tables)
            if reason is not None:
                return WarmUp((), 0.0, reason)
            calls.append(lambda tokens=tokens, tables=tables: _call(tokens, rule, causal, tables, backward))
        kernels = build(calls, threads, place)
        for call in calls:
            call()
        torch.cuda.synchronize()
    return WarmUp(tuple(kernels), time.perf_counter() - began)


def build(calls: Sequence[Callable[[], object]], threads: int, device: torch.device | None) -> list[str]:
    """Build the kernels that calls launch, and launch none; returns the names of those that were not built before."""
    triton: Any = import_module("triton")
    starting: Any = import_module("affinear.ops.triton.starting")
    with ThreadPoolExecutor(threads) as pool:
        mode: AbstractContextManager[Any] = triton.AsyncCompileMode(pool)
        with mode, starting.building() as waiting:
            for call in calls:
                call()
        built = [kernel.result() for kernel in _new(waiting)]
        if device is not None:
            list(pool.map(_load, built, [device] * len(built)))
    return [kernel.src.name for kernel in built]


def _new(waiting: Sequence[Any]) -> list[Any]:
    """Kernels that were not there, each once: the others come as they are, these as promises."""
    return list({id(kernel): kernel for kernel in waiting if hasattr(kernel, "result")}.values())


def _load(kernel: Any, device: torch.device) -> None:
    with torch.cuda.device(device):
        kernel.run  # noqa: B018, which makes the launcher, with a compiler of C, and loads the kernel


def _call(tokens: list[Tensor], rule: Mechanism, causal: bool, tables: Rotary | None, backward: bool) -> None:
    # In this thread, which is the one that builds instead of launching.
    with torch.autograd.set_multithreading_enabled(False), torch.set_grad_enabled(backward):
        query, key, value = tokens
        out = attention(query, key, value, rule, causal=causal, rotary=tables, backend="triton", layout="bnhd")
        if backward:
            torch.autograd.grad(out, tokens, torch.zeros_like(out))


def _tokens(
    shape: Size, key_heads: int, values: int, dtype: torch.dtype, device: torch.device, backward: bool
) -> list[Tensor]:
    batch, length, heads, width = shape
    sizes = (heads, width), (key_heads, width), (key_heads, values)
    return [
        torch.zeros(batch, length, *size, dtype=dtype, device=device, requires_grad=backward) for size in sizes
    ]  # fmt: skip


def _threads(threads: int | None) -> int:
    if threads is None:
        return min(os.cpu_count() or 1, MOST_THREADS)
    if not isinstance(threads, int) or threads < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"threads: expected a number from 1 on, or None, got {threads!r}; None is one for each core")
    return threads


def _check(shape: Size, key_heads: int | None) -> None:
    sizes: Any = shape
    if not isinstance(sizes, tuple | list) or len(sizes) != 4 or any(type(x) is not int or x < 1 for x in sizes):
        raise ValueError(
            f"shapes: expected (batch, tokens, heads, width) of queries, each 1 at least, got {shape!r}; "
            "pass one such tuple for every kind of call"
        )
    check_groups(sizes[2], key_heads or sizes[2])
