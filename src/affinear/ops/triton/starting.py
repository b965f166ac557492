"""Start a kernel. A launch like an earlier one skips Triton's search for the binary, which is slower than the start."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver

_MOST = 4096  # launches to remember: many more than a network makes, however many lengths it meets


class Remembered(NamedTuple):
    """A kernel that was built, and the constants that it was built with, in its own order."""

    built: Any
    constants: tuple[Any, ...]


_remembered: dict[tuple[Any, ...], Remembered] = {}
# Within `building`, what is to be launched is built, put here, and not launched: of this thread alone.
_waiting: ContextVar[list[Any] | None] = ContextVar("_waiting", default=None)


@contextmanager
def building() -> Generator[list[Any], None, None]:
    """Within, kernels are built, not launched: results are what the memory holds, and the list fills with kernels."""
    found: list[Any] = []
    before = _waiting.set(found)
    try:
        yield found
    finally:
        _waiting.reset(before)


def on(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """`kernel[grid]`, which launches a kernel, or what builds it."""
    waiting = _waiting.get()
    if waiting is None:
        return kernel[grid]

    def build(*arguments: Any, **constants: Any) -> None:
        waiting.append(kernel.run(*arguments, grid=grid, warmup=True, **constants))

    return build


def launch(
    kernel: Any, grid: tuple[int, int, int], tensors: tuple[Tensor, ...], numbers: tuple[float, ...], **constants: Any
) -> None:
    """`start`, or show a compiler that is watching what to start: its tensors have no addresses."""
    if type(tensors[0]) in (Tensor, torch.nn.Parameter):
        start(kernel, grid, tensors, numbers, **constants)
    else:
        torch.library.wrap_triton(kernel)[grid](*tensors, *numbers, **constants)


def start(
    kernel: Any, grid: tuple[int, int, int], tensors: tuple[Tensor, ...], numbers: tuple[float, ...], **constants: Any
) -> None:
    """Launch a kernel whose parameters are tensors, then numbers, then constants; options of the build among the last.

    The tensors are on the current device. Triton builds a kernel anew where a number is one, or it or an address is
    divisible by 16: equal numbers, and addresses that are all divisible, need no second look.
    """
    if _waiting.get() is not None:
        return on(kernel, grid)(*tensors, *numbers, **constants)
    places = [x.data_ptr() for x in tensors]
    aligned = not reduce(or_, places) & 15
    key = _key(kernel, tensors, numbers, constants)
    if aligned and key in _remembered:
        built, rest = _remembered[key]
        # Of every tensor, Triton would ask the driver whether its address is one of the GPU's: 3 of 18 µs on an H200.
        built[grid](*places, *numbers, *rest)
        return
    built = kernel[grid](*tensors, *numbers, **constants)
    if aligned and built is not None:  # the interpreter builds nothing
        if len(_remembered) >= _MOST:
            _remembered.clear()
        names = kernel.arg_names[len(tensors) + len(numbers) :]
        _remembered[key] = Remembered(built, tuple(constants[name] for name in names))


def remembered(
    kernel: Any, tensors: tuple[Tensor, ...], numbers: tuple[float, ...], constants: dict[str, Any]
) -> Remembered | None:
    """What `start` has built for such a launch, from addresses that are aligned."""
    return _remembered.get(_key(kernel, tensors, numbers, constants))


@cache
def is_roomy() -> bool:
    """Whether programs may have the shared memory of a Hopper, and its matrix units for 64 rows at a time."""
    if knobs.runtime.interpret:
        return True
    target: Any = driver.active.get_current_target()
    return target.backend == "cuda" and target.arch // 10 in (9, 10)


def is_watched() -> bool:
    """Whether somebody wants to hear of every launch, as profilers do through Triton's hooks."""
    runtime: Any = knobs.runtime
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)


def current_stream(device: torch.device) -> int | None:
    """The stream that a GPU takes launches from, as the driver knows it; None where another GPU is the current one."""
    c: Any = torch._C  # pyright: ignore[reportPrivateUsage]
    return c._cuda_getCurrentRawStream(device.index) if device.index == c._cuda_getDevice() else None


def _key(
    kernel: Any, tensors: tuple[Tensor, ...], numbers: tuple[float, ...], constants: dict[str, Any]
) -> tuple[Any, ...]:
    return id(kernel), tensors[0].device, numbers, *[x.dtype for x in tensors], *constants.values()
