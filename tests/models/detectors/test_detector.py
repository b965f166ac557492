"""Detectors are torchvision's, over any backbone, and see nothing of padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torchvision.models.detection import MaskRCNN, RetinaNet
from torchvision.models.detection.retinanet import RetinaNetHead
from torchvision.ops import MultiScaleRoIAlign

from affinear.models.detectors import Detector, DetectorSettings, fitting
from affinear.models.detectors.neck import MAKERS, Backbone
from affinear.models.detectors.pooling import RegionPool

Make = Callable[..., Detector]
Targets = Callable[..., dict[str, Tensor]]
Settings = Callable[..., DetectorSettings]

KINDS = ("retinanet", "faster_rcnn", "mask_rcnn", "cascade_rcnn", "cascade_mask_rcnn")
CLASSES = 3
SIZE = (64, 96)


def total(losses: dict[str, Tensor]) -> Tensor:
    return torch.stack(list(losses.values())).sum()


def theirs_like(ours: Detector) -> Any:
    """The detector of torchvision that has the same weights, backbone and anchors."""
    options = ours.settings
    common: dict[str, Any] = {"min_size": 64, "max_size": 512, "_skip_resize": True}
    if ours.dense is not None:
        made = RetinaNet(
            ours.backbone,
            CLASSES,
            anchor_generator=ours.dense.anchor_generator,
            head=RetinaNetHead(options.channels, 9, CLASSES, norm_layer=MAKERS[options.norm]),
            score_thresh=options.score,
            detections_per_img=options.detections,
            **common,
        )
        made.load_state_dict(ours.dense.state_dict())
        return made
    assert ours.regions is not None
    rpn: Any = ours.regions["rpn"]
    made = MaskRCNN(
        ours.backbone,
        CLASSES + 1,
        rpn_anchor_generator=rpn.anchor_generator,
        rpn_pre_nms_top_n_train=options.proposals[0],
        rpn_post_nms_top_n_train=options.proposals[0],
        rpn_pre_nms_top_n_test=options.proposals[1],
        rpn_post_nms_top_n_test=options.proposals[1],
        box_score_thresh=options.score,
        box_detections_per_img=options.detections,
        box_batch_size_per_image=options.rois,
        **common,
    )
    made.load_state_dict(ours.regions.state_dict())
    return made


@pytest.mark.parametrize("kind", ["retinanet", "mask_rcnn"])
def test_losses_and_detections_are_torchvisions(kind: str, detector: Make, target: Targets) -> None:
    ours = detector(kind, aligned=False, norm="layer" if kind == "retinanet" else "none")
    theirs, first = theirs_like(ours), 0 if kind == "retinanet" else 1
    images, targets = [torch.rand(3, *SIZE) for _ in range(2)], [target(*SIZE) for _ in range(2)]
    torch.manual_seed(3)
    losses = ours.train()(images, targets)
    torch.manual_seed(3)
    expected = theirs.train()(images, [{**one, "labels": one["labels"] + first} for one in targets])
    assert sorted(one.item() for one in losses.values()) == pytest.approx(
        sorted(one.item() for one in expected.values()), rel=1e-4
    )
    with torch.no_grad():
        found, wanted = ours.eval()(images), theirs.eval()(images)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one["boxes"], other["boxes"], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(one["scores"], other["scores"], rtol=1e-4, atol=1e-5)
        assert (one["labels"] + first).tolist() == other["labels"].tolist()


def test_regions_are_pooled_as_by_torchvision() -> None:
    features = {str(i): torch.rand(2, 8, 64 >> i, 96 >> i) for i in range(4)}
    low = torch.rand(30, 2) * 150
    boxes = [torch.cat((low, low + torch.rand(30, 2) * 200), dim=1).clamp(max=255) for _ in range(2)]
    sizes = [(256, 384)] * 2
    expected = MultiScaleRoIAlign(list(features), 7, 2)(features, boxes, sizes)
    torch.testing.assert_close(RegionPool(7, (4, 8, 16, 32), 2, aligned=False)(features, boxes, sizes), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_found_does_not_depend_on_the_sizes_of_neighbours(kind: str, detector: Make) -> None:
    network = detector(kind).eval()
    image, larger = torch.rand(3, 50, 70), torch.rand(3, 90, 130)
    with torch.no_grad():
        alone, beside = network([image])[0], network([image, larger])[0]
    assert sorted(alone) == sorted(beside)
    for name in alone:
        torch.testing.assert_close(alone[name], beside[name], rtol=1e-3, atol=1e-4)


def test_padding_can_be_let_in_as_published_detectors_do(detector: Make) -> None:
    network = detector("retinanet", masked=False).eval()
    image, larger = torch.rand(3, 64, 64), torch.rand(3, 96, 160)
    with torch.no_grad():
        alone, beside = network([image])[0], network([image, larger])[0]
    assert not torch.allclose(alone["scores"], beside["scores"], rtol=1e-5)


@pytest.mark.parametrize("name", ["resnet18", "swin_tiny_patch4_window7_224", "convnext_atto", "inline_pvt_tiny"])
def test_any_timm_network_with_stages_is_a_backbone(name: str, settings: Settings) -> None:
    backbone = Backbone(name, settings("mask_rcnn")).eval()
    with torch.no_grad():
        levels = backbone(torch.rand(1, 3, 64, 96))
    shapes = {key: tuple(level.shape[1:]) for key, level in levels.items()}
    assert shapes == {"0": (32, 16, 24), "1": (32, 8, 12), "2": (32, 4, 6), "3": (32, 2, 3), "pool": (32, 1, 2)}


def test_the_sixth_level_comes_from_the_backbones_last_map_also_where_widths_are_equal(detector: Make) -> None:
    backbone = detector("retinanet").eval().backbone
    assert backbone.features.channels[-1] == backbone.out_channels
    images = torch.rand(1, 3, 128, 128)
    with torch.no_grad():
        last = backbone.features(images)[-1]
        assert backbone.neck.p6 is not None
        torch.testing.assert_close(backbone(images)["p6"], backbone.neck.p6(last))


@pytest.mark.parametrize("kind", KINDS)
def test_images_without_objects_are_learned_from(kind: str, detector: Make, target: Targets) -> None:
    network, images = detector(kind), [torch.rand(3, *SIZE) for _ in range(2)]
    some = target(*SIZE)
    none = {name: part[:0] for name, part in some.items()}
    for shown in ([some, none], [none, none]):
        loss = total(network(images, shown))
        assert torch.isfinite(loss)
        loss.backward()
    assert [name for name, one in network.named_parameters() if one.grad is None] == []


def test_a_detector_learns_to_find_a_rectangle(detector: Make) -> None:
    torch.manual_seed(0)
    network = detector("faster_rcnn", score=0.3)
    optimizer = torch.optim.AdamW(network.parameters(), 2e-3)
    image = torch.zeros(3, *SIZE)
    image[:, 16:40, 20:52] = 1
    here = {"boxes": torch.tensor([[20.0, 16.0, 52.0, 40.0]]), "labels": torch.tensor([1])}
    there = {"boxes": torch.tensor([[44.0, 16.0, 76.0, 40.0]]), "labels": torch.tensor([1])}
    for _ in range(60):
        optimizer.zero_grad()
        total(network([image, image.flip(2)], [here, there])).backward()
        optimizer.step()
    with torch.no_grad():
        found = network.eval()([image, image.flip(2)])
    for one, shown in zip(found, (here, there), strict=True):
        assert one["labels"][0] == 1
        assert (one["boxes"][0] - shown["boxes"][0]).abs().max() < 4


def test_boxes_are_in_the_pixels_of_the_image_that_was_given(detector: Make) -> None:
    plain, resizing, image = (
        detector("retinanet").eval(),
        detector("retinanet", min_size=128).eval(),
        torch.rand(3, 64, 96),
    )
    resizing.load_state_dict(plain.state_dict())
    large = torch.nn.functional.interpolate(image[None], size=(128, 192), mode="bilinear", antialias=True)[0]
    with torch.no_grad():
        torch.testing.assert_close(resizing([image])[0]["boxes"], plain([large])[0]["boxes"] / 2, rtol=1e-3, atol=1e-2)


def test_bytes_and_shares_of_white_are_the_same(detector: Make) -> None:
    image = torch.randint(0, 256, (3, 64, 64), dtype=torch.uint8)
    network = detector("retinanet").eval()
    torch.testing.assert_close(network.batch([image]).tensors, network.batch([image / 255]).tensors)


def test_frozen_batch_norms_stay_as_they_are(detector: Make, target: Targets) -> None:
    network = detector("retinanet", frozen_norm=True).train()
    before = {name: one.clone() for name, one in network.backbone.features.named_buffers()}
    network([torch.rand(3, *SIZE)], [target(*SIZE)])
    assert any("running_mean" in name for name in before)
    for name, one in network.backbone.features.named_buffers():
        assert torch.equal(one, before[name]), name


def test_checkpointing_changes_nothing_but_memory(detector: Make, target: Targets) -> None:
    plain, thrifty = detector("retinanet"), detector("retinanet", grad_checkpointing=True)
    switched = detector("retinanet")
    switched.set_grad_checkpointing()
    image, shown = torch.rand(3, *SIZE), target(*SIZE)
    for network in (plain, thrifty, switched):
        network.load_state_dict(plain.state_dict())
        total(network([image], [shown])).backward()
    for one, *others in zip(plain.parameters(), thrifty.parameters(), switched.parameters(), strict=True):
        for other in others:
            torch.testing.assert_close(one.grad, other.grad)


def test_the_shorter_side_fits_unless_the_longer_one_would_not() -> None:
    assert fitting((300, 300), 0, 10) == (300, 300)
    assert fitting((500, 1000), 800, 1333) == (667, 1333)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"kind": "yolo"}, "kind: expected one of retinanet"),
        ({"anchor_sizes": (8, 16)}, "anchor_sizes: expected five sides above 0"),
        ({"detections": 0}, "detections: expected 1 or more, got 0"),
        ({"score": 2.0}, "score: expected a number from 0 to 1, got 2.0"),
        ({"min_size": 900, "max_size": 800}, "min_size: expected 0, or a side of at most max_size = 800"),
        ({"norm": "group", "channels": 40}, "channels: expected a multiple of 32"),
        ({"box_loss": "giou"}, "these are for cascades; leave them out for mask_rcnn"),
    ],
)
def test_settings_that_make_no_detector_are_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        DetectorSettings(**given)


def test_networks_without_stages_and_wrong_images_are_refused(detector: Make) -> None:
    with pytest.raises(ValueError, match="maps at strides 4, 8, 16, 32"):
        Detector("inline_deit_tiny", 2)
    network = detector("retinanet")
    with pytest.raises(ValueError, match=r"expected each as \(3, height, width\), got \(1, 8, 8\)"):
        network.batch([torch.rand(1, 8, 8)])
    with pytest.raises(ValueError, match="targets: expected what each image shows"):
        network([torch.rand(3, 64, 64)])
    flat = {"boxes": torch.tensor([[3.0, 3.0, 3.0, 9.0]]), "labels": torch.tensor([0])}
    with pytest.raises(ValueError, match="of some area each"):
        network([torch.rand(3, 64, 64)], [flat])
