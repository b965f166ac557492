"""Which layers are worth leaving softmax, and leaving them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers as hf

import affinear
from affinear.linearizing import Choices
from affinear.linearizing.distil import swapped_layers
from affinear.linearizing.leaving import choose, layers_to_leave, twin

from .conftest import SMALL, TEXT, distance

DEPTH = 4


def seeing(*layers: int) -> Any:
    """A ViT in which only these layers' attention reaches the answer."""
    model: Any = timm.create_model("vit_tiny_patch16_224", depth=DEPTH, img_size=64, num_classes=7).eval()
    for place, block in enumerate(model.blocks):
        if place not in layers:
            torch.nn.init.zeros_(block.attn.proj.weight)
            torch.nn.init.zeros_(block.attn.proj.bias)
        else:  # sharp enough for linear attention to answer otherwise
            block.attn.qkv.weight.data *= 8
    return model


def reading(*layers: int) -> Any:
    """A Llama in which only these layers' attention reaches the answer."""
    sizes = {**SMALL, "num_hidden_layers": DEPTH}
    model: Any = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, **TEXT)).eval()
    for place, layer in enumerate(model.model.layers):
        if place not in layers:
            torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        else:
            for part in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
                part.weight.data *= 40
    return model


def test_the_layer_that_matters_is_found_in_a_network_of_timm():
    teacher, images = seeing(2), torch.randn(2, 3, 64, 64)
    before = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}
    [left] = layers_to_leave(teacher, lambda network: network(images), 1, Choices("mala"))
    assert left.name == "blocks.2.attn"
    assert abs(left.cost) < 1e-6
    assert all(torch.equal(tensor, before[name]) for name, tensor in teacher.state_dict().items())


def test_two_layers_that_matter_are_found_in_a_decoder_with_a_window():
    teacher, ids = reading(0, 3), torch.randint(3, 99, (2, 24))
    choices = Choices("inline", window=4, sinks=1)
    found = layers_to_leave(teacher, lambda network: network(ids, use_cache=False), 2, choices)
    assert {left.name for left in found} == {"model.layers.0.self_attn", "model.layers.3.self_attn"}
    assert found[0].cost > 1e-4
    assert abs(found[1].cost) < 1e-5
    student, report = affinear.linearize(teacher, "inline", leave=[left.name for left in found], window=4, sinks=1)
    with torch.no_grad():
        assert distance(student(ids).logits, teacher(ids).logits) < 1e-4
    assert len(report.left) == 2


def test_later_rounds_try_the_best_of_the_first_alone():
    worth = dict(zip("abcdef", (1, 9, 2, 8, 3, 7), strict=True))
    tried: list[tuple[str, ...]] = []
    heard: list[tuple[int, int]] = []

    def cost(left: Sequence[str]) -> float:
        tried.append(tuple(left))
        return -sum(worth[name] for name in left)

    found = choose(list(worth), 3, cost, among=4, told=lambda done, all_: heard.append((done, all_)))
    assert [left.name for left in found] == ["b", "d", "f"]
    assert [left.cost for left in found] == [-9, -17, -24]
    assert {name for left in tried[6:] for name in left} == {"b", "d", "f", "e"}
    assert heard == [(done, len(tried)) for done in range(1, len(tried) + 1)]


def test_what_is_not_finite_is_never_chosen():
    costs = {"a": math.nan, "b": 2.0, "c": math.inf}
    assert choose(list(costs), 1, lambda left: costs[left[0]])[0].name == "b"
    with pytest.raises(ValueError, match="call: expected finite logits"):
        choose(["a", "c"], 1, lambda left: costs[left[0]])


@pytest.mark.parametrize("count", [0, -1, 3, 4])
def test_as_many_layers_as_there_are_cannot_be_left(count: int):
    with pytest.raises(ValueError, match=rf"count: expected 1 or more, and fewer than the 3 layers, got {count}"):
        choose(["a", "b", "c"], count, lambda left: 0.0)
    with pytest.raises(ValueError, match="among: expected as many layers as are to be left, 2, or more, got 1"):
        choose(["a", "b", "c"], 2, lambda left: 0.0, among=1)


def test_a_twin_has_the_same_weights_and_another_structure():
    teacher = reading(1)
    other = twin(teacher)
    assert [p.data_ptr() for p in other.parameters()] == [p.data_ptr() for p in teacher.parameters()]
    affinear.linearize(other, "mala", in_place=True)
    with pytest.raises(ValueError, match="without a linear layer"):
        swapped_layers(teacher)
    assert teacher.config._attn_implementation == "sdpa"


def test_layers_that_are_left_stay_so_in_files(tmp_path: Path):
    teacher, ids = reading(0, 1, 2, 3), torch.randint(3, 99, (2, 9))
    student, report = affinear.linearize(teacher, "mala", leave=[1, "*.3.*"])
    assert [layer.name for layer in report.left] == ["model.layers.1.self_attn", "model.layers.3.self_attn"]
    assert report.left[0].remark == "it is to be left as it is"
    assert list(swapped_layers(student)) == ["model.layers.0.self_attn", "model.layers.2.self_attn"]
    student.save_pretrained(tmp_path)
    again = hf.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(again(ids).logits, student(ids).logits)


def test_what_is_to_be_left_is_checked():
    given: Any
    for given, said in (
        (["model.layers.9.*"], r"leave: expected names such as model\.layers\.0"),
        ([7], r"leave: expected numbers from 0 to 3, got 7"),
        (2, r"leave: expected numbers and names in a list, got 2; write \[2\]"),
        ([True], r"leave: expected numbers and names in a list, got True"),
    ):
        with pytest.raises(ValueError, match=said):
            affinear.linearize(reading(0), leave=given)
