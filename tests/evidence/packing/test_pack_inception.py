"""Kernels of Inception as whole numbers of steps."""

from __future__ import annotations

import math
from typing import Any

import torch


def test_kernels_are_off_by_the_share_that_was_asked_for_and_smaller_layers_by_less(script: Any):
    packing = script("packing.pack_inception")
    shapes = [(64, 96, 3, 3), (64,), (16, 32, 1, 1), (16,)]
    tensors = [torch.randn(shape) * torch.rand(1) for shape in shapes]
    found = packing.restored(packing.rounded(tensors, 0.1))
    assert [tuple(tensor.shape) for tensor in found] == shapes
    assert torch.equal(found[1], tensors[1])
    assert torch.equal(found[3], tensors[3])
    shares = [float((found[i] - tensors[i]).std() / tensors[i].std()) for i in (0, 2)]
    assert math.isclose(shares[0], 0.1, rel_tol=0.1)
    assert shares[1] < 0.02
