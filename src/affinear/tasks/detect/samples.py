"""From draws to batches: images as bytes, and their objects. What cannot be read is passed over and noted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ...train.corrupt import Tally
from ...train.draws import NOTHING, Draw
from ..images.reading import CorruptImage
from .coco import Half, Objects
from .finding import as_tensor
from .variation import Variation, vary

FILLER = 32  # side of the image that only fills a batch up


class Shown(NamedTuple):
    """A batch to learn from.

    Attributes:
        images: Each (3, h, w), uint8.
        targets: Of each, "boxes" (N, 4), "labels" (N,) and, where masks are learned, "masks" (N, h, w).
    """

    images: list[Tensor]
    targets: list[dict[str, Tensor]]


class Asked(NamedTuple):
    """A batch to be judged by.

    Attributes:
        images: Each (3, H, W), uint8.
        numbers: (B,), int64: their places in the test half; `NOTHING` for what only fills the batch up.
    """

    images: list[Tensor]
    numbers: Tensor


class TrainSamples(Dataset[Shown]):
    """Images to learn from, a batch at a time. In place of a corrupt one, the next good one comes.

    Args:
        half: Images and objects.
        variation: What becomes of them.
        masks: Whether masks are drawn.
        tally: Where corrupt ones are noted.
    """

    def __init__(self, half: Half, variation: Variation, masks: bool, tally: Tally) -> None:
        self.half, self.variation, self.masks, self.tally = half, variation, masks, tally

    def __len__(self) -> int:
        return len(self.half)

    def __getitem__(self, draw: Draw) -> Shown:
        return self.__getitems__([draw])

    def __getitems__(self, draws: Sequence[Draw]) -> Shown:
        """A batch of draws; torch's loader asks for all of them at once."""
        rows = [vary(*self._read(draw.index), self.variation, draw.seed, self.masks) for draw in draws]
        return Shown([image for image, _ in rows], [target for _, target in rows])

    def _read(self, index: int) -> tuple[Tensor, Objects]:
        # Ends at the latest when too many are noted.
        while True:
            try:
                image, objects = self.half[index]
                return as_tensor(np.asarray(image)), objects
            except CorruptImage:
                self.tally.note(index)
                index = (index + 1) % len(self.half)


class TestSamples(Dataset[Asked]):
    """Images to be judged by, as they are, a batch at a time.

    Args:
        half: Images and objects.
        tally: Where corrupt ones are noted.
    """

    __test__ = False  # or pytest would collect it

    def __init__(self, half: Half, tally: Tally) -> None:
        self.half, self.tally = half, tally

    def __len__(self) -> int:
        return len(self.half)

    def __getitem__(self, draw: Draw) -> Asked:
        return self.__getitems__([draw])

    def __getitems__(self, draws: Sequence[Draw]) -> Asked:
        """A batch of draws; torch's loader asks for all of them at once."""
        images: list[Tensor] = []
        numbers: list[int] = []
        for draw in draws:
            image = self._read(draw.index)
            images.append(torch.zeros(3, FILLER, FILLER, dtype=torch.uint8) if image is None else image)
            numbers.append(NOTHING if image is None else draw.index)
        return Asked(images, torch.tensor(numbers))

    def _read(self, index: int) -> Tensor | None:
        if index == NOTHING:
            return None
        try:
            return as_tensor(np.asarray(self.half[index][0]))
        except CorruptImage:
            self.tally.note(index)
            return None


def as_it_is(batch: Shown | Asked) -> Shown | Asked:
    """A batch is whole when it comes; nothing is left to collate."""
    return batch
