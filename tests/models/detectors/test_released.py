"""Released detectors: weights in mmdetection's names and order give what mmdetection's layers, written out here, give.

The backbone's weights are those of the golden file. No released detector could be had: shapes and names are those of
the published configuration, values are drawn.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional as F
from torchvision.ops import roi_align

from affinear.models.detectors import Detector
from affinear.models.detectors.released import kind_of, read

GOLDEN = Path(__file__).parents[2] / "golden" / "mavit.safetensors"
WIDTHS = (8, 16, 24, 32)
CLASSES = 6


def backbone() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The golden backbone under the names it has in a detector, and its arguments."""
    with safe_open(GOLDEN, "pt") as file:  # pyright: ignore[reportUnknownVariableType]
        config = json.loads(file.metadata()["config"])
        state = {name.removeprefix("state."): file.get_tensor(name) for name in file.keys() if "state." in name}  # noqa: SIM118
    kept = {f"backbone.{name}": x for name, x in state.items() if name.startswith(("patch_embed.", "layers."))}
    for i, width in enumerate(WIDTHS):
        kept[f"backbone.extra_norms.{i}.norm.weight"] = 1 + 0.1 * torch.randn(width)
        kept[f"backbone.extra_norms.{i}.norm.bias"] = 0.1 * torch.randn(width)
    return kept, {name: value for name, value in config.items() if name != "num_classes"}


def layer(name: str, *shape: int, bias: bool = True) -> dict[str, Tensor]:
    fan = torch.Size(shape[1:]).numel()
    made = {f"{name}.weight": torch.randn(*shape) * fan**-0.5}
    return {**made, f"{name}.bias": 0.1 * torch.randn(shape[0])} if bias else made


def neck(first: int, extra: int) -> dict[str, Tensor]:
    made: dict[str, Tensor] = {}
    for i, width in enumerate(WIDTHS[first:]):
        made |= layer(f"neck.lateral_convs.{i}.conv", 256, width, 1, 1)
        made |= layer(f"neck.fpn_convs.{i}.conv", 256, 256, 3, 3)
    for i in range(extra):
        made |= layer(f"neck.fpn_convs.{4 - first + i}.conv", 256, (WIDTHS[-1], 256)[i], 3, 3)
    return made


def stage(prefix: str, convs: bool, agnostic: bool) -> dict[str, Tensor]:
    made: dict[str, Tensor] = {}
    if convs:
        for i in range(4):
            name = f"{prefix}.shared_convs.{i}"
            made |= layer(f"{name}.conv", 256, 256, 3, 3, bias=False)
            made |= {f"{name}.bn.weight": torch.rand(256) + 0.5, f"{name}.bn.bias": 0.1 * torch.randn(256)}
            made |= {f"{name}.bn.running_mean": torch.randn(256), f"{name}.bn.running_var": torch.rand(256) + 0.5}
            made[f"{name}.bn.num_batches_tracked"] = torch.tensor(7)
    made |= layer(f"{prefix}.shared_fcs.0", 1024, 256 * 49)
    if not convs:
        made |= layer(f"{prefix}.shared_fcs.1", 1024, 1024)
    made |= layer(f"{prefix}.fc_cls", CLASSES + 1, 1024)
    return made | layer(f"{prefix}.fc_reg", 4 if agnostic else 4 * CLASSES, 1024)


def mask_stage(prefix: str) -> dict[str, Tensor]:
    made: dict[str, Tensor] = {}
    for i in range(4):
        made |= layer(f"{prefix}.convs.{i}.conv", 256, 256, 3, 3)
    made[f"{prefix}.upsample.weight"] = torch.randn(256, 256, 2, 2) * 0.05
    made[f"{prefix}.upsample.bias"] = 0.1 * torch.randn(256)
    return made | layer(f"{prefix}.conv_logits", CLASSES, 256, 1, 1)


def region_detector(cascade: bool, convs: bool = True, agnostic: bool = False) -> dict[str, Tensor]:
    made = neck(0, 0) | layer("rpn_head.rpn_conv", 256, 256, 3, 3)
    made |= layer("rpn_head.rpn_cls", 3, 256, 1, 1) | layer("rpn_head.rpn_reg", 12, 256, 1, 1)
    for number in ("0.", "1.", "2.") if cascade else ("",):
        made |= stage(f"roi_head.bbox_head.{number}".rstrip("."), cascade and convs, agnostic)
        made |= mask_stage(f"roi_head.mask_head.{number}".rstrip("."))
    return made


