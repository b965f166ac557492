"""Networks of timm become linear."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch
from torch import nn

import affinear
from affinear import linearizing
from affinear.linearizing import LinearCore

from .conftest import VISION, distance, exact, same_when_compiled, vision


def without_bias(model: nn.Module) -> nn.Module:
    """A bias of position cannot be kept exactly; without one a swap must be exact."""
    for name, parameter in model.named_parameters():
        if "relative_position_bias_table" in name or "rel_pos" in name:
            nn.init.zeros_(parameter)
    return model


@pytest.mark.parametrize("name", VISION)
def test_with_softmax_in_our_place_a_swapped_network_is_its_teacher(name: str):
    teacher, images = vision(name)
    student, _ = affinear.linearize(without_bias(teacher), "linear")
    with torch.no_grad():
        assert distance(exact(student)(images), teacher(images)) < 1e-5


@pytest.mark.parametrize("name", VISION)
def test_one_line_swaps_a_network_and_gradients_reach_every_weight(name: str):
    teacher, images = vision(name)
    before = {key: tensor.clone() for key, tensor in teacher.state_dict().items()}
    student, report = affinear.linearize(teacher, "mala", gain=True)
    assert report.swapped
    assert all(torch.equal(tensor, teacher.state_dict()[key]) for key, tensor in before.items())
    assert not any(isinstance(module, LinearCore) for module in teacher.modules())
    out = student(images)
    assert out.shape == (2, 7)
    with torch.no_grad():
        assert distance(out, teacher(images)) > 1e-6
    out.square().sum().backward()
    # CaiT adds a number to all scores of a query before its softmax, which sees no such thing.
    lost = [key for key, tensor in student.named_parameters() if tensor.grad is None and "proj_l.bias" not in key]
    assert not lost, lost


@pytest.mark.parametrize("name", VISION)
def test_a_swapped_network_is_saved_and_loaded(name: str, tmp_path: Path):
    teacher, images = vision(name)
    student, _ = affinear.linearize(teacher, "nala", feature_map="learned", gain=True)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
        path, _ = linearizing.save(student, tmp_path / "a.safetensors", model_args={"num_classes": 7, **VISION[name]})
        again = linearizing.load(path)
        assert torch.equal(again(images), student(images))
    with pytest.raises(ValueError, match="expected a new file"):
        linearizing.save(student, path)


def test_a_network_that_could_not_be_made_again_is_not_saved(tmp_path: Path):
    student, _ = affinear.linearize(vision("vit_tiny_patch16_224")[0])
    with pytest.raises(ValueError, match="pass model_args= as it was made with"):
        linearizing.save(student, tmp_path / "a.safetensors")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("model", "hf-hub:a/b", "model: expected the name of a network"),
        ("model_args", {"checkpoint_path": "bomb.pth"}, "takes no 'checkpoint_path'"),
        ("model_args", {"depth": {"a": 1}}, "expected a number, a name or a list"),
        ("choices", {"mechanism": "exec"}, "mechanism: expected one of"),
        ("choices", {"evil": 1}, "choices: expected"),
        ("layers", ["../../etc"], "layers: expected a list of names"),
        ("layers", ["blocks.*"], "layers: expected a list of names"),
        ("format", 9, "format: expected 1"),
    ],
)
def test_a_strangers_file_is_refused_in_a_sentence(field: str, value: object, said: str, tmp_path: Path):
    import json

    student, _ = affinear.linearize(vision("vit_tiny_patch16_224")[0])
    args = {"num_classes": 7, **VISION["vit_tiny_patch16_224"]}
    path, beside = linearizing.save(student, tmp_path / "a.safetensors", model_args=args)
    told = json.loads(beside.read_text())
    beside.write_text(json.dumps({**told, field: value}))
    with pytest.raises(ValueError, match=said):
        linearizing.load(path)


def test_the_report_tells_what_became_of_a_bias():
    teacher, _ = vision("swin_tiny_patch4_window7_224")
    _, report = affinear.linearize(teacher)
    assert all("kept as attention by position alone" in layer.remark for layer in report.swapped)
    _, report = affinear.linearize(teacher, bias="drop")
    assert all("DROPPED" in layer.remark for layer in report.swapped)
    with pytest.raises(ValueError, match=r"nothing could be swapped[^$]*bias='leave'"):
        affinear.linearize(teacher, bias="leave")


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "beit_base_patch16_224"])
def test_a_bias_that_is_kept_is_nearer_to_the_teacher_than_one_that_is_dropped(name: str):
    teacher, images = vision(name)
    for key, parameter in teacher.named_parameters():
        if "bias_table" in key:
            nn.init.normal_(parameter)
    kept, dropped = (exact(affinear.linearize(teacher, "linear", bias=bias)[0]) for bias in ("position", "drop"))
    with torch.no_grad():
        truth = teacher(images)
        assert distance(kept(images), truth) < 0.5 * distance(dropped(images), truth)


def test_class_attention_and_unknown_layers_are_left_alone_with_a_reason():
    _, report = affinear.linearize(vision("cait_xxs24_224")[0])
    assert {layer.remark for layer in report.left} == {"it has one query, and is linear in tokens as it is"}
    swin2 = timm.create_model("swinv2_tiny_window8_256", depths=(1, 1), embed_dim=32, num_heads=(2, 4))
    with pytest.raises(ValueError, match="WindowAttention is not known here"):
        affinear.linearize(swin2)


def test_windows_of_maxvit_are_swapped():
    net = timm.create_model("maxvit_tiny_rw_224", depths=(1, 1), embed_dim=(32, 64), stem_width=16, num_classes=7)
    student, report = affinear.linearize(net.eval())
    assert len(report.swapped) == 4
    assert not report.left
    with torch.no_grad():
        assert student(torch.randn(1, 3, 224, 224)).shape == (1, 7)


def test_coatnet_attends_over_maps_and_keeps_its_bias():
    teacher = timm.create_model(
        "coatnet_0_rw_224",
        num_classes=7,
        depths=(1, 1, 1, 1),
        embed_dim=(16, 32, 32, 64),
        stem_width=(8, 16),
        img_size=64,
    ).eval()
    images = torch.randn(2, 3, 64, 64)
    student, report = affinear.linearize(without_bias(teacher), "linear")
    assert [layer.was for layer in report.swapped] == ["Attention2d"] * 2
    assert all("kept as attention by position alone" in layer.remark for layer in report.swapped)
    student(images).square().sum().backward()
    assert not [key for key, tensor in student.named_parameters() if tensor.grad is None]
    with torch.no_grad():
        assert distance(exact(student)(images), teacher(images)) < 1e-5


def test_only_the_layers_that_are_named_are_swapped():
    teacher, _ = vision("vit_tiny_patch16_224")
    for layers in ([1], [-1], ["blocks.1.*"], "blocks.1.attn"):
        _, report = affinear.linearize(teacher, layers=layers)
        assert [layer.name for layer in report.swapped] == ["blocks.1.attn"]
        assert report.left[0].remark == "not among the layers asked"
    with pytest.raises(ValueError, match="numbers from 0 to 1, got 5"):
        affinear.linearize(teacher, layers=[5])
    with pytest.raises(ValueError, match=r"expected names such as blocks.0.attn, .*, got 'head'"):
        affinear.linearize(teacher, layers=["head"])


def test_in_place_changes_the_network_itself_and_only_once():
    teacher, _ = vision("vit_tiny_patch16_224")
    student, _ = affinear.linearize(teacher, in_place=True)
    assert student is teacher
    with pytest.raises(ValueError, match="linearized already"):
        affinear.linearize(teacher)


def test_a_network_without_attention_is_refused():
    with pytest.raises(ValueError, match="in which none was found"):
        affinear.linearize(nn.Linear(3, 3))


def test_a_convolution_begins_as_nothing_and_reaches_neighbours_alone():
    teacher, images = vision("vit_tiny_patch16_224")
    plain, _ = affinear.linearize(teacher)
    student, report = affinear.linearize(teacher, convolution=3)
    assert report.added == 2 * 192 * 9
    with torch.no_grad():
        assert torch.allclose(student(images), plain(images), atol=1e-5)
    core = student.blocks[0].attn.linearized
    nn.init.ones_(core.kernel)
    q, k = torch.randn(2, 1, 17, 3, 64).unbind()
    v = torch.randn(1, 17, 3, 64)
    added = (core(q, k, v) - plain.blocks[0].attn.linearized(q, k, v)).detach()
    assert float(added[:, 0].abs().max()) < 1e-5  # the class token has no place on the grid
    assert torch.allclose(added[:, 1], v[:, [1, 2, 5, 6]].sum(1), atol=1e-4)  # a corner of 4 x 4


# One of each kind is enough for a day's work; compiling takes seconds.
COMPILED = [
    name if name.startswith(("vit_tiny", "swin_tiny")) else pytest.param(name, marks=pytest.mark.exhaustive)
    for name in VISION
]


@pytest.mark.parametrize("name", COMPILED)
def test_a_swapped_network_compiles_in_one_piece_and_learns_as_it_would(name: str):
    teacher, images = vision(name)
    student, _ = affinear.linearize(teacher, gain=True)
    same_when_compiled(student, lambda network: network(images), fullgraph=True)


@pytest.mark.exhaustive
def test_a_swapped_vision_network_becomes_an_onnx_file_that_says_the_same():
    from affinear.models.export import export_onnx

    student, _ = affinear.linearize(vision("vit_tiny_patch16_224")[0], "mala", gain=True)
    exported = export_onnx(student, size=(64, 64))
    assert exported.error < 1e-4
