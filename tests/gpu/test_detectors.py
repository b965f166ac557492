"""Detectors neither read nor write outside of their tensors, and softmax serves a mask of very many tokens."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import affinear as af

SCRIPT = Path(__file__).with_name("every_detector.py")
TOOL = shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"]))
ON_A_GPU = torch.cuda.is_available()


def ran(*command: str | Path) -> list[str]:
    """Names of the backbones that went through, in a process where each tensor has memory of its own."""
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return [json.loads(line)["ran"] for line in done.stdout.splitlines() if line.startswith("{")]


def test_a_detector_learns_from_mixed_sizes() -> None:
    assert ran(sys.executable, SCRIPT, "softmax", "resnet") == ["softmax", "resnet"]


@pytest.mark.skipif(TOOL is None or not ON_A_GPU, reason="needs compute-sanitizer and a GPU")
def test_no_detector_leaves_its_tensors() -> None:
    assert TOOL is not None
    assert len(ran(TOOL, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, SCRIPT)) == 6


@pytest.mark.parametrize("learns", [False, True])
def test_softmax_serves_a_mask_of_very_many_tokens(learns: bool, size: Callable[[int, int], int]) -> None:
    """As many as a photo of 1040 x 1388 has: a mask of all pairs would be larger than 32 bits can count."""
    tokens, seen = size(92_928, 90), size(90_220, 70)
    device = "cuda" if ON_A_GPU else "cpu"
    query, key, value = (
        torch.randn(1, tokens, 1, 64, device=device, dtype=torch.bfloat16, requires_grad=learns) for _ in range(3)
    )
    grad = torch.randn_like(query)
    mask = torch.zeros(1, tokens, dtype=torch.bool, device=device)
    mask[:, torch.randperm(tokens, device=device)[:seen]] = True
    if ON_A_GPU:
        torch.cuda.reset_peak_memory_stats()
    found = [af.attention(query, key, value, "softmax", key_mask=mask)]
    wanted = [af.attention(query, key[:, mask[0]], value[:, mask[0]], "softmax")]
    if learns:
        for answers in (found, wanted):
            answers += torch.autograd.grad(answers[0], (query, key, value), grad)
    for one, other in zip(found, wanted, strict=True):
        assert (one.float() - other.float()).norm() <= 2e-2 * other.float().norm()
    if ON_A_GPU:
        assert torch.cuda.max_memory_allocated() < 2**30
