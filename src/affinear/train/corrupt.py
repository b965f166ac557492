"""Samples that cannot be read: passed over, counted once each, and too many at some point."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

SHARE = 0.05  # of a half may be corrupt, and one always may
NAMED = 20  # in the message; the rest is counted


class Source(Protocol):
    """Samples by number, each with a name."""

    def __len__(self) -> int:
        """How many there are, readable or not."""
        ...

    def path(self, index: int) -> str:
        """What the sample is called, for people: mostly its file."""
        ...


class TooManyCorrupt(ValueError):
    """More samples cannot be read than a run may pass over; the message counts and names them."""

    def __init__(self, message: str) -> None:
        # A loading process hands its error over inside a printed traceback; the sentence is all its reader needs.
        super().__init__(message.rpartition(f"{type(self).__name__}: ")[2].strip())

    @property
    def message(self) -> str:
        """The sentence. An error with this field is one that torch raises again without keeping it alive.

        Otherwise the loading processes would end late, and keep the one that trains waiting for seconds.
        """
        return str(self)


@dataclass(frozen=True, eq=False)
class Tally:
    """Which samples of a half are corrupt, known to all loading processes at once.

    Attributes:
        name: Of the half, for the message.
        source: Its samples.
        corrupt: A byte for each, in shared memory: a process only ever sets it, so nobody has to wait for anybody.
        noun: What samples are called, for the message.
        share: Of the samples that may be corrupt; one may be, unless the share is 0.
    """

    name: str
    source: Source
    corrupt: Tensor
    noun: str = "images"
    share: float = SHARE

    def note(self, index: int) -> None:
        """Count a sample as corrupt.

        Raises:
            TooManyCorrupt: If there are too many by now.
        """
        self.corrupt[index] = 1
        self.check()

    def check(self) -> None:
        """Raise TooManyCorrupt if more than the share is corrupt."""
        said = self.complaint()
        if said:
            raise TooManyCorrupt(said)

    def complaint(self) -> str:
        """What is wrong if more than the share is corrupt, in a sentence; else nothing."""
        count, total = int(self.corrupt.sum()), len(self.source)
        allowed = max(1, int(self.share * total)) if self.share else 0
        if count <= allowed and (count < total or not count):
            return ""
        more = f" and {count - NAMED} more" if count > NAMED else ""
        return (
            f"{count} of the {total} {self.name} {self.noun} cannot be read, more than {100 * self.share:g} %; mend "
            f"them, take them away, or let more be skipped, as --set unreadable=0.2 does: "
            f"{', '.join(self.names[:NAMED])}{more}"
        )

    @property
    def indices(self) -> list[int]:
        """The corrupt ones by number."""
        return self.corrupt.nonzero().flatten().tolist()

    @property
    def names(self) -> list[str]:
        """The corrupt ones by name."""
        return [self.source.path(index) for index in self.indices]


class Skipped:
    """The corrupt samples that a run came across, in all its loading processes.

    Args:
        share: Of the samples of a half that may be corrupt.
    """

    def __init__(self, share: float = SHARE) -> None:
        self._share = share
        self._tallies: dict[str, Tally] = {}

    def __len__(self) -> int:
        return sum(len(tally.indices) for tally in self._tallies.values())

    @property
    def names(self) -> tuple[str, ...]:
        """What they are called."""
        return tuple(name for tally in self._tallies.values() for name in tally.names)

    def tally(self, half: str, source: Source, noun: str = "images") -> Tally:
        """The count for a half; the same one when asked again.

        Args:
            half: "train" or "test".
            source: Its samples.
            noun: What they are called.

        Raises:
            ValueError: If other samples are counted under this name already.
        """
        found = self._tallies.get(half)
        if found is None:
            found = Tally(half, source, torch.zeros(len(source), dtype=torch.uint8).share_memory_(), noun, self._share)
            self._tallies[half] = found
        if found.source is not source:
            raise ValueError(f"skipped: it counts other {half} samples already; make a new Skipped for each data set")
        return found

    def state(self) -> list[tuple[str, int]]:
        """What `absorb` takes: the half and number of every corrupt sample."""
        return [(half, index) for half, tally in self._tallies.items() for index in tally.indices]

    def absorb(self, states: Iterable[tuple[str, int]]) -> None:
        """Count what other processes, or this run before it was interrupted, came across too.

        Args:
            states: Of `state`, of any number of processes, one after the other.

        Raises:
            TooManyCorrupt: If that makes too many.
        """
        for half, index in states:
            self._tallies[half].corrupt[index] = 1
        said = [sentence for sentence in (tally.complaint() for tally in self._tallies.values()) if sentence]
        if said:
            raise TooManyCorrupt(". ".join(said))
