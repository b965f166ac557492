"""Loaders of batches, ready to be handed to accelerate, for samples of any kind.

What the user of a loader has to know:

- Batches are those of all processes together. Prepare the loader with `split_batches=True`, and accelerate cuts each
  batch up; the batch size must be a multiple of the number of processes.
- Before each epoch call `prepared.set_epoch(epoch)`. Accelerate hands it on to the batch sampler, in one process and in
  many. To go on in the middle of an epoch, do so and then take `accelerate.skip_first_batches(prepared, done)`.
- Nothing here draws from or changes the global random state, in this process or in those that load.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from .draws import Batches, Draw, Draws, InOrder
from .recipe import Recipe


def shuffled(
    samples: Dataset[Any],
    count: int,
    batch_size: int,
    *,
    seed: int,
    workers: int,
    name: str,
    noun: str = "images",
    repeats: int = 1,
    collate: Callable[[Any], Any] | None = None,
) -> DataLoader[Any]:
    """Batches to learn from, in an order that each epoch has for itself. A last one that would not be full is left out.

    Args:
        samples: Asked by `Draw`: `samples[draw]` gives one sample, `samples.__getitems__(draws)`, where there is one, a
            whole batch. A draw has the number of the sample and a seed for all that is random about it.
        count: How many there are.
        batch_size: Of all processes together.
        seed: Of the order and of what happens to samples.
        workers: Processes that load; 0 to load in this one.
        name: Of the data set, for the error.
        noun: What samples are called, for the error.
        repeats: How often a sample comes within an epoch.
        collate: Makes a batch of what `samples` gave; torch's if None.

    Raises:
        ValueError: If there are fewer samples than a batch has.
    """
    if count < batch_size:
        raise ValueError(
            f"batch_size: {name} has {count} training {noun}, which do not fill a batch of {batch_size}; choose "
            f"{count} or less"
        )
    return _loader(samples, Batches(Draws(count, seed, repeats), batch_size, drop_last=True), workers, collate)


def shuffled_by(
    recipe: Recipe,
    samples: Dataset[Any],
    count: int,
    *,
    name: str,
    noun: str = "images",
    collate: Callable[[Any], Any] | None = None,
) -> DataLoader[Any]:
    """Batches to learn from as `shuffled` makes them, with the recipe's size of a batch, seed and workers."""
    size, seed, workers = recipe.batch_size // recipe.accumulate, recipe.seed, recipe.workers
    return shuffled(samples, count, size, seed=seed, workers=workers, name=name, noun=noun, collate=collate)


def arranged(
    samples: Dataset[Any],
    draws: Sampler[Draw],
    batch_size: int,
    *,
    workers: int,
    collate: Callable[[Any], Any] | None = None,
) -> DataLoader[Any]:
    """Batches to learn from, in an order that the task decides, such as that of recordings of one length.

    Args:
        samples: Asked by `Draw`, or by what the sampler makes of it.
        draws: With `set_epoch`; as many of them in an epoch as whole batches have.
        batch_size: Of all processes together.
        workers: Processes that load; 0 to load in this one.
        collate: Makes a batch of what `samples` gave; torch's if None.
    """
    return _loader(samples, Batches(cast("Draws", draws), batch_size, drop_last=True), workers, collate)


def in_order(
    samples: Dataset[Any],
    count: int,
    batch_size: int,
    *,
    workers: int,
    full: bool = True,
    collate: Callable[[Any], Any] | None = None,
) -> DataLoader[Any]:
    """Batches to be judged by, in order, each sample once.

    Args:
        samples: Asked by `Draw`; of a draw whose index is `NOTHING` they give a filler that the score leaves out.
        count: How many there are.
        batch_size: Of all processes together.
        workers: Processes that load; 0 to load in this one.
        full: Whether the last batch is filled up with `NOTHING`, which many processes need.
        collate: Makes a batch of what `samples` gave; torch's if None.
    """
    total = -(-count // batch_size) * batch_size if full else count
    return _loader(samples, Batches(InOrder(count, total), batch_size, drop_last=False), workers, collate)


def _loader(
    samples: Dataset[Any], batches: Batches, workers: int, collate: Callable[[Any], Any] | None
) -> DataLoader[Any]:
    return DataLoader(
        samples,
        batch_sampler=batches,
        num_workers=workers,
        collate_fn=cast("Any", collate),  # typed for lists alone
        pin_memory=torch.cuda.is_available(),
        persistent_workers=workers > 0,
        worker_init_fn=_heed_the_trainer,
        generator=torch.Generator(),  # its own, or every epoch would draw a number from the global one
    )


def _heed_the_trainer(worker: int) -> None:
    # Ctrl-C reaches all processes, and so does torchrun's SIGTERM; the one that trains decides when to stop, and still
    # wants the batches it asked for. A reader ends when its trainer says so, by its queue or by SIGTERM, or is gone.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not hasattr(signal, "sigwaitinfo"):  # who sent a signal is not told there; as it was sent, it is obeyed
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    # Not getppid: in a process that a fork server made, readers are forked by the server too.
    trainer = multiprocessing.parent_process()
    if trainer is not None:
        threading.Thread(target=_end_with, args=(trainer.pid,), daemon=True).start()


def _end_with(trainer: int | None) -> None:
    """Wait for the trainer's own SIGTERM, which comes as it exits and waits for its readers, and end."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != trainer:
        pass
    os._exit(0)
