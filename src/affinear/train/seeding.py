"""Randomness that depends on where a run is and on nothing else, so that a run can be taken up anywhere."""

from __future__ import annotations

import random
from collections.abc import Generator
from contextlib import contextmanager

import numpy as np
import torch


def seed_of(*numbers: int) -> int:
    """One seed out of several numbers, well mixed, below 2^63.

    Examples:
        >>> seed_of(0, 1) == seed_of(0, 1), seed_of(0, 1) == seed_of(1, 0)
        (True, False)
    """
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


def seed_step(seed: int, step: int, part: int, rank: int, device: torch.device) -> None:
    """Seed torch, on this device, numpy and Python for one part of one step: drop path, dropout, mixup."""
    number = seed_of(seed, 1, step, part, rank)
    random.seed(number)
    np.random.seed(number % 2**32)
    # torch.manual_seed looks for every kind of device there could be, which takes longer than a small step.
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed(number)
    elif device.type != "cpu":
        torch.manual_seed(number)


@contextmanager
def kept_random_state() -> Generator[None]:
    """Put the random states of torch, numpy and Python back afterwards, as if nothing had been drawn.

    Examples:
        >>> before = torch.random.get_rng_state()
        >>> with kept_random_state():
        ...     _ = torch.manual_seed(1)
        >>> torch.equal(before, torch.random.get_rng_state())
        True
    """
    with kept_randomness(), torch.random.fork_rng():  # the second for GPUs
        yield


@contextmanager
def kept_randomness() -> Generator[None]:
    """Let anything be drawn from the generators of this process's CPU, and then go on as if nothing had been."""
    python, arrays, tensors = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)
        torch.default_generator.set_state(tensors)


def seed_all(seed: int) -> None:
    """Let all that the CPU draws next follow from a seed."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would start the generators of GPUs anew as well
