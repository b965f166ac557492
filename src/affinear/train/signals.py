"""Ctrl-C and SIGTERM, taken as a wish that is granted after the step."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# A launcher passes on a Ctrl-C that the terminal has already sent to all its processes; that is not a second one.
ECHO_SECONDS = 1.0


class Wish:
    """Whether, and by which signal, the run was asked to stop.

    Attributes:
        signal: The number of the signal, or None.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._since = 0.0
        self._process = os.getpid()

    def take(self, number: int, frame: FrameType | None) -> None:
        """Remember the signal; if it comes again, stop at once."""
        if os.getpid() != self._process:
            return  # a reader of images, whom the trainer will dismiss
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._since = number, now
        elif now - self._since > ECHO_SECONDS:
            raise KeyboardInterrupt


@contextmanager
def wishes() -> Generator[Wish]:
    """Listen to the signals; afterwards whoever listened before does so again.

    Outside of the main thread, which alone may listen, nothing is heard.
    """
    wish = Wish()
    if threading.current_thread() is not threading.main_thread():
        yield wish
        return
    before = {number: signal.signal(number, wish.take) for number in SIGNALS}
    try:
        yield wish
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
