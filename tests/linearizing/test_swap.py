"""What `linearize` takes: networks wherever they stand, and nothing that cannot be meant."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import affinear
from affinear import linearizing, ops
from affinear.linearizing import LinearCore

from .conftest import Hugging, distance, vision


class Two(nn.Module):
    """A user's own network: a part of timm and a part of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.eye, self.images = vision("vit_tiny_patch16_224")
        self.reader = Hugging("bert")
        self.text: Any = self.reader.model
        self.head = nn.Linear(32, 7)

    def forward(self, images: Tensor, ids: Tensor) -> Tensor:
        return self.eye(images) + self.head(self.text(ids).last_hidden_state.mean(1))


def test_networks_are_found_wherever_they_stand_in_a_module(tmp_path: Path):
    teacher = Two().eval()
    given = (teacher.images, teacher.reader.inputs["input_ids"])
    student, report = affinear.linearize(teacher, "mala", gain=True)
    names = [layer.name for layer in report.swapped]
    assert names == [f"eye.blocks.{i}.attn" for i in range(2)] + [
        f"text.encoder.layer.{i}.attention.self" for i in range(2)
    ]
    with torch.no_grad():
        apart, _ = affinear.linearize(teacher.text, "mala", gain=True)
        assert torch.equal(student.text(given[1]).last_hidden_state, apart(given[1]).last_hidden_state)
        assert distance(student(*given), teacher(*given)) > 1e-6
        path, _ = linearizing.save(student, tmp_path / "a.safetensors")
        assert torch.equal(linearizing.load(path, Two())(*given), student(*given))
        student.text.save_pretrained(tmp_path / "text")
        again = hf.BertModel.from_pretrained(tmp_path / "text").eval()
        assert torch.equal(again(given[1]).last_hidden_state, apart(given[1]).last_hidden_state)


def test_a_network_of_timm_knows_its_grid_inside_another_module():
    teacher, images = vision("vit_tiny_patch16_224")
    student, report = affinear.linearize(nn.Sequential(teacher), convolution=3)
    assert len(report.swapped) == 2
    with torch.no_grad():
        assert torch.equal(student(images), affinear.linearize(teacher, convolution=3)[0](images))


def test_a_compiled_network_is_taken_as_what_it_was_compiled_from():
    teacher: Any = torch.compile(Hugging("bert").model, backend="eager")
    _, report = affinear.linearize(teacher)
    assert len(report.swapped) == 2


def test_part_of_a_linearized_network_is_not_linearized_again():
    student, _ = affinear.linearize(Hugging("llama").model)
    with pytest.raises(ValueError, match="linearized already"):
        affinear.linearize(student.model)


def test_networks_that_share_a_configuration_are_swapped_alike_or_not_at_all():
    first = Hugging("bert").model
    both = nn.ModuleDict({"a": first, "b": hf.BertModel(first.config)})
    with pytest.raises(ValueError, match="model: a and b share one configuration, which notes what is swapped"):
        affinear.linearize(both, layers=["a.*"])
    assert len(affinear.linearize(both)[1].swapped) == 4


def test_a_network_that_cannot_be_noted_is_not_touched_even_in_place():
    teacher = Hugging("llama").model
    teacher.config.quantization_config = {"quant_method": "another"}
    with pytest.raises(ValueError, match="expected one that is not quantized"):
        affinear.linearize(teacher, in_place=True)
    assert not any(isinstance(module, LinearCore) for module in teacher.modules())


@pytest.mark.parametrize("layers", [[True], [0.5], None, slice(0, 1), [None]], ids=str)
def test_layers_of_another_kind_are_refused_in_a_sentence(layers: Any):
    with pytest.raises(ValueError, match='layers: expected "all", or numbers and names in a list, got'):
        affinear.linearize(vision("vit_tiny_patch16_224")[0], layers=layers)


def test_a_number_alone_is_told_how_to_be_written():
    given: Any = 1
    with pytest.raises(ValueError, match=r"got 1; write \[1\]"):
        affinear.linearize(vision("vit_tiny_patch16_224")[0], layers=given)


def test_what_is_no_network_is_refused():
    name: Any = "vit_tiny_patch16_224"
    with pytest.raises(ValueError, match="model: expected a network, a torch module, got str"):
        affinear.linearize(name)


def test_a_mechanism_is_not_taken_for_another_of_its_name():
    other = replace(ops.find("mala"), scale=3.0)
    with pytest.raises(ValueError, match="got another that is called 'mala' as well"):
        affinear.linearize(vision("vit_tiny_patch16_224")[0], other)
