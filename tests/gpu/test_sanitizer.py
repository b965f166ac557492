"""No kernel reads or writes outside of its tensors."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("every_kernel.py")
TOOL = shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"]))

LENGTH = 2500  # enough for several segments, and a rest


def run(*command: str | Path, length: int) -> subprocess.CompletedProcess[str]:
    """Run every kernel in a process of its own, where each tensor has memory of its own."""
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    return subprocess.run(
        [*command, sys.executable, SCRIPT, str(length)], capture_output=True, text=True, env=environment
    )


def check_every_kernel_ran(done: subprocess.CompletedProcess[str]) -> None:
    """All there are, by their names."""
    told = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert told["kernels"]
    assert set(told["ran"]) == set(told["kernels"])


def test_every_kernel_runs():
    if os.environ.get("TRITON_INTERPRET") == "1":
        done = run(length=70)
        assert done.returncode == 0, done.stderr[-4000:]
        pytest.skip(f"too few tokens to need every kernel; {LENGTH} would take the interpreter minutes")
    done = run(length=LENGTH)
    assert done.returncode == 0, done.stderr[-4000:]
    check_every_kernel_ran(done)


@pytest.mark.skipif(TOOL is None or not torch.cuda.is_available(), reason="needs compute-sanitizer and a GPU")
def test_no_kernel_leaves_its_tensors():
    assert TOOL is not None
    done = run(TOOL, "--tool", "memcheck", "--error-exitcode", "9", length=LENGTH)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    check_every_kernel_ran(done)
    assert "ERROR SUMMARY: 0 errors" in done.stdout + done.stderr
