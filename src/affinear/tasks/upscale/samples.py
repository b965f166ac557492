"""From draws to batches: large crops as bytes, with as much around them as the small ones are made of.

The small photo of a published pair is made of the whole large one. A crop that is shrunk by itself differs from it at
its border; with two small pixels more on every side, which are cut off again, it does not.
"""

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
from .bicubic import resize, to_bytes
from .metric import SIDE
from .opening import Photos, Pixels

AROUND = 2  # small pixels beyond a crop that its own are made of


class Crops(NamedTuple):
    """A batch to learn from.

    Attributes:
        large: (B, 3, scale P, scale P), uint8, with `AROUND` more on every side; without, in numbers, once it is ready.
        small: (B, 3, P, P), float32, white being 1; empty until it is ready.
    """

    large: Tensor
    small: Tensor


class Whole(NamedTuple):
    """A batch to be judged by: photos of several sizes.

    Attributes:
        large: Each (3, H, W), uint8, sides multiples of the scale.
        sets: Each (1,), int64: which set the photo is of; -1 where it only fills the batch up.
    """

    large: list[Tensor]
    sets: list[Tensor]


class TrainSamples(Dataset[Crops]):
    """Crops to learn from, a batch at a time. In place of a corrupt photo, the next good one comes.

    Args:
        photos: The large ones.
        patch: Side of a small crop.
        scale: How many times larger the large one is.
        turn: Whether crops are mirrored and turned.
        tally: Where corrupt ones are noted.
    """

    def __init__(self, photos: Photos, patch: int, scale: int, turn: bool, tally: Tally) -> None:
        self.photos, self.patch, self.scale, self.turn, self.tally = photos, patch, scale, turn, tally

    def __getitem__(self, draw: Draw) -> Crops:
        return self.__getitems__([draw])

    def __getitems__(self, draws: Sequence[Draw]) -> Crops:
        """A batch of draws; torch's loader asks for all of them at once. A photo may be drawn several times."""
        crops = [
            crop(self._read(draw.index % len(self.photos)), self.patch, self.scale, self.turn, draw.seed)
            for draw in draws
        ]
        return Crops(torch.from_numpy(np.stack(crops)), torch.empty(len(crops), 0))

    def _read(self, index: int) -> Pixels:
        # Ends at the latest when too many are noted.
        while True:
            try:
                return self.photos[index]
            except CorruptImage:
                self.tally.note(index)
                index = (index + 1) % len(self.photos)


class TestSamples(Dataset[Whole]):
    """Whole photos to be judged by, a batch at a time.

    Args:
        photos: The large ones.
        set_of: Which set each is of.
        scale: What their sides are cut to multiples of.
        tally: Where corrupt ones are noted.
    """

    __test__ = False  # or pytest would collect it

    def __init__(self, photos: Photos, set_of: Sequence[int], scale: int, tally: Tally) -> None:
        self.photos, self.set_of, self.scale, self.tally = photos, set_of, scale, tally

    def __getitem__(self, draw: Draw) -> Whole:
        return self.__getitems__([draw])

    def __getitems__(self, draws: Sequence[Draw]) -> Whole:
        """A batch of draws; torch's loader asks for all of them at once."""
        read = [self._read(draw.index) for draw in draws]
        return Whole([large for large, _ in read], [torch.tensor([number]) for _, number in read])

    def _read(self, index: int) -> tuple[Tensor, int]:
        if index != NOTHING:
            try:
                return cut_to(self.photos[index], self.scale), self.set_of[index]
            except CorruptImage:
                self.tally.note(index)
        side = self.scale * (SIDE + 2)
        return torch.zeros(3, side, side, dtype=torch.uint8), -1


def crop(pixels: Pixels, patch: int, scale: int, turn: bool, seed: int) -> Pixels:
    """A large crop (3, scale (P + 2 AROUND), ...) of a photo (H, W, 3), as the seed says.

    It begins where a small pixel does, and what it has around it is mirrored beyond the photo, as resizing does.
    """
    random = np.random.default_rng(seed)
    side, margin = scale * patch, scale * AROUND
    corner = [int(random.integers(length // scale - patch + 1)) * scale for length in pixels.shape[:2]]
    # Small photos are made of large ones whose sides the scale divides.
    lengths = [length // scale * scale for length in pixels.shape[:2]]
    rows, columns = (
        _mirrored(np.arange(start - margin, start + side + margin), length)
        for start, length in zip(corner, lengths, strict=True)
    )
    found = pixels[rows[:, None], columns]
    if turn:
        found = np.rot90(found, int(random.integers(4)))
        found = found[:, ::-1] if random.random() < 0.5 else found
    return np.ascontiguousarray(found.transpose(2, 0, 1))


def _mirrored(places: np.ndarray[tuple[int], np.dtype[np.int64]], length: int):
    """Places beyond the border, where their mirror images are, the last pixel included."""
    places = places % (2 * length)
    return np.where(places < length, places, 2 * length - 1 - places)


def cut_to(pixels: Pixels, scale: int) -> Tensor:
    """Bytes (3, H, W) of a photo (H, W, 3), its sides cut to multiples of the scale."""
    height, width = (length // scale * scale for length in pixels.shape[:2])
    return torch.from_numpy(np.ascontiguousarray(pixels[:height, :width].transpose(2, 0, 1)))


def shrunk(large: Tensor, scale: int) -> Tensor:
    """What a small photo is, in the bytes (..., 3, h, w) that published pairs have, of bytes (..., 3, H, W)."""
    return to_bytes(resize(large.float(), 1 / scale))


def as_numbers(images: Tensor) -> Tensor:
    """Bytes as the network wants them: float32, white being 1."""
    return images.float() / 255


def paired(crops: Crops, scale: int) -> Crops:
    """Large and small crops, in numbers; what was around the large ones is gone."""
    small = shrunk(crops.large, scale)[..., AROUND:-AROUND, AROUND:-AROUND]
    margin = scale * AROUND
    return Crops(as_numbers(crops.large[..., margin:-margin, margin:-margin]), as_numbers(small))


def as_it_is(batch: Crops | Whole) -> Crops | Whole:
    """A batch is whole already; torch need not collate it."""
    return batch
