"""Kernels under watch: every address that they touch has to be that of an element of a tensor they were given.

Tensors lie far apart in memory that is reserved, holds zeros, and takes room only where it is written to: they may have
any size. Of a launch only the programs at the corners of its grid run and some within, and of a long loop over tokens
only the first turn, the last, and one between. What is found is collected, not raised: programs go on without it.
"""

from __future__ import annotations

import importlib
import inspect
import math
import mmap
import pkgutil
import traceback
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

import affinear.ops.triton as kernels

ROOM, APART = 2**44, 2**35  # bytes; a number that has lost what 32 bits do not hold is 2 ** 34 off, or 2 ** 35
ALIGNED = 256  # bytes, as torch does
ON_DEMAND = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE, which Python 3.10 has no name for
INSIDE = 1  # programs of a launch that run beside those at the corners
TURNS = 3  # of a loop over tokens
COUNTS = 100  # of tokens before a segment, as programs that do not run would have left them
WRAPPING = np.add, np.subtract, np.multiply
FOLDERS = Path(*kernels.__path__), Path(*kernels.__path__) / "causal", Path(__file__).parent


class Memory:
    """Room for tensors of any size."""

    def __init__(self) -> None:
        self.bytes = torch.frombuffer(mmap.mmap(-1, ROOM, flags=ON_DEMAND), dtype=torch.uint8)
        self.end = APART

    def empty(self, *shape: Any, dtype: torch.dtype, device: Any = None) -> Tensor:
        """A tensor of zeros; of random numbers if it is one of counts."""
        shape = tuple(shape[0]) if shape and not isinstance(shape[0], int) else shape
        size = math.prod(shape) * dtype.itemsize
        begin, self.end = self.end, self.end + -(-size // ALIGNED) * ALIGNED + APART
        new = self.bytes[begin : begin + size].view(dtype).view(shape)
        return new.random_(COUNTS) if dtype == torch.int64 else new

    def empty_like(self, x: Tensor) -> Tensor:
        """Another one of a tensor's shape."""
        return self.empty(*x.shape, dtype=x.dtype)


class Place(NamedTuple):
    """Where the elements of a tensor lie: bytes of each, the first one, the end, and steps and sizes, largest first."""

    itemsize: int
    first: int
    end: int
    dims: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, x: Tensor) -> Place:
        """Where those of `x` lie; what lies side by side is one dimension."""
        dims = sorted(
            ((step * x.itemsize, size) for step, size in zip(x.stride(), x.shape, strict=True) if size != 1 and step),
            reverse=True,
        )
        joined: list[tuple[int, int]] = []
        for step, size in dims:
            if joined and joined[-1][0] == step * size:
                step, size = step, joined.pop()[1] * size
            joined.append((step, size))
        last = sum(step * (size - 1) for step, size in joined) if x.numel() else -x.itemsize
        return cls(x.itemsize, x.data_ptr(), x.data_ptr() + last + x.itemsize, tuple(joined))

    def holds(self, addresses: Any) -> Any:
        """Which of some addresses are those of elements."""
        left = addresses - self.first
        found = (addresses >= self.first) & (addresses < self.end)
        for step, size in self.dims:
            index = left // step
            found &= index < size
            left = left - index * step
        return found & (left == 0)


