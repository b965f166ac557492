"""DiT: as large as published, equal to diffusers' with the same weights, and to be had there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from diffusers import DiTTransformer2DModel
from torch import Tensor, nn

import affinear
from affinear.models.dit import DiT, sines
from affinear.models.dit_diffusers import (
    LinearDiTPipeline,
    LinearDiTTransformer2DModel,
    diffusion_scheduler,
    flow_scheduler,
    from_diffusers,
    to_diffusers,
)

SMALL: dict[str, Any] = {"in_chans": 3, "num_classes": 5, "embed_dim": 32, "depth": 2, "num_heads": 2}
# Trained weights and the fixed table of positions, which ours has no tensor for: as the authors' program counts them.
PUBLISHED = {"dit_s_2": 32_963_360, "dit_b_2": 130_512_416, "dit_l_2": 458_102_816, "dit_xl_2": 675_129_632}


def shaken(network: nn.Module) -> Any:
    """With weights that are nowhere zero, in float64."""
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.2)
    return network.double().eval()


def given(batch: int = 3, size: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    times = torch.randint(1000, (batch,))
    return torch.randn(batch, 3, size, size, dtype=torch.float64), times, torch.randint(6, (batch,))


@pytest.mark.parametrize("name", PUBLISHED)
def test_it_has_as_many_parameters_as_published(name: str):
    model = timm.create_model(name, device="meta")
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count + 256 * model.embed_dim == PUBLISHED[name]  # pyright: ignore[reportOperatorIssue]


def test_it_begins_by_saying_nothing_and_takes_any_grid():
    model = DiT(**SMALL)
    x, times, labels = given()
    assert not model(x.float(), times, labels).any()
    assert shaken(model)(torch.randn(2, 3, 4, 14).double(), times[:2], labels[:2]).shape == (2, 6, 4, 14)


@pytest.mark.parametrize("mechanism", ["softmax", "linear", "mala", "inline", "nala", "mala_released", "none"])
def test_any_mechanism_learns_in_every_weight(mechanism: str):
    model = shaken(DiT(**SMALL, mechanism=mechanism, rotary=True, position_kernel=3, gate="linear"))
    model(*given()).square().sum().backward()
    still = [name for name, parameter in model.named_parameters() if parameter.grad is None or not parameter.grad.any()]
    # Softmax does not see what all keys have in common; a label that nobody asked for is not looked up.
    assert all("qkv.bias" in name for name in still)


def test_recomputed_activations_change_nothing():
    model = shaken(DiT(**SMALL, mechanism="mala"))
    asked = given()
    plain = model(*asked)
    model.set_grad_checkpointing()
    torch.testing.assert_close(model.train()(*asked), plain)


def test_what_is_no_multiple_of_the_patch_is_refused():
    with pytest.raises(
        ValueError, match=r"x: expected 3 channels and sides that are multiples of the patch, 2, got 3 x 1 x 1"
    ):
        DiT(**SMALL)(torch.zeros(1, 3, 1, 1), torch.zeros(1), torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ValueError, match="gate: expected none, linear or silu, got 'relu'"):
        DiT(**SMALL, gate="relu")
    with pytest.raises(ValueError, match="embed_dim: expected a multiple of 4"):
        DiT(embed_dim=34)


def test_positions_are_those_of_diffusers():
    theirs: Any = DiTTransformer2DModel(2, 16, in_channels=3, num_layers=1, sample_size=12, num_embeds_ada_norm=5)
    torch.testing.assert_close(sines(6, 6, 32), theirs.pos_embed.pos_embed[0])


@pytest.mark.parametrize("sigma", [True, False])
def test_a_stock_transformer_of_diffusers_is_ours_with_the_same_weights(sigma: bool):
    theirs: Any = DiTTransformer2DModel(
        2, 16, in_channels=3, out_channels=6 if sigma else None, num_layers=2, sample_size=8, num_embeds_ada_norm=5
    )
    shaken(theirs)
    for block in theirs.transformer_blocks[1:]:
        block.norm1.emb.load_state_dict(theirs.transformer_blocks[0].norm1.emb.state_dict())
    ours = from_diffusers(theirs)
    x, times, labels = given()
    torch.testing.assert_close(ours(x, times, labels), theirs(x, timestep=times, class_labels=labels).sample)


@pytest.mark.parametrize("mechanism", ["softmax", "mala", "nala", "inline"])
def test_ours_is_one_of_diffusers_and_comes_back(mechanism: str, tmp_path: Path):
    ours = shaken(DiT(**SMALL, mechanism=mechanism))
    theirs: Any = to_diffusers(ours, 8)
    assert isinstance(theirs, DiTTransformer2DModel)
    x, times, labels = given()
    expected = ours(x, times, labels)
    torch.testing.assert_close(theirs(x, timestep=times, class_labels=labels).sample, expected)
    theirs.save_pretrained(tmp_path)
    again: Any = LinearDiTTransformer2DModel.from_pretrained(tmp_path, torch_dtype=torch.float64)
    torch.testing.assert_close(again(x, timestep=times, class_labels=labels).sample, expected)
    torch.testing.assert_close(from_diffusers(again)(x, times, labels), expected)


def test_linearize_makes_the_same_of_a_stock_transformer():
    ours = shaken(DiT(**SMALL, mechanism="softmax", closed_frequencies=True))
    stock: Any = DiTTransformer2DModel(
        2, 16, in_channels=3, out_channels=6, num_layers=2, sample_size=8, num_embeds_ada_norm=5, norm_eps=1e-6
    )
    stock.double().eval().load_state_dict(to_diffusers(ours, 8).state_dict())
    stock, _ = affinear.linearize(stock, "mala")
    x, times, labels = given()
    found = from_diffusers(to_diffusers(ours, 8), "mala")(x, times, labels)
    torch.testing.assert_close(found, stock(x, timestep=times, class_labels=labels).sample)


def test_embedders_that_were_trained_apart_are_refused():
    theirs: Any = shaken(
        DiTTransformer2DModel(2, 16, in_channels=3, num_layers=2, sample_size=8, num_embeds_ada_norm=5)
    )
    with pytest.raises(ValueError, match="expected what the first block has"):
        from_diffusers(theirs)


def test_parts_that_diffusers_has_no_place_for_are_refused():
    with pytest.raises(ValueError, match="without rotary positions, convolution or gate"):
        to_diffusers(DiT(**SMALL, mechanism="mala", rotary=True))


@pytest.mark.parametrize("process", ["ddpm", "flow"])
def test_a_pipeline_draws_is_saved_and_draws_the_same(process: str, tmp_path: Path):
    ours = shaken(DiT(**SMALL, mechanism="mala", learn_sigma=process == "ddpm")).float()
    scheduler = diffusion_scheduler() if process == "ddpm" else flow_scheduler()
    pipeline = LinearDiTPipeline(to_diffusers(ours, 8), scheduler, names=list("abcde"))
    pipeline.set_progress_bar_config(disable=True)

    def drawn(asked: Any, guidance: float = 2.0) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return asked(["b", 3], guidance, generator, num_inference_steps=3, output_type="pt", return_dict=False)[0]

    expected = drawn(pipeline)
    assert expected.shape == (2, 3, 8, 8)
    pipeline.save_pretrained(tmp_path)
    again = LinearDiTPipeline.from_pretrained(tmp_path)
    again.set_progress_bar_config(disable=True)
    torch.testing.assert_close(drawn(again), expected)
    with pytest.raises(ValueError, match="class_labels: expected numbers from 0 to 4, or one of a, b"):
        pipeline([5])
