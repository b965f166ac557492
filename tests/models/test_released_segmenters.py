"""Segmenters under mmsegmentation's names give what the released backbone and independent heads give."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional as F

from affinear.models import released
from affinear.models.heads import released as segmenters

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "mavit.safetensors"
CLASSES = 5


@pytest.fixture(scope="module")
def backbone() -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Arguments and weights of the small released MAViT, whose numbers another test holds to."""
    with safe_open(GOLDEN, "pt") as file:
        config = json.loads(file.metadata()["config"])
        names = [name for name in file.keys() if name.startswith("state.")]  # noqa: SIM118, it is no dict
        found = {name.removeprefix("state."): file.get_tensor(name) for name in names}
    return config, {name: x.double() if x.is_floating_point() else x for name, x in found.items()}


def without_classifier(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a released segmenter has of them."""
    return {name: x for name, x in weights.items() if not name.startswith(("head.", "proj.", "norm."))}


def conv(prefix: str, before: int, after: int, side: int) -> dict[str, Tensor]:
    """A convolution and its norm, as mmcv's ConvModule stores them."""
    return {
        f"{prefix}.conv.weight": (torch.randn(after, before, side, side) / (side * before**0.5)).double(),
        f"{prefix}.bn.weight": (torch.rand(after) + 0.5).double(),
        f"{prefix}.bn.bias": torch.randn(after).double(),
        f"{prefix}.bn.running_mean": torch.randn(after).double(),
        f"{prefix}.bn.running_var": (torch.rand(after) + 0.5).double(),
        f"{prefix}.bn.num_batches_tracked": torch.tensor(7),
    }


def plain(prefix: str, before: int, after: int, side: int) -> dict[str, Tensor]:
    return {
        f"{prefix}.weight": (torch.randn(after, before, side, side) / (side * before**0.5)).double(),
        f"{prefix}.bias": torch.randn(after).double(),
    }


def with_backbone(weights: dict[str, Tensor], channels: list[int]) -> dict[str, Tensor]:
    """Backbone and its last norms in the released names."""
    state = {f"backbone.{name}": x for name, x in without_classifier(weights).items()}
    for i, dim in enumerate(channels):
        state |= {f"backbone.extra_norms.{i}.norm.{part}": torch.randn(dim).double() for part in ("weight", "bias")}
    return state


def fpn_checkpoint(weights: dict[str, Tensor], channels: list[int]) -> dict[str, Tensor]:
    state = with_backbone(weights, channels)
    for i, dim in enumerate(channels):
        state |= plain(f"neck.lateral_convs.{i}.conv", dim, 256, 1) | plain(f"neck.fpn_convs.{i}.conv", 256, 256, 3)
        for j in range(max(1, i)):
            state |= conv(f"decode_head.scale_heads.{i}.{2 * j}", 128 if j else 256, 128, 3)
    return state | plain("decode_head.conv_seg", 128, CLASSES, 1)


def uper_checkpoint(weights: dict[str, Tensor], channels: list[int]) -> dict[str, Tensor]:
    state = with_backbone(weights, channels)
    for i in range(4):
        state |= conv(f"decode_head.psp_modules.{i}.1", channels[3], 512, 1)
    state |= conv("decode_head.bottleneck", channels[3] + 2048, 512, 3)
    for i, dim in enumerate(channels[:3]):
        state |= conv(f"decode_head.lateral_convs.{i}", dim, 512, 1) | conv(f"decode_head.fpn_convs.{i}", 512, 512, 3)
    state |= conv("decode_head.fpn_bottleneck", 2048, 512, 3) | plain("decode_head.conv_seg", 512, CLASSES, 1)
    return (
        state | conv("auxiliary_head.convs.0", channels[2], 256, 3) | plain("auxiliary_head.conv_seg", 256, CLASSES, 1)
    )


def features(config: dict[str, Any], weights: dict[str, Tensor], state: dict[str, Tensor], x: Tensor) -> list[Tensor]:
    """Maps of the released classifier, each under the segmenter's last norm."""
    model: Any = released.build("mavit", config).double().eval()
    released.load(model, weights)
    maps = model.forward_intermediates(x, intermediates_only=True)
    out: list[Tensor] = []
    for i, found in enumerate(maps):
        weight, bias = (state[f"backbone.extra_norms.{i}.norm.{part}"] for part in ("weight", "bias"))
        normed = F.layer_norm(found.permute(0, 2, 3, 1), weight.shape, weight, bias, 1e-6)
        out.append(normed.permute(0, 3, 1, 2))
    return out


def args_of(config: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != "num_classes"}


@torch.no_grad()
def test_semantic_fpn_gives_what_its_definition_gives(backbone: tuple[dict[str, Any], dict[str, Tensor]]):
    config, weights = backbone
    state = fpn_checkpoint(weights, config["embed_dims"])
    network = segmenters.read(state, "mavit_tiny", args_of(config)).double()
    x = torch.randn(2, 3, 64, 96, dtype=torch.float64)
    maps = features(config, weights, state, x)

    def convolve(name: str, x: Tensor, padding: int) -> Tensor:
        return F.conv2d(x, state[f"{name}.weight"], state[f"{name}.bias"], padding=padding)

    def block(name: str, x: Tensor) -> Tensor:
        x = F.conv2d(x, state[f"{name}.conv.weight"], padding=1)
        parts = [state[f"{name}.bn.{part}"] for part in ("running_mean", "running_var", "weight", "bias")]
        return F.relu(F.batch_norm(x, parts[0], parts[1], parts[2], parts[3]))

    laterals = [convolve(f"neck.lateral_convs.{i}.conv", m, 0) for i, m in enumerate(maps)]
    for i in (2, 1, 0):
        laterals[i] = laterals[i] + F.interpolate(laterals[i + 1], scale_factor=2, mode="nearest")
    total = torch.zeros(())
    for i, lateral in enumerate(laterals):
        level = convolve(f"neck.fpn_convs.{i}.conv", lateral, 1)
        for j in range(max(1, i)):
            level = block(f"decode_head.scale_heads.{i}.{2 * j}", level)
            if i:
                level = F.interpolate(level, scale_factor=2, mode="bilinear", align_corners=False)
        total = total + level
    [logits] = network(x)
    torch.testing.assert_close(logits, convolve("decode_head.conv_seg", total, 0), rtol=1e-8, atol=1e-8)


@torch.no_grad()
def test_upernet_gives_what_transformers_gives(backbone: tuple[dict[str, Any], dict[str, Tensor]]):
    transformers = pytest.importorskip("transformers")
    from transformers.models.upernet.modeling_upernet import UperNetFCNHead, UperNetHead

    config, weights = backbone
    channels = config["embed_dims"]
    state = uper_checkpoint(weights, channels)
    network = segmenters.read(state, "mavit_tiny", args_of(config)).double()
    about = transformers.UperNetConfig(
        backbone_config=transformers.ConvNextConfig(), num_labels=CLASSES, auxiliary_in_channels=channels[2]
    )
    theirs = nn.ModuleDict()
    theirs["decode_head"], theirs["auxiliary_head"] = UperNetHead(about, channels), UperNetFCNHead(about, channels)
    renamed = {
        re.sub(r"\.bn\.", ".batch_norm.", name.replace("conv_seg", "classifier")): x
        for name, x in state.items()
        if not name.startswith("backbone.")
    }
    theirs.load_state_dict(renamed)
    theirs.double().eval()
    x = torch.randn(1, 3, 32, 64, dtype=torch.float64)
    maps = features(config, weights, state, x)
    [logits] = network(x)
    torch.testing.assert_close(logits, theirs["decode_head"](maps), rtol=1e-8, atol=1e-8)
    assert network.helper is not None
    torch.testing.assert_close(network.helper(maps[2]), theirs["auxiliary_head"](maps), rtol=1e-8, atol=1e-8)


def test_what_does_not_fit_is_named(backbone: tuple[dict[str, Any], dict[str, Tensor]]):
    config, weights = backbone
    state = fpn_checkpoint(weights, config["embed_dims"])
    del state["neck.fpn_convs.1.conv.bias"]
    state["decode_head.stranger"] = torch.zeros(1)
    with pytest.raises(ValueError, match="2 of its tensors do not fit mavit_tiny under semantic_fpn") as error:
        segmenters.read(state, "mavit_tiny", args_of(config))
    assert "missing head.neck.output.1.bias" in str(error.value)
    assert "unexpected decode_head.stranger" in str(error.value)
    with pytest.raises(ValueError, match="checkpoint: expected a segmenter with SemanticFPN or UperNet"):
        segmenters.read(weights, "mavit_tiny")
