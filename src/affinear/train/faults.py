"""What can stop a run, each with a sentence that says what happened and what to do."""

from __future__ import annotations

import signal
from pathlib import Path


class RunError(RuntimeError):
    """A run cannot begin or go on; the message is made to be shown as it is."""


class OtherRun(RunError, ValueError):
    """The output folder holds a run that this one would not continue."""


class SaveError(RunError):
    """Something could not be written; what was there before is still there."""


class NonFinite(RunError):
    """A number turned infinite or not-a-number.

    Attributes:
        where: The layer or parameter in which it appeared first.
        batch: The file with the images and targets of that step.
    """

    def __init__(self, message: str, where: str, batch: Path | None) -> None:
        super().__init__(message)
        self.where, self.batch = where, batch


class Interrupted(RunError):
    """A signal asked the run to stop; it was saved first.

    Attributes:
        signal: The signal's number.
    """

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.signal = number

    @property
    def exit_code(self) -> int:
        """What a shell expects of a program that this signal ended.

        Examples:
            >>> Interrupted("stopped", signal.SIGINT).exit_code
            130
        """
        return 128 + signal.Signals(self.signal).value