def dense_detector() -> dict[str, Tensor]:
    made = neck(1, 2)
    for i in range(4):
        made |= layer(f"bbox_head.cls_convs.{i}.conv", 256, 256, 3, 3)
        made |= layer(f"bbox_head.reg_convs.{i}.conv", 256, 256, 3, 3)
    return made | layer("bbox_head.retina_cls", 9 * CLASSES, 256, 3, 3) | layer("bbox_head.retina_reg", 36, 256, 3, 3)


def conv(x: Tensor, state: dict[str, Tensor], name: str, padding: int = 0, stride: int = 1) -> Tensor:
    return F.conv2d(x, state[f"{name}.weight"], state.get(f"{name}.bias"), stride, padding)


def linear(x: Tensor, state: dict[str, Tensor], name: str) -> Tensor:
    return F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])


def pyramid(maps: list[Tensor], state: dict[str, Tensor]) -> list[Tensor]:
    """Mmdetection's FPN: nearest top-down, no norms."""
    levels = [conv(x, state, f"neck.lateral_convs.{i}.conv") for i, x in enumerate(maps)]
    for i in range(len(levels) - 1, 0, -1):
        levels[i - 1] = levels[i - 1] + F.interpolate(levels[i], size=levels[i - 1].shape[2:], mode="nearest")
    out = [conv(x, state, f"neck.fpn_convs.{i}.conv", 1) for i, x in enumerate(levels)]
    if f"neck.fpn_convs.{len(maps)}.conv.weight" not in state:
        return [*out, F.max_pool2d(out[-1], 1, stride=2)]
    six = conv(maps[-1], state, f"neck.fpn_convs.{len(maps)}.conv", 1, 2)
    return [*out, six, conv(six, state, f"neck.fpn_convs.{len(maps) + 1}.conv", 1, 2)]


def region_head(x: Tensor, state: dict[str, Tensor], prefix: str) -> tuple[Tensor, Tensor]:
    """Logits, background last, and numbers of boxes."""
    i = 0
    while f"{prefix}.shared_convs.{i}.conv.weight" in state:
        name = f"{prefix}.shared_convs.{i}"
        x = conv(x, state, f"{name}.conv", 1)
        mean, var, weight, bias = (
            state[f"{name}.bn.{part}"] for part in ("running_mean", "running_var", "weight", "bias")
        )
        x, i = F.relu(F.batch_norm(x, mean, var, weight, bias)), i + 1
    x = x.flatten(1)
    for fc in ("shared_fcs.0", "shared_fcs.1"):
        if f"{prefix}.{fc}.weight" in state:
            x = F.relu(linear(x, state, f"{prefix}.{fc}"))
    return linear(x, state, f"{prefix}.fc_cls"), linear(x, state, f"{prefix}.fc_reg")


def mask_head(x: Tensor, state: dict[str, Tensor], prefix: str) -> Tensor:
    for i in range(4):
        x = F.relu(conv(x, state, f"{prefix}.convs.{i}.conv", 1))
    x = F.relu(F.conv_transpose2d(x, state[f"{prefix}.upsample.weight"], state[f"{prefix}.upsample.bias"], 2))
    return conv(x, state, f"{prefix}.conv_logits")


