"""Loaders of labelled images: bytes, which `ready` makes numbers of on the device that they were brought to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch.utils.data import DataLoader

from ...train import loading
from ...train.corrupt import Skipped
from ..images.batching import Batching, Normalize
from ..images.labelled.images import Images
from .samples import Batch, TestSamples, TrainSamples, as_it_is, without_fillers


def train_loader(images: Images, batching: Batching, skipped: Skipped) -> DataLoader[Batch]:
    """Batches of the training half: images uint8 (B, C, H, W), float32 where erased, and targets int64 (B,).

    Each epoch has its own order. A last batch that would not be full is left out.

    Args:
        images: The data set.
        batching: How its images become batches.
        skipped: Where corrupt images are counted; in their place come the next good ones.

    Raises:
        ValueError: If there are fewer images than a batch has.
    """
    return loading.shuffled(
        TrainSamples(images.train, batching, skipped.tally("train", images.train)),
        len(images.train),
        batching.batch_size,
        seed=batching.seed,
        workers=batching.workers,
        name=images.name,
        repeats=batching.augment.repeats,
        collate=as_it_is,
    )


def test_loader(
    images: Images,
    batching: Batching,
    skipped: Skipped,
    *,
    full: bool = False,  # noqa: PT028  # not a test
) -> DataLoader[Batch]:
    """Batches of the whole test half, in order, as they are: images uint8 (B, C, H, W) and targets int64 (B,).

    Args:
        images: The data set.
        batching: How its images become batches.
        skipped: Where corrupt images are counted.
        full: Whether all batches have `batch_size` rows. Then rows without an image, because it is corrupt or the last
            batch is not full, have the target `NO_IMAGE`, and many processes see as many rows each. Otherwise such
            rows are left out.
    """
    return loading.in_order(
        TestSamples(images.test, batching, skipped.tally("test", images.test)),
        len(images.test),
        batching.batch_size,
        workers=batching.workers,
        full=full,
        collate=as_it_is if full else without_fillers,
    )


test_loader.__test__ = False  # pyright: ignore[reportFunctionMemberAccess]  # or pytest would collect it


def ready(batches: Iterable[Batch], normalize: Normalize) -> Iterator[Batch]:
    """Batches of a loader as a network wants them: images float32, normalised.

    Args:
        batches: Of the loader, prepared or not.
        normalize: Made for the device that they are on.
    """
    for images, targets in batches:
        yield Batch(normalize(images), targets)
