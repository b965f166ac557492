"""The twin that speed is measured against computes what the released network does."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from affinear.models.mavit import mavit_tiny

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def released_twin(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "models"))
    yield __import__("released_twin")
    sys.modules.pop("released_twin", None)


def test_outputs_and_input_gradients_are_the_released_ones(released_twin: Any):
    from test_golden import read, weights  # pyright: ignore

    config, tensors = read("mavit")
    network = released_twin.ReleasedTwin(**config).double().eval()
    network.load_state_dict(weights(tensors))
    image = tensors["input"].requires_grad_()
    logits = network(image)
    (gradient,) = torch.autograd.grad((logits * tensors["cotangent"]).sum(), image)
    for ours, theirs in ((logits, tensors["output"]), (gradient, tensors["grad_input"])):
        assert (ours - theirs).norm() / theirs.norm() < 1e-6


def test_sizes_have_as_many_weights_as_our_networks(released_twin: Any):
    ours = mavit_tiny(device=torch.device("meta"))
    with torch.device("meta"):
        theirs = released_twin.twin("tiny")
    assert sum(x.numel() for x in theirs.parameters()) == sum(x.numel() for x in ours.parameters())