class Watch:
    """What launches are held to, and what they did.

    Attributes:
        memory: Where tensors are made.
        faults: What was found, a line each.
        ran: Programs that ran, by the names of kernels.
        farthest: The largest distance from the beginning of a tensor, in its elements.
        few: Whether only some programs run, and some turns of their loops.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.memory = Memory()
        self.few = True
        self.faults: list[str] = []
        self.ran: dict[str, int] = {}
        self.farthest = 0
        self.places: list[Place] = []
        self.kernel = ""
        self._patch_lang = interpreter._patch_lang
        builder = interpreter.interpreter_builder
        self._load, self._store = builder.create_masked_load, builder.create_masked_store
        self._binary = builder.binary_op
        monkeypatch.setattr(interpreter.InterpretedFunction, "run", lambda *args, **given: self.run(*args, **given))
        for name in ("load", "store"):
            monkeypatch.setattr(builder, f"create_masked_{name}", getattr(self, name))
        monkeypatch.setattr(builder, "binary_op", self.binary)
        monkeypatch.setattr(interpreter, "_patch_lang", lambda fn: None)  # once a launch is enough, and much quicker
        for name in ("create_atomic_rmw", "create_atomic_cas"):  # no kernel has any, and nobody would watch them
            monkeypatch.delattr(interpreter.InterpreterBuilder, name)
        made = {**vars(torch), "empty": self.memory.empty, "empty_like": self.memory.empty_like}
        for module in modules():
            monkeypatch.setattr(module, "range", self.range, raising=False)
            if hasattr(module, "torch"):
                monkeypatch.setattr(module, "torch", SimpleNamespace(**made))

    def run(self, kernel: Any, *args: Any, grid: tuple[int, ...], warmup: bool, **constants: Any) -> None:
        """Launch some programs of a kernel."""
        function, self.kernel = kernel.rewrite(), kernel.__name__
        constants = {name: x for name, x in constants.items() if name in kernel.arg_names}
        given = inspect.signature(function).bind(*args, **constants).arguments
        fixed = interpreter.GridExecutor(function, kernel.arg_names, grid).constexprs
        self.places = [Place.of(x) for x in tensors_of(tuple(given.values()))]
        scopes = [self._patch_lang(function), self._patch_lang(tl.sum.fn)]
        scopes[0].set_attr(tl, "range", self.range)
        try:
            given = {name: x if name in fixed else interpreter._implicit_cvt(x) for name, x in given.items()}
            grid = (*grid, 1, 1)[:3]
            interpreter.interpreter_builder.set_grid_dim(*grid)
            for program in programs(grid) if self.few else product(*map(range, grid)):
                interpreter.interpreter_builder.set_grid_idx(*program)
                self.ran[self.kernel] = self.ran.get(self.kernel, 0) + 1
                function(**given)
        finally:
            for scope in reversed(scopes):
                scope.restore()

    def range(self, first: Any, *rest: Any, **_options: Any) -> Iterator[Any]:
        """Some turns of a loop; all of one that begins with a number, as those do that carry pointers along."""
        turns = range(first, *rest)
        chosen = range(len(turns))
        if self.few and len(turns) > TURNS and (not rest or isinstance(first, tl.tensor)):
            chosen = sorted({0, int(torch.randint(len(turns), ())), len(turns) - 1})
        return (turns[i] for i in chosen)

    def load(self, pointers: Any, mask: Any, *rest: Any) -> Any:
        """Read what may be read."""
        return self._load(pointers, self.allowed("reads", pointers, mask), *rest)

    def store(self, pointers: Any, value: Any, mask: Any, *rest: Any) -> None:
        """Write what may be written."""
        return self._store(pointers, value, self.allowed("writes", pointers, mask), *rest)

    def allowed(self, what: str, pointers: Any, mask: Any) -> Any:
        """The mask, less what lies outside of all tensors."""
        data = np.broadcast_to(mask.data, pointers.data.shape).astype(bool)
        left = pointers.data[data].astype(np.int64)
        itemsize = interpreter._get_np_dtype(pointers.get_element_ty()).itemsize
        for place in self.places:
            if not left.size:
                return mask
            low, high = left.min(), left.max()
            if high < place.first or low >= place.end or place.itemsize != itemsize:
                continue
            held = place.holds(left)
            if held.any():
                self.farthest = max(self.farthest, int(left[held].max() - place.first) // itemsize)
            left = left[~held]
        if not left.size:
            return mask
        self.report(f"{what} {len(left)} of {int(data.sum())} addresses beside its tensors, {self.beside(left)}")
        return interpreter.TensorHandle(data & ~np.isin(pointers.data.astype(np.int64), left), mask.dtype)

    def beside(self, addresses: Any) -> str:
        """How far an address is from what is nearest."""
        address = int(addresses[0])
        ends = [x for place in self.places for x in (address - place.first, address - place.end)]
        return f"{min(ends, key=abs):+d} bytes from the nearest beginning or end"

    def binary(self, a: Any, b: Any, operation: Any) -> Any:
        """An operation of two blocks; of 32-bit integers, what comes out has to fit."""
        if operation in WRAPPING and a.dtype.scalar == tl.int32 and a.data.dtype == b.data.dtype == np.int32:
            exact = operation(a.data.astype(np.int64), b.data.astype(np.int64))
            if exact.size and (exact.max() >= 2**31 or exact.min() < -(2**31)):
                self.report(f"{operation.__name__} of 32-bit integers makes {exact.min():,} to {exact.max():,}")
        return self._binary(a, b, operation)

    def report(self, what: str) -> None:
        """Keep what was found, and where in the kernels."""
        frames = [x for x in traceback.extract_stack() if Path(x.filename).parent in FOLDERS and x.filename != __file__]
        where = " < ".join(f"{Path(x.filename).name}:{x.lineno}" for x in reversed(frames[-4:]))
        program = interpreter.interpreter_builder.grid_idx
        self.faults.append(f"{self.kernel}, program {program}: {what} ({where})")


def tensors_of(arguments: Sequence[Any]) -> Iterator[Tensor]:
    """All tensors among arguments, in tuples too."""
    for x in arguments:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, tuple):
            yield from tensors_of(x)


def modules() -> Iterator[Any]:
    """Those of the library that hold kernels, or start them."""
    for file in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        yield importlib.import_module(file.name)


def programs(grid: Sequence[int]) -> list[tuple[int, ...]]:
    """The corners of a grid, and some programs within."""
    corners = product(*({0, size - 1} for size in grid)) if min(grid) else ()
    within = (tuple(int(torch.randint(size, ())) for size in grid) for _ in range(INSIDE if min(grid) else 0))
    return sorted({*corners, *within})
