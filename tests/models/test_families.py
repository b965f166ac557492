"""What every family does beyond its shapes, on small networks of each."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from timm.models._features_fx import create_feature_extractor, get_graph_node_names
from torch import nn

import affinear as af
from affinear.models._stages import linear_blocks
from affinear.models.catalogue import stages_of

SMALL: dict[str, dict[str, Any]] = {
    "mavit_tiny": {"embed_dims": (8, 16, 24, 32), "depths": (1, 1, 1, 1), "num_heads": (1, 2, 3, 4), "projection": 24},
    "nalaformer_tiny": {"embed_dims": (8, 16, 24, 32), "depths": (1, 1, 1, 1), "num_heads": (1, 2, 3, 4)},
    "inline_deit_tiny": {"img_size": 64, "patch_size": 8, "embed_dim": 24, "depth": 4, "num_heads": 3},
    "inline_pvt_tiny": {
        "img_size": 64,
        "embed_dims": (8, 16, 24, 32),
        "depths": (1, 1, 1, 1),
        "num_heads": (1, 2, 3, 4),
        "mlp_ratios": (2, 2, 2, 2),
    },
    "inline_swin_tiny": {"img_size": 64, "embed_dim": 8, "depths": (1, 2, 2, 2), "num_heads": (1, 2, 4, 8)},
    "inline_cswin_tiny": {"img_size": 64, "embed_dim": 8, "depths": (1, 1, 2, 1), "num_heads": (2, 2, 4, 8)},
    "ravlt_tiny": {"embed_dims": (8, 16, 24, 32), "depths": (1, 1, 1, 1), "num_heads": (1, 2, 3, 4), "projection": 24},
    "mila_tiny": {"embed_dim": 8, "depths": (1, 1, 1, 1), "num_heads": (1, 2, 2, 4), "mlp_ratio": 2.0},
    "rmt_tiny": {"embed_dims": (8, 16, 24, 32), "depths": (1, 1, 1, 1), "num_heads": (1, 2, 3, 4), "projection": 24},
    "secvit_tiny": {
        "embed_dims": (8, 16, 24, 32),
        "depths": (1, 1, 1, 1),
        "num_heads": (1, 2, 3, 4),
        "projection": 24,
        "uneven": True,
    },
}
FAMILIES = sorted(SMALL)
# Those that are softmax throughout have no mechanism to choose.
CHOOSING = [name for name in FAMILIES if not name.startswith(("rmt", "secvit"))]


def small(name: str, **given: Any) -> Any:
    """The network of this name, made small, with numbers of its own in place of those that start at zero or one."""
    settings: dict[str, Any] = {"num_classes": 5, **SMALL[name], **given}
    model = timm.create_model(name, **settings)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


@pytest.mark.parametrize("name", FAMILIES)
def test_one_size_may_follow_another(name: str):
    model = small(name)
    images = [torch.randn(2, 3, height, width) for height, width in ((64, 64), (32, 32), (33, 70), (100, 47), (64, 64))]
    with torch.no_grad():
        once = [model(image) for image in images]
        again = [model(image) for image in images]
    assert all(out.shape == (2, 5) and out.isfinite().all() for out in once)
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


@pytest.mark.parametrize("name", FAMILIES)
def test_an_image_does_not_know_what_else_is_in_the_batch(name: str):
    model = small(name).double()
    images = torch.randn(3, 3, 64, 96, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(model(images)[1:2], model(images[1:2]), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", FAMILIES)
def test_intermediates_are_the_maps_on_the_way_to_the_features(name: str):
    model = small(name)
    images = torch.randn(2, 3, 64, 96)
    with torch.no_grad():
        features, maps = model.forward_intermediates(images)
        torch.testing.assert_close(features, model.forward_features(images))
        last = model.forward_intermediates(images, indices=[0, -1], intermediates_only=True)
        early = model.forward_intermediates(images, indices=[0], stop_early=True, intermediates_only=True)
    assert len(maps) == len(model.feature_info)
    assert torch.equal(last[0], maps[0])
    assert torch.equal(last[1], maps[-1])
    assert torch.equal(early[0], maps[0])
    with pytest.raises(ValueError, match="output_fmt: expected 'NCHW' or"):
        model.forward_intermediates(images, output_fmt="CHWN")


@pytest.mark.parametrize("name", FAMILIES)
def test_features_only_gives_the_same_maps(name: str):
    whole = small(name)
    features = timm.create_model(name, features_only=True, **SMALL[name], out_indices=(1, 3)).eval()
    features.load_state_dict({f"model.{key}": value for key, value in whole.state_dict().items()}, strict=False)
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        maps = whole.forward_intermediates(images, indices=[1, 3], intermediates_only=True)
        for ours, theirs in zip(features(images), maps, strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", FAMILIES)
def test_recomputing_activations_changes_no_gradient(name: str):
    model = small(name, drop_path_rate=0.3).train()
    images = torch.randn(4, 3, 64, 64)

    def gradients() -> list[torch.Tensor]:
        torch.manual_seed(0)
        return list(torch.autograd.grad(model(images).square().sum(), list(model.parameters())))

    kept = gradients()
    model.set_grad_checkpointing()
    for ours, theirs in zip(gradients(), kept, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", CHOOSING)
def test_any_mechanism_takes_the_place_of_the_linear_blocks(name: str):
    images = torch.randn(1, 3, 64, 64)
    answers: list[torch.Tensor] = []
    torch.manual_seed(0)
    weights = small(name).state_dict()
    for mechanism in af.mechanisms():
        model = small(name, mechanism=mechanism)
        model.load_state_dict(weights)
        with torch.no_grad():
            answers.append(model(images))
        assert answers[-1].isfinite().all(), mechanism
        assert f"{mechanism} (" in repr(model)
    different = {tuple(answer.flatten().tolist()) for answer in answers}
    assert len(different) == len(answers)


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_survive_a_file(name: str, tmp_path: Any):
    from safetensors.torch import load_file, save_file

    model, other = small(name), small(name)
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    other.load_state_dict(load_file(tmp_path / "weights.safetensors"))
    loaded = timm.create_model(
        name, num_classes=5, **SMALL[name], checkpoint_path=tmp_path / "weights.safetensors"
    ).eval()
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(other(images), model(images))
        assert torch.equal(loaded(images), model(images))


@pytest.mark.parametrize("name", FAMILIES)
def test_pretrained_weights_may_have_other_classes_and_channels(name: str, tmp_path: Any):
    from safetensors.torch import save_file

    model = small(name)
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    given: dict[str, Any] = {
        **SMALL[name],
        "pretrained_cfg_overlay": {"file": str(tmp_path / "weights.safetensors"), "num_classes": 5},
    }
    tuned = timm.create_model(name, pretrained=True, num_classes=3, in_chans=1, **given).eval()
    assert tuned(torch.randn(1, 1, 64, 64)).shape == (1, 3)
    own = tuned.state_dict()
    shared = [key for key, value in model.state_dict().items() if own[key].shape == value.shape and "head" not in key]
    assert len(shared) > len(own) // 2
    assert all(torch.equal(own[key], model.state_dict()[key]) for key in shared)


@pytest.mark.parametrize("name", ["mavit_tiny", "nalaformer_tiny", "inline_pvt_tiny", "inline_swin_tiny", "ravlt_tiny"])
def test_stage_types_choose_the_linear_blocks(name: str):
    model = small(name, stage_types="SlSv", mechanism="mala")
    first, second, third, fourth = SMALL[name]["depths"]
    assert stages_of(model) == f"{first} softmax, {second} linear, {third} softmax, {fourth} softmax"
    assert f"{second} x mala" in repr(model)


@pytest.mark.parametrize("name", FAMILIES)
def test_one_image_has_the_gradient_that_it_has_beside_another(name: str):
    model = small(name).double()
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64, requires_grad=True)
    (both,) = torch.autograd.grad(model(images)[:1].square().sum(), images)
    alone = images[:1].detach().requires_grad_()
    (one,) = torch.autograd.grad(model(alone).square().sum(), alone)
    torch.testing.assert_close(one, both[:1], rtol=1e-8, atol=1e-10)


def test_a_mixed_stage_is_linear_first():
    assert linear_blocks("IMS2", (1, 3, 1)) == [[True], [True, True, False], [False]]


@pytest.mark.parametrize("stage_types", ["llv", "llvvv", "llvx", "llMv", "llvv2", ""])
def test_stage_types_that_say_nothing_are_refused(stage_types: str):
    with pytest.raises(ValueError, match=r"stage_types: expected 4 letters, .* got '"):
        small("mavit_tiny", stage_types=stage_types)


def test_heads_that_do_not_divide_the_channels_are_refused():
    with pytest.raises(ValueError, match="num_heads: expected a divisor of dim = 24, got 5"):
        small("mavit_tiny", num_heads=(1, 2, 5, 4))


def test_a_pooling_that_deit_does_not_have_is_refused():
    with pytest.raises(ValueError, match="global_pool: expected 'token', 'avg' or '', got 'max'"):
        small("inline_deit_tiny", global_pool="max")


@pytest.mark.parametrize("name", FAMILIES)
def test_torch_fx_takes_stages_and_blocks_as_nodes(name: str):
    model = small(name)
    _, nodes = get_graph_node_names(model)
    traced = create_feature_extractor(model, nodes[-1:]).eval()
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(next(iter(traced(images).values())), model(images))
    assert {"stages.3", "blocks.3"} & set(nodes)


def test_a_network_without_attention_sees_no_further_than_its_convolutions():
    sizes: dict[str, Any] = {"embed_dims": (8, 8, 16, 16), "depths": (1, 1, 1, 1), "num_heads": (1, 1, 2, 2)}
    images = torch.randn(1, 3, 32, 2048)
    changed = images.clone()
    changed[..., 1600:] += 1
    seen: dict[str, bool] = {}
    for mechanism in ("mala", "none"):
        model = timm.create_model("mavit_tiny_linear", mechanism=mechanism, num_classes=0, **sizes).eval()
        with torch.no_grad():
            before, after = (model.forward_features(x)[..., 0] for x in (images, changed))  # type: ignore[operator]
        seen[mechanism] = not torch.equal(before, after)
    assert seen == {"mala": True, "none": False}
    assert stages_of(timm.create_model("mavit_tiny", mechanism="none", device="meta")) == (
        "2 without attention, 2 without attention, 6 softmax, 2 softmax"
    )
