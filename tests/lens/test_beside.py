"""The maps of a teacher and of its linearized copy, side by side."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import nn

import affinear
from affinear import lens
from affinear.lens.beside import differences


def test_a_linearized_layer_is_read_as_what_it_is():
    teacher: Any = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=64).eval()
    student, _ = affinear.linearize(teacher, "mala", feature_map="learned")
    core = student.blocks[0].attn.linearized
    nn.init.normal_(core.query_map, std=0.3)
    with lens.watch(student) as watched:
        student(torch.randn(2, 3, 64, 64))
    assert watched.layers[0].mechanism == "mala"


def test_the_distance_of_two_maps_is_half_the_sum_of_what_differs():
    teacher: Any = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=64).eval()
    student, _ = affinear.linearize(teacher, "mala")
    images = torch.randn(2, 3, 64, 64)
    (found,) = differences(teacher, student, lambda network: network(images), rows=100)
    block = teacher.blocks[0]
    with torch.no_grad():
        x = block.norm1(teacher.norm_pre(teacher._pos_embed(teacher.patch_embed(images))))
        q, k, _ = block.attn.qkv(x).unflatten(-1, (3, 3, 64)).unbind(2)
        apart = affinear.weights(q, k, "mala") - affinear.weights(q, k, "softmax")
    expected = apart.abs().sum(-1).mean(dim=(0, 2)) / 2
    assert found.heads == pytest.approx(expected.tolist(), rel=1e-4)
    assert found.distance == pytest.approx(float(expected.mean()), rel=1e-4)


def test_networks_without_common_layers_are_refused():
    teacher: Any = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=64).eval()
    with pytest.raises(ValueError, match="expected layers that the teacher has as well"):
        differences(teacher, nn.Identity(), lambda network: network(torch.randn(1, 3, 64, 64)))
