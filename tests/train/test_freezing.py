"""Frozen parts keep every bit, statistics too, and the rest learns."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file
from torch import nn

from affinear.tasks.classify import recipe_for
from affinear.tasks.images.labelled.digits import digits
from affinear.tasks.images.labelled.some import first_of
from affinear.train import Run, train
from affinear.train.blame import layer_at_fault
from affinear.train.freezing import freeze

SMALL = {"embed_dims": (8, 8, 8, 8), "depths": (1, 1, 1, 1), "num_heads": (1, 1, 1, 1), "projection": 8}


def trained(output: Path, start: Path | None, **changes: object) -> dict[str, torch.Tensor]:
    plain = {"batch_size": 16, "workers": 0, "epochs": 1, "image_size": (32, 32)}
    setup = recipe_for("mavit_tiny", "tiny", **{**plain, **changes})
    return load_file(train(Run("mavit_tiny", "digits", output, setup, SMALL, start), data=first_of(digits(), 48)).last)


def test_only_the_head_learns_and_batch_norms_stay_as_they_are(tmp_path: Path):
    before = trained(tmp_path / "a", None)
    after = trained(tmp_path / "b", tmp_path / "a" / "last.safetensors", freeze="body", drop_path=0.5, seed=1)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.startswith("head.fc.")}
    assert any("running_mean" in name for name in before)


def test_parts_are_frozen_by_the_beginnings_of_their_names():
    network = timm.create_model("resnet10t")
    still = freeze(network, "conv1, layer1.0.")
    frozen = {name for name, parameter in network.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name, _ in network.named_parameters() if name.startswith(("conv1.", "layer1.0."))}
    assert network.get_submodule("layer1.0") in still
    assert network.get_submodule("layer2") not in still


def test_of_a_network_on_a_backbone_the_backbone_is_the_body():
    network = nn.ModuleDict({"head": nn.Linear(2, 2)})
    network.backbone = nn.Linear(3, 3)
    freeze(network, "body")
    assert [name for name, parameter in network.named_parameters() if parameter.requires_grad] == [
        "head.weight",
        "head.bias",
    ]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("stage", r"expected 'body', or how names of parameters begin, such as 0, 1, got 'stage'"),
        ("0,1", r"leave something to learn"),
        ("body", r"no part of Sequential is known as its head"),
    ],
)
def test_what_cannot_be_frozen_is_told(what: str, said: str):
    with pytest.raises(ValueError, match=said):
        freeze(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), what)


def test_a_number_that_is_not_finite_names_the_mechanism_it_came_from():
    network = timm.create_model("inline_deit_tiny", depth=1, img_size=32, mechanism="mala")
    with torch.no_grad():
        network.get_submodule("blocks.0.attn.proj").weight.fill_(torch.inf)  # pyright: ignore
    images = torch.randn(1, 3, 32, 32)
    said = layer_at_fault(network, images, lambda: network(images))
    assert said == "layer blocks.0.attn.proj (Linear), whose attention is 'mala'"
