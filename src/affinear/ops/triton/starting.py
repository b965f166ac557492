"""Start a kernel. A launch like an earlier one skips Triton's search for the binary, which is slower than the start."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

_MOST = 4096  # launches to remember: many more than a network makes, however many lengths it meets
_remembered: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


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
    places = [x.data_ptr() for x in tensors]
    aligned = not reduce(or_, places) & 15
    key = (id(kernel), tensors[0].device, numbers, *[x.dtype for x in tensors], *constants.values())
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
        _remembered[key] = built, tuple(constants[name] for name in names)
