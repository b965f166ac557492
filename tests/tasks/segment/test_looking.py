"""Photos are looked at as a whole, or through windows whose logits are averaged."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from affinear.tasks.segment.looking import Look, labels_of, logits_of, starts


def channels(images: Tensor) -> list[Tensor]:
    """A network that says what it sees: every pixel for itself, at a quarter of the size."""
    return [F.avg_pool2d(images, 4)]


def totals(images: Tensor) -> list[Tensor]:
    """A network that says of every place how much there is in all it sees."""
    return [images.sum(dim=(2, 3), keepdim=True).expand(-1, -1, images.shape[2] // 4, images.shape[3] // 4)]


def test_whole_photos_are_enlarged_bilinearly():
    images = torch.randn(2, 3, 32, 48)
    expected = F.interpolate(F.avg_pool2d(images, 4), size=(32, 48), mode="bilinear", align_corners=False)
    torch.testing.assert_close(logits_of(channels, images, Look()), expected)
    larger = F.interpolate(expected, size=(50, 70), mode="bilinear", align_corners=False).argmax(1)
    assert torch.equal(labels_of(channels, images, Look(), (50, 70)), larger)


def test_windows_cover_everything_and_are_averaged():
    images = torch.rand(2, 3, 40, 56)
    look = Look("slide", (16, 24), (12, 16))
    found = logits_of(totals, images, look)
    total, seen = torch.zeros(2, 3, 40, 56), torch.zeros(40, 56)
    for y in (0, 12, 24):
        for x in (0, 16, 32):
            part = images[:, :, y : y + 16, x : x + 24].sum(dim=(2, 3), keepdim=True)
            total[:, :, y : y + 16, x : x + 24] += part
            seen[y : y + 16, x : x + 24] += 1
    assert seen.min() >= 1
    torch.testing.assert_close(found, total / seen)


def test_a_photo_smaller_than_a_window_is_seen_whole():
    images = torch.rand(1, 3, 16, 24)
    torch.testing.assert_close(
        logits_of(totals, images, Look("slide", (64, 64), (40, 40))), logits_of(totals, images, Look())
    )


@pytest.mark.parametrize(("side", "window", "stride"), [(512, 512, 341), (513, 512, 341), (1000, 512, 341), (7, 5, 2)])
def test_windows_start_by_strides_and_end_at_the_border(side: int, window: int, stride: int):
    found = starts(side, window, stride)
    assert found[0] == 0
    assert found[-1] == side - window
    assert all(0 < b - a <= stride for a, b in pairwise(found))
