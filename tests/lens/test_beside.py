"""The maps of a teacher and of its linearized copy, side by side."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
import transformers as hf
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


def llama(**given: Any) -> Any:
    sizes: dict[str, Any] = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 48, "vocab_size": 99, "pad_token_id": 0, **given,
    }  # fmt: skip
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes)).eval()


@pytest.mark.parametrize("function", ["sdpa", "eager"])
def test_maps_of_a_decoder_and_its_linearized_copy_are_compared(function: str):
    teacher = llama()
    teacher.set_attn_implementation(function)
    for parameter in teacher.parameters():
        nn.init.normal_(parameter, std=0.3)
    student, _ = affinear.linearize(teacher, "mala", layers=[0])
    ids = torch.randint(3, 99, (2, 12))
    before = student(ids).logits
    found = differences(teacher, student, lambda network: network(ids), rows=100)
    assert [layer.name for layer in found] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    heard: list[torch.Tensor] = []
    layer = teacher.model.layers[0].self_attn
    handles = [
        part.register_forward_hook(lambda _m, _i, out: heard.append(out)) for part in (layer.q_proj, layer.k_proj)
    ]
    with torch.no_grad():
        teacher(ids)
        cos, sin = teacher.model.rotary_emb(heard[0], torch.arange(12)[None])
    q, k = (x.unflatten(-1, (-1, 8)) for x in heard)
    for handle in handles:
        handle.remove()

    def turned(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * cos[:, :, None] + torch.cat((-second, first), -1) * sin[:, :, None]

    maps = [affinear.weights(turned(q), turned(k), name, causal=True) for name in ("mala", "softmax")]
    expected = (maps[0] - maps[1]).abs().sum(-1).mean(dim=(0, 2)) / 2
    assert found[0].heads == pytest.approx(expected.tolist(), rel=1e-3)
    assert torch.equal(student(ids).logits, before)  # nothing stays behind


def test_rows_of_padding_do_not_count():
    teacher = llama()
    student, _ = affinear.linearize(teacher, "mala")
    ids, mask = torch.randint(3, 99, (1, 12)), (torch.arange(12) < 8).long()[None]
    padded = differences(teacher, student, lambda network: network(ids, attention_mask=mask), rows=100)
    alone = differences(teacher, student, lambda network: network(ids[:, :8]), rows=100)
    for one, other in zip(padded, alone, strict=True):
        assert one.distance == pytest.approx(other.distance, rel=1e-4)


def test_a_window_alone_has_no_map():
    teacher, ids = llama(), torch.randint(3, 99, (1, 12))
    student, _ = affinear.linearize(teacher, "none", window=4)
    with pytest.raises(ValueError, match="expected layers that the teacher has as well"):
        differences(teacher, student, lambda network: network(ids))


def test_an_encoder_that_is_the_same_has_no_difference():
    sizes: dict[str, Any] = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 99
    }  # fmt: skip
    teacher = hf.BertModel(hf.BertConfig(**sizes)).eval()
    student, _ = affinear.linearize(teacher, "linear", layers=[1])
    found = differences(teacher, student, lambda network: network(torch.full((1, 9), 7)))
    assert found[0].distance < 1e-6 < found[1].distance
