"""Loaders of batches, ready to be handed to accelerate.

What the user of a loader has to know:

- Batches are those of all processes together. Prepare the loader with `split_batches=True`, and accelerate cuts each
  batch up; the batch size must be a multiple of the number of processes.
- Before each epoch call `prepared.set_epoch(epoch)`. Accelerate hands it on to the batch sampler, in one process and in
  many. To go on in the middle of an epoch, do so and then take `accelerate.skip_first_batches(prepared, done)`.
- Images are bytes; `ready` makes numbers of them, on the device that they were brought to.
- Nothing here draws from or changes the global random state, in this process or in those that load.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch.utils.data import DataLoader

from ...train.corrupt import Skipped
from ...train.draws import Batches, Draws, InOrder
from ..images.batching import Batching, Normalize
from .images import Images
from .samples import Batch, Samples, TestSamples, TrainSamples, as_it_is, without_fillers


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
    count = len(images.train)
    if count < batching.batch_size:
        raise ValueError(
            f"batch_size: {images.name} has {count} training images, which do not fill a batch of "
            f"{batching.batch_size}; choose {count} or less"
        )
    draws = Draws(count, batching.seed, batching.augment.repeats)
    samples = TrainSamples(images.train, batching, skipped.tally("train", images.train))
    return _loader(samples, Batches(draws, batching.batch_size, drop_last=True))


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
    count, size = len(images.test), batching.batch_size
    samples = TestSamples(images.test, batching, skipped.tally("test", images.test))
    total = -(-count // size) * size if full else count
    return _loader(samples, Batches(InOrder(count, total), size, drop_last=False), full=full)


test_loader.__test__ = False  # pyright: ignore[reportFunctionMemberAccess]  # or pytest would collect it


def ready(batches: Iterable[Batch], normalize: Normalize) -> Iterator[Batch]:
    """Batches of a loader as a network wants them: images float32, normalised.

    Args:
        batches: Of the loader, prepared or not.
        normalize: Made for the device that they are on.
    """
    for images, targets in batches:
        yield normalize(images), targets


def _loader(samples: Samples, batches: Batches, full: bool = True) -> DataLoader[Batch]:
    workers = samples.batching.workers
    return DataLoader(
        samples,
        batch_sampler=batches,
        num_workers=workers,
        collate_fn=cast("Any", as_it_is if full else without_fillers),  # typed for lists alone
        pin_memory=torch.cuda.is_available(),
        persistent_workers=workers > 0,
        worker_init_fn=_ignore_signals,
        generator=torch.Generator(),  # its own, or every epoch would draw a number from the global one
    )


def _ignore_signals(worker: int) -> None:
    # Ctrl-C reaches all processes, and so does torchrun's SIGTERM; the one that trains decides when to stop, and still
    # wants the batches it asked for. A reader ends when it is told to, or when its trainer is gone.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
