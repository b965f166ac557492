"""A linearized network learns from its teacher."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import affinear
from affinear.linearizing.distil import Weights, layer_errors, network_loss, swapped_layers

from .conftest import Hugging, exact, vision


def test_a_layer_that_answers_as_its_teacher_has_no_error():
    teacher, images = vision("vit_tiny_patch16_224")
    student = exact(affinear.linearize(teacher, "linear")[0])
    errors = layer_errors(teacher, student, lambda network: network(images))
    assert list(errors) == ["blocks.0.attn", "blocks.1.attn"]
    assert all(float(error.detach()) < 1e-9 for error in errors.values())


def test_every_layer_is_asked_what_the_teachers_was_asked():
    teacher, images = vision("vit_tiny_patch16_224")
    student, _ = affinear.linearize(teacher, "mala")
    with torch.no_grad():
        errors = layer_errors(teacher, student, lambda network: network(images))
        x = teacher.blocks[0](teacher.norm_pre(teacher._pos_embed(teacher.patch_embed(images))))
        asked = teacher.blocks[1].norm1(x)
        target, found = teacher.blocks[1].attn(asked), student.blocks[1].attn(asked)
    expected = (found - target).square().mean() / target.var(correction=0)
    assert float(errors["blocks.1.attn"]) == pytest.approx(float(expected), rel=1e-4)


def test_the_first_stage_brings_layers_nearer_to_their_teacher():
    llama = Hugging("llama")
    for name, parameter in llama.model.named_parameters():
        if "q_proj" in name or "k_proj" in name:  # fresh weights attend to all tokens alike, which is linear already
            torch.nn.init.normal_(parameter, std=0.5)
    student, _ = affinear.linearize(llama.model, "mala", feature_map="hedgehog", gain=True)
    learned = [parameter for layer in swapped_layers(student).values() for parameter in layer.parameters()]
    optimizer = torch.optim.Adam(learned, lr=3e-3)
    sums: list[float] = []
    for _ in range(20):
        errors = layer_errors(llama.model, student, lambda network: network(**llama.inputs, use_cache=False))
        loss = torch.stack(list(errors.values())).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sums.append(loss.item())
    assert sums[-1] < 0.8 * sums[0]
    outside = [name for name, p in student.named_parameters() if p.grad is not None and "self_attn" not in name]
    assert not outside  # what a layer hands on is the teacher's answer: nothing else is learned


def test_the_second_stage_counts_logits_features_and_labels():
    teacher, images = vision("vit_tiny_patch16_224")
    same = exact(affinear.linearize(teacher, "linear")[0])
    student, _ = affinear.linearize(teacher, "mala")
    labels = torch.tensor([1, 3])
    with torch.no_grad():

        def loss(network: torch.nn.Module, **parts: float) -> float:
            off = {"logits": 0.0, "hidden": 0.0, "labels": 0.0}
            weights = Weights(**{**off, **parts})
            return float(network_loss(teacher, network, lambda model: model(images), weights=weights, labels=labels))

        assert loss(same, logits=1.0, hidden=1.0) < 1e-6
        ours, theirs = student(images), teacher(images)
        heat = 2.0
        divergence = F.kl_div((ours / heat).log_softmax(-1), (theirs / heat).softmax(-1), reduction="batchmean")
        assert loss(student, logits=1.0, temperature=heat) == pytest.approx(4 * float(divergence), rel=1e-3)
        assert loss(student, labels=2.0) == pytest.approx(2 * float(F.cross_entropy(ours, labels)), rel=1e-5)
        features = [model.forward_features(images) for model in (student, teacher)]
        error = (features[0] - features[1]).square().mean() / features[1].var(correction=0)
        assert loss(student, hidden=1.0) == pytest.approx(float(error), rel=1e-3)
    with pytest.raises(ValueError, match="labels: expected classes"):
        network_loss(teacher, student, lambda model: model(images), weights=Weights(labels=1.0))
    with pytest.raises(ValueError, match="expected a linearized network"):
        swapped_layers(teacher)


def test_features_may_come_from_a_layer_that_is_named():
    whisper = Hugging("whisper")
    student, _ = affinear.linearize(whisper.model, "mala", convolution=3)

    def loss(weights: Weights, features: str | None) -> torch.Tensor:
        def call(network: torch.nn.Module) -> torch.Tensor:
            return network(**whisper.inputs).logits

        return network_loss(whisper.model, student, call, weights=weights, features=features)

    hidden = loss(Weights(logits=0.0), "model.encoder.layer_norm")
    hidden.backward()
    taught = {name.split(".")[1] for name, p in student.named_parameters() if p.grad is not None}
    assert taught == {"encoder"}  # the decoder comes after it
    with torch.no_grad():
        sounds = whisper.inputs["input_features"]
        ours, theirs = (model.model.encoder(sounds)[0] for model in (student, whisper.model))
        expected = float((ours - theirs).square().mean() / theirs.var(correction=0))
        assert float(hidden) == pytest.approx(expected, rel=1e-4)
        assert float(loss(Weights(logits=0.0), None)) != pytest.approx(expected, rel=1e-2)
    with pytest.raises(ValueError, match="features: expected the name of a layer"):
        loss(Weights(), "encoder.norm")
