"""Build the Triton kernels for chips that are not there, and report what each needs of its chip.

    python scripts/build_kernels.py sm_90 mala:64 nala:96:bfloat16:rotary+masked
    python scripts/build_kernels.py gfx942 mala:128 --until shared
    python scripts/build_kernels.py sm_90 mala:64:bfloat16:causal --until translated

Every case calls the library, on tensors whose numbers do not matter. A stand-in for the driver names the chip: Triton
specializes and compiles each launch as it would there, and launches nothing. So block sizes, options and arguments are
those of the library, whatever they are today.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import JITFunction, driver

# Told that kernels are interpreted, the library serves tensors of the CPU; the kernels themselves, which it loads when
# they are first needed, are not told so.
os.environ["TRITON_INTERPRET"] = "1"
import affinear as af
from affinear.ops import add_norm, depthwise, rotary_1d

del os.environ["TRITON_INTERPRET"]

PACKAGE = "affinear.ops.triton"
LONG, HEADS, GROUPS = 4096, 4, 2


class Chip(NamedTuple):
    """A target, and the shared memory that a program may have there, in bytes."""

    target: GPUTarget
    shared: int


CHIPS = {
    "sm_80": Chip(GPUTarget("cuda", 80, 32), 163 * 1024),
    "sm_90": Chip(GPUTarget("cuda", 90, 32), 227 * 1024),
    "gfx942": Chip(GPUTarget("hip", "gfx942", 64), 64 * 1024),
}


@dataclass(frozen=True)
class Case:
    """What calls are made, written as mechanism:width[:dtype[:options]].

    Attributes:
        mechanism: Its name; or "depthwise" or "add_norm", for passes over maps and over rows of channels.
        width: Of keys and of values, or channels.
        dtype: Of tokens.
        options: Some of "rotary", "masked", "packed" and "causal", and at most one of "decode", "short" (sequences that
            one launch serves), "long" (others) and "many" (of many lengths and batch sizes), joined by plus signs. With
            none of the last four, calls are made for short sequences and for long ones.
    """

    mechanism: str
    width: int
    dtype: str = "bfloat16"
    options: str = ""

    @classmethod
    def parse(cls, text: str) -> Case:
        """The case that is written so."""
        mechanism, width, *rest = text.split(":")
        return cls(mechanism, int(width), *rest)

    def __str__(self) -> str:
        return ":".join(part for part in (self.mechanism, str(self.width), self.dtype, self.options) if part)

    def has(self, option: str) -> bool:
        """Whether an option is among its own."""
        return option in self.options.split("+")

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Batch size and number of tokens of each call."""
        short: int = importlib.import_module(f"{PACKAGE}.launch").SHORT
        batch = 1 if self.has("packed") else 2
        if self.has("many"):
            return list(itertools.product((1, 2, 16), (short - 1, short, LONG, LONG + 1, LONG + 16, 2 * LONG + 7)))
        if any(map(self.has, ("long", "causal", "decode"))):
            return [(batch, LONG)]
        return [(batch, short)] if self.has("short") else [(batch, short), (batch, LONG)]

    def tokens(self, *shape: int) -> Tensor:
        """Some tokens, laid out as a projection leaves them."""
        return torch.empty(*shape, self.width, dtype=getattr(torch, self.dtype), requires_grad=True)

    def run(self) -> None:
        """Call the library, forwards and backwards."""
        if self.mechanism in ("depthwise", "add_norm"):
            return self.convolve() if self.mechanism == "depthwise" else self.add()
        for batch, length in self.sizes:
            query, key, value = (self.tokens(batch, length, heads) for heads in (HEADS, GROUPS, GROUPS))
            options: dict[str, Any] = {"mechanism": self.mechanism, "backend": "triton"}
            if self.has("rotary"):
                options["rotary"] = rotary_1d(length, self.width)
            if self.has("masked"):
                options["key_mask"] = torch.ones(key.shape[:2], dtype=torch.bool)
            if self.has("packed"):
                options["cu_seqlens_q"] = options["cu_seqlens_k"] = torch.arange(0, length + 1, length // 4)
            if self.has("decode"):
                self.decode(query, key, value, options)
            else:
                out = af.attention(query, key, value, causal=self.has("causal"), **options)
                out.backward(torch.empty_like(out))

    def convolve(self) -> None:
        """Send a map through the passes around convolutions, a residual one and a gated one."""
        x, added, gate = (self.tokens(2, 14, 14) for _ in range(3))
        small, large = (torch.empty(self.width, 1, side, side, requires_grad=True) for side in (3, 5))
        bias = torch.empty(self.width, requires_grad=True)
        for out in (
            depthwise(x, small, bias, itself=True, backend="triton"),
            depthwise(x, large, bias, added=added, gate=gate, backend="triton"),
        ):
            out.backward(torch.empty_like(out))

    def add(self) -> None:
        """Send rows of channels through a sum and its norm, with weights that were cast and that were not."""
        for dtype in {torch.float32, getattr(torch, self.dtype)}:
            x, other = (self.tokens(2, 14, 14) for _ in range(2))
            weight, bias = (torch.empty(self.width, dtype=dtype, requires_grad=True) for _ in range(2))
            total, normed = add_norm(x, other, weight, bias, backend="triton")
            torch.autograd.backward((total, normed), (torch.empty_like(total), torch.empty_like(normed)))

    @torch.no_grad()
    def decode(self, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> None:
        """Summarize all tokens, then take one more."""
        state = af.summarize(key, value, **options)
        if self.has("rotary"):
            options["rotary"] = rotary_1d(1, self.width)
        token: Any = (x[:, :1] for x in (query, key, value))
        af.attention(*token, causal=True, initial_state=state, return_state=True, **options)


@dataclass(frozen=True)
class Build:
    """One kernel, built.

    Attributes:
        kernel: Its file and name.
        case: The case that launched it.
        seconds: How long it took.
        shared: Bytes of shared memory of a program; None where nothing was built.
        registers: Of a thread; None where it was not built to the end.
        spilled: Bytes of a thread's stack, where what does not fit into registers is kept; None likewise.
    """

    kernel: str
    case: str
    seconds: float
    shared: int | None = None
    registers: int | None = None
    spilled: int | None = None

    def __str__(self) -> str:
        needs = f"{self.shared!s:>7} B shared  {self.registers!s:>4} registers  {self.spilled!s:>5} B spilled"
        return f"{self.kernel:36} {self.case:36} {needs}  {self.seconds:5.1f} s"


class Elsewhere:
    """A driver for a chip that is not there: it says which, and does nothing."""

    def __init__(self, target: GPUTarget):
        self.target = target

    def get_current_target(self) -> GPUTarget:
        """The chip."""
        return self.target

    def get_current_device(self) -> int:
        """The first."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """None to speak of."""
        return 0


def discover() -> list[str]:
    """Every kernel of the library: functions of Triton whose names say so."""
    found: list[str] = []
    for module in pkgutil.walk_packages(importlib.import_module(PACKAGE).__path__, f"{PACKAGE}."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if isinstance(value, JITFunction) and name.endswith("_kernel") and value.fn.__module__ == module.name:
                found.append(".".join(name_of(value)))
    return sorted(found)


def name_of(kernel: JITFunction[Any]) -> tuple[str, str]:
    """The module of a kernel, below all of the library's, and its name."""
    return kernel.fn.__module__.removeprefix(f"{PACKAGE}."), kernel.fn.__name__


@contextmanager
def building(case: Case, until: str, report: Callable[[Build, Any], None]) -> Generator[None, None, None]:
    """Within, launches compile what was not compiled before, and that is reported, with Triton's own; nothing runs."""
    jit: Any = JITFunction
    run, compile_ = jit.run, jit._do_compile
    seen = set[str]()

    def warm_up(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        run(self, *args, grid=grid, warmup=True, **kwargs)

    def build(self: JITFunction[Any], key: str, *rest: Any) -> Any:
        name, start = ".".join(name_of(self)), time.perf_counter()
        if until != "launch":
            built = compile_(self, key, *rest)
            seconds = time.perf_counter() - start
            report(Build(name, str(case), seconds, built.metadata.shared, *resources(built)), built)
            return built
        if name + key not in seen:
            seen.add(name + key)
            report(Build(name, str(case), 0.0), None)
        return None

    jit.run, jit._do_compile = warm_up, build
    try:
        yield
    finally:
        jit.run, jit._do_compile = run, compile_


# The last stage of each way to build less than all: where Triton has understood a kernel, and where shared memory is
# settled, after which comes most of the time, and all about registers.
STAGES = {"translated": "ttir", "shared": "llir"}


def stop_after(stage: str, chip: Chip) -> None:
    """Leave out what comes after a stage."""
    backend: Any = type(make_backend(chip.target))
    add_stages = backend.add_stages

    def nothing(module: Any, metadata: dict[str, Any]) -> bytes:
        metadata.setdefault("name", "unnamed")
        metadata.setdefault("shared", None)
        return b""

    def add_few(self: Any, stages: dict[str, Any], *rest: Any) -> None:
        add_stages(self, stages, *rest)
        for late in list(stages)[list(stages).index(stage) + 1 :]:
            stages[late] = nothing

    backend.add_stages = add_few


def inspect(cubin: bytes, tool: str, *options: str) -> str:
    """What one of the tools that come with Triton says of a binary."""
    path = Path(triton.__file__).parent / "backends/nvidia/bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([path, *options, file.name], capture_output=True, text=True, check=True).stdout


def resources(built: Any) -> tuple[int | None, int | None]:
    """Registers of a thread, and bytes that did not fit into them."""
    if built.asm.get("hsaco"):
        registers, spilled = (
            int(found[1]) if (found := re.search(rf"\.{name}:\s+(\d+)", built.asm["amdgcn"])) else None
            for name in ("vgpr_count", "private_segment_fixed_size")
        )
        return registers, spilled
    if not built.asm.get("cubin"):
        return None, None
    usage = inspect(built.asm["cubin"], "cuobjdump", "--dump-resource-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    return int(found[1]), int(found[2])


def build_all(chip: Chip, cases: list[Case], until: str, report: Callable[[Build, Any], None]) -> None:
    """Build the cases for a chip, with nothing cached."""
    elsewhere: Any = Elsewhere(chip.target)
    driver.set_active(elsewhere)
    torch.version.hip = "elsewhere" if chip.target.backend == "hip" else None
    with tempfile.TemporaryDirectory() as cache:
        knobs.cache.dir = cache
        for case in cases:
            with building(case, until, report):
                case.run()


def main() -> None:
    """Build the cases of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chip", choices=CHIPS)
    parser.add_argument("case", nargs="+", type=Case.parse, help="mechanism:width[:dtype[:options]]")
    parser.add_argument("--until", choices=("launch", *STAGES, "binary"), default="binary", help="how far to build")
    parser.add_argument("--json", action="store_true", help="for a program to read")
    arguments = parser.parse_args()
    chip = CHIPS[arguments.chip]
    if arguments.until in STAGES:
        stop_after(STAGES[arguments.until], chip)
    builds: list[Build] = []

    def report(build: Build, _built: Any) -> None:
        builds.append(build)
        if not arguments.json:
            print(build, flush=True)

    build_all(chip, arguments.case, arguments.until, report)
    if arguments.json:
        told = {"triton": triton.__version__, "shared": chip.shared, "kernels": discover()}
        json.dump({**told, "builds": [asdict(build) for build in builds]}, sys.stdout)


if __name__ == "__main__":
    main()
