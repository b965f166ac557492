"""The end of a process that shares a GPU: never in the middle of what the GPU does.

Under NVIDIA's MPS, one that is killed while its kernels run can make those of others fail, as its documentation says of
clients that end early: a next call of somebody else then reports an illegal memory access.
"""

from __future__ import annotations

import signal
from collections.abc import Generator
from contextlib import contextmanager, suppress

import torch


@contextmanager
def orderly() -> Generator[None, None, None]:
    """Take SIGTERM, as `timeout` sends it, as SystemExit, and wait for what the GPU was given before this is left."""
    before = signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        settle()
        signal.signal(signal.SIGTERM, before)


def settle() -> None:
    """Wait until a GPU that this process uses has nothing left to do for it."""
    if torch.cuda.is_initialized():
        with suppress(RuntimeError):  # a GPU that has failed has nothing left either
            torch.cuda.synchronize()


def _end(number: int, _: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second one would not wait
    raise SystemExit(128 + number)
