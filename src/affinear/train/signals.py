"""Ctrl-C and SIGTERM, taken as a wish that is granted after the step."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# A launcher passes on a Ctrl-C that the terminal has already sent to all its processes; that is not a second one.
ECHO_SECONDS = 1.0


class Wish:
    """Whether, and by which signal, the run was asked to stop.

    Attributes:
        signal: The number of the signal, or None.
        worth_saving: Whether a step is done that would be lost. Before that a signal does what it did before anybody
            listened: what the first step waits for, such as a compiler, may take minutes.
        before: What that is, by the signal's number.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self.worth_saving = False
        self.before: dict[int, Any] = {}
        self._since = 0.0
        self._process = os.getpid()

    def take(self, number: int, frame: FrameType | None) -> None:
        """Remember the signal; if it comes again, stop at once."""
        if os.getpid() != self._process:
            return  # a reader of images, whom the trainer will dismiss
        now, first = time.monotonic(), self.signal is None
        if first:
            self.signal, self._since = number, now
        if not self.worth_saving:
            self._as_before(number, frame)  # may raise, in a callback of C in vain: the wish stays
        elif not first and now - self._since > ECHO_SECONDS:
            raise KeyboardInterrupt

    def _as_before(self, number: int, frame: FrameType | None) -> None:
        handler = self.before.get(number)
        if callable(handler):
            handler(number, frame)
        elif handler == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(self._process, number)


@contextmanager
def wishes() -> Generator[Wish]:
    """Listen to the signals; afterwards whoever listened before does so again.

    Outside of the main thread, which alone may listen, nothing is heard.
    """
    wish = Wish()
    if threading.current_thread() is not threading.main_thread():
        yield wish
        return
    before = wish.before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, wish.take)
    try:
        yield wish
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
