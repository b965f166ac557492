"""What Ctrl-C does to the `affinear` command before it has begun: end, without a traceback. Imports next to nothing."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

INTERRUPTED = 130  # how a shell knows Ctrl-C
PROCESS = os.getpid()  # and not one that was forked from it


def stop_at_once(number: int, frame: FrameType | None) -> None:
    """What Ctrl-C does while packages are imported, out of which a KeyboardInterrupt comes as anything: end."""
    if os.getpid() == PROCESS:
        os.write(2, b"\nStopped before anything was done.\n")
        os._exit(INTERRUPTED)


def await_interrupts() -> None:
    """From here on Ctrl-C ends the process at once, unless somebody else has decided what it does."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, stop_at_once)
