"""Kernels are built for real chips, none of which is here, under both ends of the range of Triton versions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from affinear.ops.triton.backend import OLDEST

ROOT = Path(__file__).parents[3]
OLD_TRITON = next(ROOT.glob(".venv/triton-*"), None)  # the Makefile says which, and puts it there
# Cases as scripts/build_kernels.py reads them, those on a line in one process: a few built to the end for one chip in
# every run of the tests, while all the others are translated into Triton's own language ...
QUICK_CASES = "mala:64:bfloat16:short mala:64:bfloat16:rotary+decode"
# ... and all of them in the exhaustive tests ...
CASES = [
    "mala:64 mala:64:bfloat16:causal depthwise:64 add_norm:64",
    "mala:128 mala:64:bfloat16:rotary+decode mala:256:bfloat16:long",
    "nala:96 depthwise:96:float32 mala:64:float32:short mala_released:64:bfloat16:rotary+masked+short",
]
# ... and what may differ on others.
OTHER_CASES = {
    "sm_80": "mala:64:bfloat16:long mala:128:bfloat16:rotary+long",
    "gfx942": "mala:64:bfloat16:long nala:64:bfloat16:short",
}
OLD_CASES = "depthwise:64 add_norm:64 mala:64 mala:64:bfloat16:rotary+decode mala:64:bfloat16:causal"
# Bytes of a thread that may lie outside its registers: in general, and in the forward pass of heads up to 64 wide.
SPILLED, SPILLED_FORWARD, NARROW = 1024, 128, 64
FORWARD = ("summarize.summarize_kernel", "attend.attend_kernel", "fused.attention_kernel")

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU they are built by running them")


def build(chip: str, cases: str, until: str = "binary", triton: Path | None = None) -> dict[str, Any]:
    """What the script says of some cases, in a process of its own, where nothing is interpreted and nothing cached."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = [] if triton is None else [str(triton)]
    environment["PYTHONPATH"] = os.pathsep.join([*path, str(ROOT / "src")])
    command = [sys.executable, ROOT / "scripts/build_kernels.py", chip, *cases.split(), "--until", until, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def check_shared_memory(told: dict[str, Any]) -> None:
    """Every program fits into what its chip has."""
    assert told["builds"]
    too_large = {(b["kernel"], b["case"]): b["shared"] for b in told["builds"] if b["shared"] > told["shared"]}
    assert not too_large


def test_every_kernel_is_translated_and_none_is_forgotten():
    told = build("sm_90", " ".join(CASES), until="translated")
    assert told["kernels"]
    assert {b["kernel"] for b in told["builds"]} == set(told["kernels"])


def test_new_lengths_and_batches_build_nothing_new():
    told = build("sm_90", "mala:64:bfloat16:many mala:64:bfloat16:causal+many", until="launch")
    variants = Counter((b["case"], b["kernel"]) for b in told["builds"])
    assert variants
    # One for sequences of one segment, one for those of several; where keys and values take turns, two of each.
    turns = {"causal.keys.key_kernel": 2}
    assert {which: number for which, number in variants.items() if number > 2 * turns.get(which[1], 1)} == {}


@pytest.mark.parametrize(
    "cases", [QUICK_CASES, *(pytest.param(cases, marks=pytest.mark.exhaustive) for cases in CASES)]
)
def test_kernels_fit_a_hopper(cases: str):
    told = build("sm_90", cases)
    check_shared_memory(told)
    for b in told["builds"]:
        narrow = int(b["case"].split(":")[1]) <= NARROW and b["kernel"] in FORWARD
        assert b["spilled"] <= (SPILLED_FORWARD if narrow else SPILLED), b


@pytest.mark.exhaustive
@pytest.mark.parametrize("chip", OTHER_CASES)
def test_kernels_fit_other_chips(chip: str):
    check_shared_memory(build(chip, OTHER_CASES[chip], until="shared"))


@pytest.mark.exhaustive
def test_kernels_build_under_the_oldest_triton():
    if OLD_TRITON is None:
        pytest.skip("needs an older Triton beside the environment, which make test installs")
    told = build("sm_90", OLD_CASES, until="shared", triton=OLD_TRITON)
    assert tuple(int(number) for number in told["triton"].split(".")[:2]) == OLDEST
    check_shared_memory(told)


@pytest.mark.exhaustive
@pytest.mark.parametrize("triton", [None, OLD_TRITON], ids=["new", "old"])
def test_prepared_launches_are_those_that_triton_makes(triton: Path | None, request: pytest.FixtureRequest):
    if triton is None and "old" in request.node.name:
        pytest.skip("needs an older Triton beside the environment, which make test installs")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = [*([] if triton is None else [triton]), ROOT / "src", ROOT / "scripts"]
    environment["PYTHONPATH"] = os.pathsep.join(map(str, path))
    script = Path(__file__).with_name("prepared_launches.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip() == "['attention_kernel', 'attend_backward_kernel', 'summarize_backward_kernel']"
