"""From draws to batches: photos as bytes, and a label for every pixel. What cannot be read is passed over and noted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from ...train.corrupt import Tally
from ...train.draws import NOTHING, Draw
from ..images.reading import CorruptImage
from .pairs import UNLABELLED, Labels, Pairs
from .variation import Variation, fit, vary

FILLER = 32  # side of the photo that only fills a batch up


class Crops(NamedTuple):
    """A batch to learn from.

    Attributes:
        images: (B, 3, H, W), uint8; float32 and normalised once it is ready.
        labels: (B, H, W), int16, `UNLABELLED` where there is no class or no photo.
        sizes: (B, 2), int64: rows and columns that are photo.
    """

    images: Tensor
    labels: Tensor
    sizes: Tensor


class Photos(NamedTuple):
    """A batch to be judged by: photos of several sizes.

    Attributes:
        images: Each (3, h, w), uint8; float32 and normalised once it is ready.
        labels: Each (H, W), int16, in the photo's own size; all `UNLABELLED` in what only fills the batch up.
        filled: Each (1,), boolean: whether the photo only fills the batch up.
    """

    images: list[Tensor]
    labels: list[Tensor]
    filled: list[Tensor]


class TrainSamples(Dataset[Crops]):
    """Crops to learn from, a batch at a time. In place of a corrupt photo, the next good one comes."""

    def __init__(self, pairs: Pairs, variation: Variation, tally: Tally) -> None:
        self.pairs, self.variation, self.tally = pairs, variation, tally

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, draw: Draw) -> Crops:
        return self.__getitems__([draw])

    def __getitems__(self, draws: Sequence[Draw]) -> Crops:
        """A batch of draws; torch's loader asks for all of them at once."""
        crops = [vary(*self._read(draw.index), self.variation, draw.seed) for draw in draws]
        images, labels, sizes = zip(*crops, strict=True)
        return Crops(torch.from_numpy(np.stack(images)), torch.from_numpy(np.stack(labels)), torch.tensor(sizes))

    def _read(self, index: int) -> tuple[Image.Image, Labels]:
        # Ends at the latest when too many are noted.
        while True:
            try:
                return self.pairs[index]
            except CorruptImage:
                self.tally.note(index)
                index = (index + 1) % len(self.pairs)


class TestSamples(Dataset[Photos]):
    """Photos to be judged by, whole, a batch at a time.

    Args:
        pairs: Photos and maps.
        short_side: What the shorter side is brought to; None for as it is.
        long_side: The most the longer side may have then.
        tally: Where corrupt ones are noted.
    """

    __test__ = False  # or pytest would collect it

    def __init__(self, pairs: Pairs, short_side: int | None, long_side: int | None, tally: Tally) -> None:
        self.pairs, self.short_side, self.long_side, self.tally = pairs, short_side, long_side, tally

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, draw: Draw) -> Photos:
        return self.__getitems__([draw])

    def __getitems__(self, draws: Sequence[Draw]) -> Photos:
        """A batch of draws; torch's loader asks for all of them at once."""
        read = [self._read(draw.index) for draw in draws]
        images, labels, filled = ([row[i] for row in read] for i in range(3))
        return Photos(images, labels, filled)

    def _read(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        if index != NOTHING:
            try:
                photo, labels = self.pairs[index]
                return as_bytes(photo, self.short_side, self.long_side), torch.from_numpy(labels), torch.tensor([False])
            except CorruptImage:
                self.tally.note(index)
        nothing = torch.full((FILLER, FILLER), UNLABELLED, dtype=torch.int16)
        return torch.zeros(3, FILLER, FILLER, dtype=torch.uint8), nothing, torch.tensor([True])


def as_bytes(photo: Image.Image, short_side: int | None, long_side: int | None) -> Tensor:
    """A photo as the network is shown it for judging, (3, h, w), uint8."""
    factor = fit((photo.height, photo.width), short_side, long_side)
    if factor != 1:
        size = max(1, round(photo.width * factor)), max(1, round(photo.height * factor))
        photo = photo.resize(size, Image.Resampling.BILINEAR)
    return torch.from_numpy(np.ascontiguousarray(np.asarray(photo).transpose(2, 0, 1)))


def as_it_is(batch: Crops | Photos) -> Crops | Photos:
    """A batch is whole when it comes; nothing is left to collate."""
    return batch
