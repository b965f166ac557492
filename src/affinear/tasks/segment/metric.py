"""How many pixels of each class were taken for which, over a whole data set, and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...train.task import Part, Score
from .pairs import UNLABELLED


def confusion(labels: Tensor, predicted: Tensor, classes: int) -> Tensor:
    """Pixels by true class (rows) and predicted class (columns), int64; unlabelled pixels count nowhere.

    Example:
        >>> confusion(torch.tensor([0, 0, 1, -1]), torch.tensor([0, 1, 1, 0]), 2).tolist()
        [[1, 1], [0, 1]]
    """
    known = labels != UNLABELLED
    pairs = labels[known].long() * classes + predicted[known].long()
    return torch.bincount(pairs, minlength=classes * classes).view(classes, classes)


def showing(labels: Tensor, classes: int) -> Tensor:
    """How many of the photos (B, H, W) show each class, int64.

    Example:
        >>> showing(torch.tensor([[[0, -1]], [[0, 1]]]), 3).tolist()
        [2, 1, 0]
    """
    photo = torch.arange(len(labels), device=labels.device)[:, None, None].expand_as(labels)
    known = labels != UNLABELLED
    found = torch.bincount(photo[known] * classes + labels[known].long(), minlength=len(labels) * classes)
    return (found.view(len(labels), classes) > 0).sum(dim=0)


def numbers_of(counts: Tensor) -> dict[str, float]:
    """The mean of the classes' overlaps (mIoU), of their accuracies (mAcc), and the share of right pixels (aAcc).

    Classes that are neither there nor predicted have no overlap, and do not count; those that are not there have no
    accuracy.
    """
    overlap, accuracy = overlaps(counts), accuracies(counts)
    right = counts.diagonal().sum().double() / counts.sum()
    return {"miou": overlap.nanmean().item(), "macc": accuracy.nanmean().item(), "aacc": right.item()}


def overlaps(counts: Tensor) -> Tensor:
    """Intersection over union of each class, float64; not a number for one that is nowhere."""
    right = counts.diagonal().double()
    return right / (counts.sum(dim=0) + counts.sum(dim=1) - counts.diagonal())


def accuracies(counts: Tensor) -> Tensor:
    """Share of each class's pixels that were found, float64; not a number for one that is not there."""
    return counts.diagonal().double() / counts.sum(dim=1)


def score_of(counts: Tensor, shown: Tensor, photos: int, classes: Sequence[str], skipped: Sequence[str]) -> Score:
    """The score of a data set, with every class that is there or was found as a part.

    Args:
        counts: Pixels by true and predicted class.
        shown: How many photos show each class.
        photos: How many there are.
        classes: Their names.
        skipped: Photos that could not be read.
    """
    overlap, accuracy = overlaps(counts).tolist(), accuracies(counts).tolist()
    parts = tuple(
        Part(name, int(shown[i]), {"miou": overlap[i], "macc": accuracy[i] if shown[i] else 0.0})
        for i, name in enumerate(classes)
        if overlap[i] == overlap[i]  # a number
    )
    return Score(numbers_of(counts), photos, parts, tuple(skipped))
