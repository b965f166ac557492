"""How much pixels of rare classes count."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from affinear.tasks.segment.balance import class_counts, class_weights
from affinear.tasks.segment.opening import open_scenes
from affinear.tasks.segment.pairs import UNLABELLED
from affinear.tasks.segment.work import pixel_loss

from .scenes import write


@pytest.mark.parametrize("memory", [False, True])
def test_pixels_are_counted_as_the_maps_have_them(tmp_path: Path, memory: bool) -> None:
    data = open_scenes(str(write(tmp_path)), zero_is_class=False, test_split=None, memory=memory)
    classes = len(data.classes)
    labels = torch.cat([torch.from_numpy(data.train[i][1]).flatten() for i in range(len(data.train))])
    counted = class_counts(data.train, classes)
    assert counted.tolist() == [int((labels == number).sum()) for number in range(classes)]


def test_the_mean_pixel_counts_one_and_rare_classes_more() -> None:
    counts = torch.randint(1, 10**6, (7,))
    shares = counts / counts.sum()
    for power in (0.0, 0.5, 1.0):
        weights = class_weights(counts, power)
        assert torch.isclose((shares * weights).sum(), torch.tensor(1.0))
        assert torch.allclose(weights * shares**power, (weights * shares**power)[0].expand(7))


def test_a_class_that_is_nowhere_has_a_weight_that_is_finite() -> None:
    assert class_weights(torch.tensor([5, 0, 3]), 1.0).isfinite().all()


def test_a_balanced_loss_is_the_mean_of_what_each_pixel_counts() -> None:
    logits, labels = torch.randn(2, 5, 8, 8), torch.randint(-1, 5, (2, 8, 8))
    weights = torch.rand(5)
    single = F.cross_entropy(logits, labels, reduction="none", ignore_index=UNLABELLED)
    known = labels != UNLABELLED
    expected = (single * weights[labels.clamp(min=0)])[known].mean()
    assert torch.isclose(pixel_loss(logits, labels, weights), expected, rtol=1e-5)
    assert torch.isclose(pixel_loss(logits, labels), single[known].mean(), rtol=1e-5)
