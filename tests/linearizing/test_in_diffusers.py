"""Networks of diffusers become linear."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import affinear
from affinear import linearizing
from affinear.linearizing import LinearCore

from .conftest import distance, exact, same_when_compiled

diffusers = pytest.importorskip("diffusers")


def dit() -> tuple[nn.Module, dict[str, Any]]:
    net = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4, num_layers=2, sample_size=8,
        patch_size=2, num_embeds_ada_norm=10,
    )  # fmt: skip
    labels = torch.randint(0, 10, (2,))
    return net, {"hidden_states": torch.randn(2, 4, 8, 8), "timestep": torch.tensor([3, 7]), "class_labels": labels}


def sd3() -> tuple[nn.Module, dict[str, Any]]:
    net = diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=12, caption_projection_dim=16, pooled_projection_dim=10, out_channels=4,
        pos_embed_max_size=8,
    )  # fmt: skip
    return net, {
        "hidden_states": torch.randn(2, 4, 8, 8),
        "encoder_hidden_states": torch.randn(2, 5, 12),
        "pooled_projections": torch.randn(2, 10),
        "timestep": torch.tensor([3, 7]),
    }


def flux() -> tuple[nn.Module, dict[str, Any]]:
    net = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=12, pooled_projection_dim=10, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    return net, {
        "hidden_states": torch.randn(2, 9, 4),
        "encoder_hidden_states": torch.randn(2, 5, 12),
        "pooled_projections": torch.randn(2, 10),
        "timestep": torch.tensor([0.3, 0.7]),
        "img_ids": torch.randint(0, 3, (9, 3)).float(),
        "txt_ids": torch.zeros(5, 3),
    }


def unet() -> tuple[nn.Module, dict[str, Any]]:
    net = diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, block_out_channels=(8, 16), layers_per_block=1,
        cross_attention_dim=12, attention_head_dim=4, norm_num_groups=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    return net, {
        "sample": torch.randn(2, 4, 8, 8),
        "timestep": torch.tensor([3, 7]),
        "encoder_hidden_states": torch.randn(2, 5, 12),
        "encoder_attention_mask": mask,
    }


NETWORKS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {"dit": dit, "sd3": sd3, "flux": flux}


def answer(net: nn.Module, given: dict[str, Any]) -> Tensor:
    return net(**given).sample


@pytest.mark.parametrize("name", [*NETWORKS, "unet"])
def test_with_softmax_in_our_place_a_swapped_network_is_its_teacher(name: str):
    teacher, given = unet() if name == "unet" else NETWORKS[name]()
    layers = ["*attn1", "*attn2"] if name == "unet" else "all"
    student, report = affinear.linearize(teacher.eval(), "linear", layers)
    assert not report.left
    with torch.no_grad():
        assert distance(answer(exact(student), given), answer(teacher, given)) < 1e-5


@pytest.mark.parametrize("name", NETWORKS)
def test_one_line_swaps_a_network(name: str, tmp_path: Path):
    teacher, given = NETWORKS[name]()
    student, report = affinear.linearize(teacher.eval(), "mala", feature_map="learned", gain=True)
    out = answer(student, given)
    assert out.shape == answer(teacher, given).shape
    out.square().sum().backward()
    learned = [p for module in student.modules() if isinstance(module, LinearCore) for p in module.parameters()]
    assert len(learned) == 3 * len(report.swapped)
    assert all(parameter.grad is not None for parameter in learned)
    with torch.no_grad():
        path, _ = linearizing.save(student, tmp_path / "a.safetensors")
        again = linearizing.load(path, NETWORKS[name]()[0])
        assert torch.equal(answer(again, given), answer(student, given))
    with pytest.raises(ValueError, match="names no network of timm"):
        linearizing.load(path)


@pytest.mark.exhaustive  # a vision network compiles in test_in_timm.py
@pytest.mark.parametrize("name", NETWORKS)
def test_a_swapped_network_compiles_and_learns_as_it_would(name: str):
    teacher, given = NETWORKS[name]()
    student, _ = affinear.linearize(teacher.eval(), "mala", gain=True)
    same_when_compiled(student, lambda network: answer(network, given))


def test_a_mask_of_text_is_respected_where_cross_attention_is_swapped():
    teacher, given = unet()
    student, report = affinear.linearize(teacher.eval(), "mala")
    assert {layer.remark for layer in report.left} == {"cross-attention: name it in layers= to have it swapped"}
    student, _ = affinear.linearize(teacher, "mala", ["*attn2"])
    other = given["encoder_hidden_states"].clone()
    other[0, 4] = torch.randn(12)
    with torch.no_grad():
        assert torch.equal(answer(student, given), answer(student, {**given, "encoder_hidden_states": other}))
        other[1, 4] = torch.randn(12)
        assert not torch.equal(answer(student, given), answer(student, {**given, "encoder_hidden_states": other}))
