"""How much a pixel of each class counts, so that rare classes are learned as well."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..images.reading import CorruptImage
from ..threads import in_threads
from .pairs import UNLABELLED, Pairs, read_map


def class_counts(half: Pairs, classes: int) -> Tensor:
    """Pixels of each class in all maps of a half, int64; maps that cannot be read count for nothing."""

    def count(index: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        try:
            labels = _labels(half, index)
        except CorruptImage:
            return np.zeros(classes, np.int64)
        return np.bincount(labels[labels != UNLABELLED], minlength=classes)

    return torch.from_numpy(np.sum(in_threads(count, range(len(half))), axis=0))


def class_weights(counts: Tensor, power: float) -> Tensor:
    """Weights of the classes: their shares of all pixels to the power of minus this, 1 for the mean pixel.

    Args:
        counts: Pixels of each class (classes,).
        power: 0 for all alike, 1 for classes that count alike however rare they are.

    Example:
        >>> [round(weight, 3) for weight in class_weights(torch.tensor([90, 10]), 0.5).tolist()]
        [0.833, 2.5]
    """
    shares = counts.double() / counts.sum()
    weights = torch.where(shares > 0, shares, 1.0) ** -power  # nothing is known of a class that is not there
    return (weights / (shares * weights).sum()).float()


def _labels(half: Pairs, index: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int16]]:
    kept = None if half.stored is None else half.stored[index]
    if kept is not None:
        return kept[1]
    path = half.maps[index]
    return half.numbers.labels(read_map(path), path)
