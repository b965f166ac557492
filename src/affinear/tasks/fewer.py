"""At most so many samples of each half of a data set, evenly among all."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import numpy as np


class Part(Protocol):
    """One half, of which some samples can be taken."""

    def __len__(self) -> int: ...

    def some(self, which: Sequence[int], /) -> Any:
        """The samples of these numbers."""
        ...


class Halves(Protocol):
    """A data set that is open, in two halves."""

    @property
    def name(self) -> str:
        """For people."""
        ...

    @property
    def fingerprint(self) -> str:
        """A few letters that are others for other samples."""
        ...

    @property
    def train(self) -> Part:
        """To learn from."""
        ...

    @property
    def test(self) -> Part:
        """To be judged by."""
        ...


D = TypeVar("D", bound=Halves)


def places(count: int, limit: int) -> list[int]:
    """Numbers of so many samples, from the first to the last; all if there are fewer.

    Examples:
        >>> places(7, 3), places(2, 3)
        ([0, 3, 6], [0, 1])
    """
    return np.linspace(0, count - 1, min(limit, count)).astype(int).tolist()


def fewer(data: D, limit: int, **others: Any) -> D:
    """The data set with at most so many of each half; `others` are fields of it that change as well."""
    changed: Any = dataclasses.replace(
        data,  # pyright: ignore[reportArgumentType]  # every data set is a dataclass
        train=data.train.some(places(len(data.train), limit)),
        test=data.test.some(places(len(data.test), limit)),
        fingerprint=f"{data.fingerprint}-{limit}",
        name=f"{data.name}, at most {limit} of each half",
        **others,
    )
    return changed