def normed_maps(network: Detector, state: dict[str, Tensor], images: Tensor, first: int) -> list[Tensor]:
    """The backbone's maps, its body held to the golden file elsewhere, under the released norms."""
    body: Any = network.backbone.features.body
    norms = [
        (state[f"backbone.extra_norms.{i}.norm.weight"], state[f"backbone.extra_norms.{i}.norm.bias"]) for i in range(4)
    ]
    maps = [x.permute(0, 2, 3, 1) for x in body(images)]
    normed = [F.layer_norm(x, x.shape[-1:], *norm, eps=1e-6) for x, norm in zip(maps, norms, strict=True)]
    return [x.permute(0, 3, 1, 2) for x in normed][first:]


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("cascade", "convs", "agnostic"), [(False, False, False), (True, True, False), (True, False, True)]
)
@torch.no_grad()
def test_regions_are_told_of_as_by_mmdetection(cascade: bool, convs: bool, agnostic: bool) -> None:
    trunk, args = backbone()
    state = {**trunk, **region_detector(cascade, convs, agnostic)}
    network = read(state, "mavit_tiny", args)
    assert network.settings.kind == ("cascade_mask_rcnn" if cascade else "mask_rcnn")
    assert (network.classes, network.settings.masked) == (CLASSES, False)
    images = torch.randn(1, 3, 64, 96)
    levels = pyramid(normed_maps(network, state, images, 0), state)
    ours = network.backbone(images)
    for one, other in zip(ours.values(), levels, strict=True):
        close(one, other)
    assert network.regions is not None
    rpn: Any = network.regions["rpn"]
    hidden = F.relu(conv(levels[1], state, "rpn_head.rpn_conv", 1))
    close(rpn.head([levels[1]])[0][0], conv(hidden, state, "rpn_head.rpn_cls"))
    close(rpn.head([levels[1]])[1][0], conv(hidden, state, "rpn_head.rpn_reg"))
    heads: Any = network.regions["roi_heads"]
    box = torch.tensor([[0.0, 8.0, 12.0, 40.0, 50.0], [0.0, 3.0, 3.0, 60.0, 60.0]])  # both small: the finest level
    for i, stage in enumerate(heads.stages if cascade else [heads]):
        number = f".{i}" if cascade else ""
        pooled = roi_align(levels[0], box, 7, 1 / 4, -1, aligned=True)
        close(stage.box_roi_pool(ours, [box[:, 1:]], [(64, 96)]), pooled)
        logits, deltas = stage.box_predictor(stage.box_head(pooled))
        expected, moves = region_head(pooled, state, f"roi_head.bbox_head{number}")
        close(logits[:, 1:], expected[:, :-1])
        close(logits[:, 0], expected[:, -1])
        close(deltas if agnostic else deltas[:, 4:], moves)
        small = roi_align(levels[0], box, 14, 1 / 4, -1, aligned=True)
        masks = stage.mask_predictor(stage.mask_head(small))
        close(masks[:, 1:], mask_head(small, state, f"roi_head.mask_head{number}"))


@torch.no_grad()
def test_retinanet_is_told_as_by_mmdetection() -> None:
    trunk, args = backbone()
    state = {**trunk, **dense_detector()}
    network = read(state, "mavit_tiny", args)
    images = torch.randn(1, 3, 128, 128)
    levels = pyramid(normed_maps(network, state, images, 1), state)
    for one, other in zip(network.backbone(images).values(), levels, strict=True):
        close(one, other)
    assert network.dense is not None
    head: Any = network.dense.head
    for kind, last, ours, width in (
        ("cls", "retina_cls", "cls_logits", CLASSES),
        ("reg", "retina_reg", "bbox_regression", 4),
    ):
        x = levels[0]
        for i in range(4):
            x = F.relu(conv(x, state, f"bbox_head.{kind}_convs.{i}.conv", 1))
        told = conv(x, state, f"bbox_head.{last}", 1).permute(0, 2, 3, 1).reshape(1, -1, width)
        close(head([levels[0]])[ours], told)


def test_anchors_are_mmdetections() -> None:
    trunk, args = backbone()
    dense = read({**trunk, **dense_detector()}, "mavit_tiny", args).dense
    assert dense is not None
    # Ratio by ratio: one over its root wide, its root high; sides of four strides and two thirds of an octave above.
    expected = [
        [-w / 2, -h / 2, w / 2, h / 2]
        for ratio in (0.5, 1.0, 2.0)
        for side in (32 * 2 ** (i / 3) for i in range(3))
        for w, h in [(side / ratio**0.5, side * ratio**0.5)]
    ]
    torch.testing.assert_close(dense.anchor_generator.cell_anchors[0], torch.tensor(expected))


def test_what_does_not_fit_is_named_and_what_is_no_detector_is_refused() -> None:
    trunk, args = backbone()
    state = {**trunk, **region_detector(cascade=False)}
    del state["rpn_head.rpn_cls.bias"]
    state["roi_head.bbox_head.fc_reg.extra"] = torch.zeros(1)
    with pytest.raises(ValueError, match="2 of its tensors do not fit mavit_tiny under mask_rcnn") as caught:
        read(state, "mavit_tiny", args)
    assert re.search("missing regions.rpn.head.cls_logits.bias", str(caught.value))
    assert kind_of(trunk) is None
    with pytest.raises(ValueError, match="expected a detector in mmdetection's names"):
        read(trunk, "mavit_tiny", args)
