"""Kernels that are built beforehand: the ones that calls would launch, and none where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import affinear as af
from affinear.ops.triton import starting

ROOT = Path(__file__).parents[2]
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@without_gpu
def test_without_a_gpu_there_is_nothing_to_build():
    told = af.warm_up((2, 64, 1, 32), causal=True, rotary=True)
    assert told.kernels == ()
    assert str(told) == "nothing to build: there is no GPU here, and the torch backend has no kernels"


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((2, 64, 32), {}, r"shapes: expected \(batch, tokens, heads, width\) .* got \(2, 64, 32\)"),
        ((2, 64, 0, 32), {}, r"shapes: expected .* each 1 at least, got \(2, 64, 0, 32\)"),
        ((2, 64, 3, 32), {"key_heads": 2}, r"query: expected a multiple of the 2 key heads, got 3 heads"),
        ((2, 64, 3, 32), {"threads": 0}, r"threads: expected a number from 1 on, or None, got 0"),
        ((2, 64, 3, 32), {"mechanism": "mela"}, r"did you mean 'mala'"),
    ],
)
def test_what_does_not_fit_is_refused(shape: Any, options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        af.warm_up(shape, **options)


class Kernel:
    """Notes how it is launched."""

    arg_names = ("x", "number", "BLOCK")

    def __init__(self) -> None:
        self.runs: list[bool] = []

    def run(self, *arguments: Any, grid: Any, warmup: bool, **constants: Any) -> str:
        self.runs.append(warmup)
        return "built"

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **constants: self.run(*arguments, grid=grid, warmup=False, **constants)


def test_kernels_are_built_and_not_launched_within_and_launched_afterwards():
    kernel, x = Kernel(), torch.zeros(16)
    with starting.building() as built:
        starting.start(kernel, (1, 1, 1), (x,), (3,), BLOCK=16)
        starting.on(kernel, (1,))(x, 3, BLOCK=16)
    assert built == ["built", "built"]
    starting.on(kernel, (1,))(x, 3, BLOCK=16)
    assert kernel.runs == [True, True, False]


SCRIPT = """
import build_kernels, sys, tempfile, torch
from triton import knobs
from triton.runtime import driver
from affinear.ops import warming

chip = build_kernels.CHIPS["sm_90"]
build_kernels.stop_after("ttir", chip)
driver.set_active(build_kernels.Elsewhere(chip.target))
case = build_kernels.Case.parse("mala:32:bfloat16:short")
with tempfile.TemporaryDirectory() as knobs.cache.dir, torch.autograd.set_multithreading_enabled(False):
    for _ in range(2):
        print(sorted(warming.build([case.run, case.run], 2, None)))
"""


@without_gpu
def test_what_a_call_needs_is_built_once():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT / "src", ROOT / "scripts")))
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    names = ["add_kernel", "attend_backward_kernel", "attention_kernel", "summarize_backward_kernel"]
    assert done.stdout.splitlines() == [str(names), "[]"]
