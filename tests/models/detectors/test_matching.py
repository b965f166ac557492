"""What is matched and drawn for all images at once is what torchvision matches and draws image by image."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torchvision.models.detection._utils import BalancedPositiveNegativeSampler, Matcher
from torchvision.models.detection.roi_heads import maskrcnn_loss, project_masks_on_boxes
from torchvision.ops import box_iou, clip_boxes_to_image

from affinear.models.detectors import matching, stages
from affinear.models.detectors.anchors import on_image, on_images
from affinear.models.detectors.matching import BACKGROUND, Rows, clip, draw, limits, match
from affinear.models.detectors.stages import cut_out

COUNTS = (3, 0, 7, 1)  # objects of each image


def boxes_of(count: int) -> Tensor:
    low = torch.rand(count, 2) * 50
    return torch.cat((low, low + 3 + torch.rand(count, 2) * 30), dim=1)


@pytest.mark.parametrize(("high", "low", "own"), [(0.7, 0.3, True), (0.5, 0.5, False), (0.4, 0.2, True)])
@pytest.mark.parametrize("at_once", [2**26, 500])
def test_boxes_are_matched_as_by_torchvision(
    high: float, low: float, own: bool, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matching, "AT_ONCE", at_once)
    matcher = Matcher(high, low, allow_low_quality_matches=own)
    objects, boxes = [boxes_of(count) for count in COUNTS], boxes_of(200)
    rows = Rows.of(objects)
    found = match(matcher, rows.padded(torch.cat(objects)), rows.real(), boxes[None])
    for one, mine in zip(objects, found, strict=True):
        expected = matcher(box_iou(one, boxes)) if len(one) else torch.full((200,), BACKGROUND)
        assert mine.tolist() == expected.tolist()


def test_images_without_any_object_match_nothing() -> None:
    rows = Rows([0, 0], torch.device("cpu"))
    found = match(Matcher(0.5, 0.5), rows.padded(torch.zeros(0, 4)), rows.real(), boxes_of(6)[None])
    assert found.tolist() == [[BACKGROUND] * 6] * 2


@pytest.mark.parametrize("each", [4, 16, 100])
def test_boxes_are_drawn_as_by_torchvision(each: int) -> None:
    sampler = BalancedPositiveNegativeSampler(each, 0.25)
    labels = [torch.randint(-1, 3, (count,)) for count in (40, 5, 0, 60)]
    torch.manual_seed(1)
    theirs = [torch.cat(one).nonzero()[:, 0].tolist() for one in sampler(labels)]
    torch.manual_seed(1)
    shows, others, counts = draw(sampler, torch.cat(labels), [len(one) for one in labels])
    assert [shows.tolist(), others.tolist()] == theirs
    assert sum(counts) == len(shows) + len(others)
    assert max(counts) <= each


@pytest.mark.parametrize("at_once", [2**26, 10])
def test_masks_are_cut_out_as_by_torchvision(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "AT_ONCE", at_once)
    masks = [(torch.rand(count, 60, 80) > 0.5).to(torch.uint8) for count in COUNTS]
    boxes = [boxes_of(2 * count) for count in COUNTS]
    matched = [torch.randint(max(count, 1), (2 * count,)) for count in COUNTS]
    expected = [project_masks_on_boxes(*one, 14) for one in zip(masks, boxes, matched, strict=True)]
    first = [sum(COUNTS[:i]) for i in range(len(COUNTS))]
    numbers = torch.cat([one + start for one, start in zip(matched, first, strict=True)])
    found = cut_out(masks, torch.cat(boxes), numbers, [2 * count for count in COUNTS], 14)
    assert torch.equal(found, torch.cat(expected))
    logits = torch.randn(len(numbers), 2, 14, 14)
    labels = [torch.ones(count, dtype=torch.int64) for count in COUNTS]
    theirs = maskrcnn_loss(logits, boxes, masks, labels, matched)
    ours = torch.nn.functional.binary_cross_entropy_with_logits(logits[:, 1], found)
    torch.testing.assert_close(ours, theirs)


def test_rims_are_each_images_own() -> None:
    sizes = [(40, 60), (30, 90)]
    rims, boxes = limits(sizes, torch.device("cpu")), torch.stack([boxes_of(20) - 10 for _ in sizes])
    for size, mine, clipped, on in zip(
        sizes, boxes, clip(boxes, rims[:, None]), on_images(boxes[0], rims), strict=True
    ):
        assert torch.equal(clipped, clip_boxes_to_image(mine, size))
        assert torch.equal(on, on_image(boxes[0], size))
