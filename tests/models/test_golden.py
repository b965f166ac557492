"""Networks filled with weights under the released names give the released networks' numbers and gradients."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from affinear.models import released

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def read(family: str) -> tuple[dict[str, object], dict[str, Tensor]]:
    """Configuration and tensors of a golden file, floats in float64."""
    with safe_open(GOLDEN / f"{family}.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no dict
        config = json.loads(file.metadata()["config"])
    return config, {name: x.double() if x.is_floating_point() else x for name, x in tensors.items()}


def weights(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("state."): x for name, x in tensors.items() if name.startswith("state.")}


@pytest.mark.parametrize("family", sorted(released.FAMILIES))
def test_outputs_and_input_gradients_are_the_released_ones(family: str):
    config, tensors = read(family)
    model = released.build(family, config).double().eval()
    released.load(model, weights(tensors))
    image = tensors["input"].requires_grad_()
    logits = model(image)
    (gradient,) = torch.autograd.grad((logits * tensors["cotangent"]).sum(), image)
    for ours, theirs in ((logits, tensors["output"]), (gradient, tensors["grad_input"])):
        assert (ours - theirs).norm() / theirs.norm() < 1e-6


@pytest.mark.parametrize("family", sorted(released.FAMILIES))
def test_weights_that_do_not_fit_are_all_named_and_none_is_loaded(family: str):
    config, tensors = read(family)
    model = released.build(family, config)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    given = weights(tensors)
    lost, bent = sorted(name for name in given if name.endswith("fc1.bias"))[:2]
    shape = given[bent].shape
    del given[lost]
    given |= {bent: torch.zeros(3), "stranger.weight": torch.zeros(1)}
    with pytest.raises(ValueError, match="3 of its tensors do not fit") as error:
        released.load(model, given)
    message = str(error.value)
    assert message.count("missing") == 1
    assert "unexpected stranger.weight" in message
    assert f"is (3,), expected {tuple(shape)}" in message
    after = model.state_dict()
    assert all(torch.equal(x, after[name]) for name, x in before.items())


def test_a_family_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"family: expected one of mavit, .* got 'resnet'"):
        released.build("resnet", {})
