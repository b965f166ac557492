"""Any timm network gives its maps for images of any size, and of several sizes at once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from timm.models import group_parameters
from timm.optim import create_optimizer_v2
from torch import nn

from affinear.models.detectors import Detector, DetectorSettings
from affinear.models.features import Features
from affinear.models.heads import Segmenter

SMALL: dict[str, Any] = {"embed_dims": (8, 8, 16, 16), "depths": (1, 1, 1, 1), "num_heads": (1, 1, 2, 2)}
# Under NaLa, heads as narrow as those of SMALL magnify roundings thirtyfold in one draw of thirteen.
HEADS_OF_32: dict[str, Any] = {"embed_dims": (32, 32, 64, 64), "depths": (1, 1, 1, 1), "num_heads": (1, 1, 2, 2)}
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("swin_tiny_patch4_window7_224", {"embed_dim": 8, "depths": (1, 1, 1, 1), "num_heads": (1, 1, 2, 2)}),
    ("resnet18", {}),
    ("convnext_atto", {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)}),
    ("mavit_tiny", SMALL),
    ("inline_pvt_tiny", {**SMALL, "mlp_ratios": (1, 1, 1, 1)}),
]


@pytest.mark.parametrize(("name", "given"), OTHERS)
@torch.no_grad()
def test_maps_of_any_size_have_the_announced_channels_and_strides(name: str, given: dict[str, Any]):
    backbone = Features(name, model_args=given).eval()
    for size in ((64, 96), (75, 130)):
        maps = backbone(torch.randn(2, 3, *size))
        assert [out.shape[1] for out in maps] == backbone.channels
        for out, stride in zip(maps, backbone.strides, strict=True):
            rounded_up = [-(-side // stride) for side in size]
            assert all(side - 1 <= got <= side for side, got in zip(rounded_up, out.shape[2:], strict=True))


@torch.no_grad()
def test_an_image_in_a_padded_batch_has_its_own_maps():
    backbone = Features("mavit_tiny", model_args=SMALL).double().eval()
    for norm in backbone.norms:
        nn.init.normal_(norm.bias)  # type: ignore[arg-type]
    batch = torch.randn(2, 3, 80, 96, dtype=torch.float64)
    sizes = [(80, 50), (37, 96)]
    together = backbone(batch, sizes)
    for i, (rows, columns) in enumerate(sizes):
        for own, out in zip(backbone(batch[i : i + 1, :, :rows, :columns]), together, strict=True):
            height, width = own.shape[2:]
            torch.testing.assert_close(out[i, :, :height, :width], own[0], rtol=1e-9, atol=1e-9)
            assert not out[i, :, height:].any()
            assert not out[i, :, :, width:].any()


@torch.no_grad()
def test_published_arithmetic_lets_padding_in():
    backbone = Features("mavit_tiny", masked=False, model_args=SMALL).eval()
    batch = torch.randn(2, 3, 64, 64)
    for told, untold in zip(backbone(batch, [(64, 32), (64, 64)]), backbone(batch), strict=True):
        torch.testing.assert_close(told, untold, rtol=0, atol=0)


def test_networks_of_others_say_that_they_do_not_mask():
    assert not Features("resnet18").masks
    assert Features("mavit_tiny", model_args=SMALL).masks


def test_layer_norm_networks_end_in_norms_and_batch_norm_networks_do_not():
    assert not any(isinstance(norm, nn.Identity) for norm in Features("mavit_tiny", model_args=SMALL).norms)
    assert all(isinstance(norm, nn.Identity) for norm in Features("resnet18").norms)


@pytest.mark.parametrize("name", ["mavit_tiny", "mavit_tiny_linear"])
def test_every_weight_gets_the_same_gradient_with_checkpointing_and_masks(name: str):
    backbone = Features(name, model_args=SMALL).double()
    other = copy.deepcopy(backbone)
    other.set_grad_checkpointing()
    batch, sizes = torch.randn(2, 3, 64, 96, dtype=torch.float64), [(64, 60), (40, 96)]
    for network in (backbone, other):
        sum(out.square().sum() for out in network(batch, sizes)).backward()  # type: ignore[union-attr]
    for (key, own), twin in zip(backbone.named_parameters(), other.parameters(), strict=True):
        assert own.grad is not None, key
        assert twin.grad is not None, key
        torch.testing.assert_close(own.grad, twin.grad)


def test_networks_of_others_that_write_over_their_activations_can_recompute_them():
    backbone = Features("resnet18").double()
    other = copy.deepcopy(backbone)
    other.set_grad_checkpointing()
    batch = torch.randn(2, 3, 64, 96, dtype=torch.float64)
    for network in (backbone, other):
        sum(out.square().sum() for out in network(batch)).backward()  # type: ignore[union-attr]
    for own, twin in zip(backbone.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(own.grad, twin.grad)


@pytest.mark.parametrize("name", ["mavit_tiny", "mavit_tiny_linear", "nalaformer_tiny_linear"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_single(name: str, dtype: torch.dtype):
    errors: list[torch.Tensor] = []
    for _ in range(3):
        backbone = Features(name, model_args=HEADS_OF_32).eval()
        batch, sizes = torch.randn(2, 3, 64, 96), [(64, 60), (40, 96)]
        with torch.no_grad():
            exact = backbone(batch, sizes)
            with torch.autocast("cpu", dtype):
                rounded = backbone(batch, sizes)
        assert all(other.isfinite().all() for other in rounded)
        errors.append(torch.stack([(own - x).norm() / own.norm() for own, x in zip(exact, rounded, strict=True)]))
    # The middle of three: one draw in 250 of NaLa is worse, as its gain divides.
    assert (torch.stack(errors).median(0).values < 20 * torch.finfo(dtype).eps).all()


@pytest.mark.parametrize(("size", "names"), [((512, 2048), ["mavit_small"]), ((800, 1344), ["mavit_small_linear"])])
@torch.no_grad()
def test_shapes_at_the_sizes_of_dense_tasks(size: tuple[int, int], names: list[str]):
    for name in names:
        with torch.device("meta"):
            backbone = Features(name).eval()
            maps = backbone(torch.empty(1, 3, *size))
        assert [tuple(out.shape[2:]) for out in maps] == [(size[0] // s, size[1] // s) for s in (4, 8, 16, 32)]


def test_what_cannot_be_is_refused_in_a_sentence():
    with pytest.raises(ValueError, match="model: expected a network such as mavit_tiny, got 'mavid'"):
        Features("mavid")
    with pytest.raises(ValueError, match="strides 4, 8, 16, 32, got inline_deit_tiny, which has them at 16"):
        Features("inline_deit_tiny", model_args={"depth": 4})
    with pytest.raises(ValueError, match="model_args: resnet18 takes no 'mechanism'"):
        Features("resnet18", model_args={"mechanism": "mala"})
    with pytest.raises(ValueError, match="sizes: expected images of 1 x 1 to 64 x 64"):
        Features("mavit_tiny", model_args=SMALL)(torch.randn(1, 3, 64, 64), [(65, 64)])


@pytest.mark.parametrize(("name", "given"), [OTHERS[0], OTHERS[1], OTHERS[3]])
def test_layers_of_a_backbone_learn_ever_faster_towards_the_head(name: str, given: dict[str, Any]):
    segmenter = Segmenter(name, num_classes=3, model_args=given)
    layers: Any = group_parameters(segmenter, segmenter.group_matcher(), reverse=True)
    last = max(layers.values())
    assert last > 4
    assert {layer == last for key, layer in layers.items() if not key.startswith("backbone.body")} == {True}
    body = [layer for key, layer in layers.items() if key.startswith("backbone.body")]
    assert min(body) == 0
    assert max(body) < last
    optimizer = create_optimizer_v2(segmenter, opt="adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.5)
    scales = {group["lr_scale"] for group in optimizer.param_groups}
    assert max(scales) == 1
    assert min(scales) == 0.5**last


def test_so_do_those_of_a_detector():
    detector = Detector("mavit_tiny", 2, DetectorSettings("retinanet", channels=32), SMALL)
    layers: Any = group_parameters(detector, detector.group_matcher(), reverse=True)
    inside = {key for key in layers if ".features.body." in key}
    assert inside
    assert max(layers[key] for key in inside) < min(layer for key, layer in layers.items() if key not in inside)
    assert sorted(layers) == sorted(key for key, _ in detector.named_parameters())
