"""What a detector tells becomes masks at the image's size, as torchvision pastes them, and a drawing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.models.detection.roi_heads import paste_masks_in_image

from affinear.tasks.detect import finding
from affinear.tasks.detect.drawing import drawn, jpeg
from affinear.tasks.detect.finding import at_least, found_of
from affinear.tasks.detect.precision import Truth

SIZE = (60, 80)


def told(count: int = 20) -> dict[str, torch.Tensor]:
    low = torch.rand(count, 2) * torch.tensor((70.0, 50.0))
    high = torch.minimum(low + 0.5 + torch.rand(count, 2) * 40, torch.tensor((80.0, 60.0)))
    chances = torch.nn.functional.interpolate(torch.rand(count, 1, 5, 5), size=28, mode="bilinear")[:, 0]
    boxes = torch.cat((low, high), dim=1)
    return {"boxes": boxes, "labels": torch.arange(count) % 3, "scores": torch.rand(count), "masks": chances}


def test_masks_are_pasted_as_by_torchvision() -> None:
    given = told()
    found = found_of(given, SIZE)
    theirs = paste_masks_in_image(given["masks"][:, None], given["boxes"], SIZE)[:, 0] > 0.5
    assert found.masks is not None
    for ours, expected in zip(found.masks, theirs.numpy(), strict=True):
        assert (ours.mask() == expected).all()


def test_masks_come_out_alike_in_one_portion_and_in_many_and_also_beyond_the_rim(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = told(12)
    low = torch.minimum(given["boxes"][:, :2] + torch.randn(12, 2) * 30, torch.tensor((75.0, 55.0)))
    high = torch.maximum(given["boxes"][:, 2:] + torch.randn(12, 2) * 30, low.clamp(min=0) + 3)
    given["boxes"] = torch.cat((low, high), dim=1)
    whole = found_of(given, SIZE).masks
    theirs = paste_masks_in_image(given["masks"][:, None], given["boxes"], SIZE)[:, 0] > 0.5
    assert whole is not None
    assert [mask.area for mask in whole] == theirs.sum((1, 2)).tolist()
    monkeypatch.setattr(finding, "AT_ONCE", 500)
    assert found_of(given, SIZE).masks == whole
    nothing = {name: tensor[:0] for name, tensor in given.items()}
    assert found_of(nothing, SIZE).masks == ()


def test_boxes_are_left_top_width_and_height() -> None:
    given = told()
    found = found_of(given, SIZE)
    np.testing.assert_allclose(found.boxes[:, 2:], (given["boxes"][:, 2:] - given["boxes"][:, :2]).numpy(), atol=1e-4)


def test_only_the_sure_are_kept_the_surest_first() -> None:
    found = found_of(told(), SIZE)
    sure = at_least(found, 0.4)
    assert sure.scores.tolist() == sorted((score for score in found.scores if score >= 0.4), reverse=True)
    assert sure.masks is not None
    assert len(sure.masks) == len(sure.labels)


def test_drawings_show_masks_and_frames_of_what_was_found_and_of_the_truth() -> None:
    blank = Image.new("RGB", (SIZE[1], SIZE[0]), (20, 20, 20))
    found = found_of(told(3), SIZE)
    truth = Truth(found.boxes, found.labels, np.ones(3), np.array([False, True, False]), found.masks)
    for objects in (found, truth):
        picture = np.asarray(drawn(blank, objects, ("a", "b", "c"), 0.5))
        assert found.masks is not None
        inside = np.any([mask.mask() for mask in found.masks], axis=0)
        assert (picture[inside] != 20).any(axis=1).mean() > 0.9
    assert jpeg(blank)[:2] == b"\xff\xd8"


def test_a_class_that_is_the_only_one_is_not_named_on_every_object() -> None:
    blank = Image.new("RGB", (SIZE[1], SIZE[0]))
    found = found_of({**told(2), "labels": torch.zeros(2)}, SIZE)
    for hidden in (found, Truth(found.boxes, found.labels, np.ones(2), np.array([True, False]), found.masks)):
        shown = [drawn(blank, hidden, names, 0.5).tobytes() for names in (("cell",), ("nucleus",))]
        assert shown[0] == shown[1]
