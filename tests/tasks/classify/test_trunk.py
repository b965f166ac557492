"""The trunk: any attention in one network, and nothing but the attention changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch
from timm.optim import create_optimizer_v2

import affinear as af
from affinear.layers import MALA, Parts
from affinear.models import catalogue
from affinear.tasks.classify import variants
from affinear.tasks.classify.trunk import Trunk

MICRO = "affinear_trunk_micro"
EVERY = sorted({*variants.DEFAULT, *variants.SCORE, *variants.LAYERS, *variants.ABLATION})


def make(seed: int, **given: Any) -> Trunk:
    torch.manual_seed(seed)
    made = timm.create_model(MICRO, **given)
    assert isinstance(made, Trunk)
    return made


@pytest.mark.parametrize("name", EVERY)
def test_every_variant_learns_and_begins_with_the_shared_weights(name: str, seed: int):
    plain, other = make(seed), make(seed, mechanism=name)
    shared, weights = plain.state_dict(), other.state_dict()
    for key, weight in shared.items():
        # A gate makes the first projection longer; what comes before it is the same.
        assert torch.equal(weights[key][: len(weight)], weight), key
    logits = other(torch.randn(3, 1, 8, 8))
    assert logits.shape == (3, 10)
    logits.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in other.parameters())


def test_making_a_trunk_uses_up_the_same_random_numbers_whatever_the_variant(seed: int):
    after: list[float] = []
    for name in ("softmax", "mala_layer", "inline_layer"):
        make(seed, mechanism=name)
        after.append(torch.rand(()).item())
    assert len(set(after)) == 1
    first, second = make(seed), make(seed + 1)
    assert not torch.equal(first.head.weight, second.head.weight)  # pyright: ignore[reportArgumentType]


def test_rotary_adds_no_weights_and_keeps_the_learned_positions(seed: int):
    plain, turned = make(seed, mechanism="mala"), make(seed, mechanism="mala", rotary=True)
    assert plain.state_dict().keys() == turned.state_dict().keys()
    assert "position.table" in turned.state_dict()
    image = torch.randn(1, 1, 8, 8)
    assert not torch.allclose(plain(image), turned(image))
    assert torch.equal(turned(image), make(seed, mechanism="mala+rotary")(image))


def test_it_takes_parts_and_mechanisms_of_ones_own(seed: int):
    image = torch.randn(2, 1, 8, 8)
    assert torch.equal(make(seed, mechanism=Parts("mala"))(image), make(seed, mechanism="mala")(image))
    assert torch.equal(make(seed, mechanism=af.mechanisms()["mala"])(image), make(seed, mechanism="mala")(image))
    assert torch.equal(make(seed, mechanism=MALA)(image), make(seed, mechanism="mala_layer")(image))


def test_any_size_and_channels_fit(seed: int):
    model = make(seed, in_chans=3, num_classes=7, mechanism="nala+rotary", img_size=(8, 12))
    assert model(torch.randn(2, 3, 11, 7)).shape == (2, 7)
    model.reset_classifier(3)
    assert model(torch.randn(2, 3, 8, 12)).shape == (2, 3)
    tokens = model.forward_features(torch.randn(2, 3, 8, 12))
    assert tokens.shape == (2, 24, 64)
    model.set_grad_checkpointing()
    model(torch.randn(1, 3, 8, 12)).sum().backward()


def test_the_trunk_of_the_evidence_is_the_one_asked_for():
    model = timm.create_model("affinear_trunk_cifar", device="meta")
    assert isinstance(model, Trunk)
    assert len(model.blocks) == 8
    assert model.embed_dim == 192
    assert model.forward_features(torch.empty(1, 3, 32, 32, device="meta")).shape == (1, 256, 192)
    assert {getattr(block.attn, "num_heads", None) for block in model.blocks} == {6}
    assert not any(isinstance(m, torch.nn.Conv2d) for block in model.blocks for m in block.modules())


def test_weight_decay_leaves_positions_norms_and_learned_constants_out():
    model = timm.create_model(MICRO, mechanism="learned_constants")
    optimizer = create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05)
    free = {id(p) for group in optimizer.param_groups if group["weight_decay"] == 0 for p in group["params"]}
    names = {name for name, parameter in model.named_parameters() if id(parameter) in free}
    assert {"position.table", "norm.weight", "blocks.0.attn.constants.beta", "blocks.0.attn.constants.gamma"} <= names
    assert "blocks.0.attn.qkv.weight" not in names


@pytest.mark.parametrize("name", ["learned_constants", "learned_gain"])
def test_a_copy_learns_numbers_of_its_own(name: str, seed: int):
    model = make(seed, mechanism=name)
    twin = copy.deepcopy(model)
    image = torch.randn(2, 1, 8, 8)
    with torch.no_grad():
        for key, parameter in twin.named_parameters():
            if "constants" in key or "gain" in key:
                parameter.add_(1.0)
    assert torch.equal(model(image), make(seed, mechanism=name)(image))
    assert not torch.allclose(model(image), twin(image))


def test_trunks_are_not_listed_among_the_papers_networks():
    assert timm.is_model(MICRO)
    assert not [name for name in catalogue.names() if "trunk" in name]


def test_bad_arguments_get_a_sentence():
    with pytest.raises(ValueError, match="mechanism: expected one of"):
        make(0, mechanism="mela")
    with pytest.raises(ValueError, match="rotary positions already"):
        make(0, mechanism="mala_layer", rotary=True)
    with pytest.raises(ValueError, match="no class token"):
        make(0, global_pool="token")
