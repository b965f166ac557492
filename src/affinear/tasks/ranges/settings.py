"""What can be set about ranges, beside what the engine's recipe says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ...train import settings
from ...train.settings import Check, Settings


@dataclass(frozen=True)
class RangesSettings(Settings):
    """How sequences become batches, and which part they are judged by.

    Attributes:
        length: The most tokens that are taken of a sequence; None for what the data's kind has.
        dropout: After the embedding and inside of blocks.
        judged_by: "test", or "validation" to choose settings by.
        test_batch: Sequences that are judged at once, over all processes.
    """

    kind: ClassVar[str] = "settings of ranges"
    free: ClassVar[tuple[str, ...]] = ("test_batch",)

    length: int | None = None
    dropout: float = 0.1
    judged_by: str = "test"
    test_batch: int = 128

    checks: ClassVar[Mapping[str, Check]] = {
        "length": settings.whole(1, optional=True),
        "dropout": settings.share(below=True),
        "judged_by": settings.one_of(("test", "validation")),
        "test_batch": settings.whole(1),
    }


@dataclass(frozen=True)
class Guessing(Settings):
    """What `affinear predict` can be told.

    Attributes:
        top: How many classes an answer names.
    """

    kind: ClassVar[str] = "options of ranges"
    top: int = 3

    checks: ClassVar[Mapping[str, Check]] = {"top": settings.whole(1)}
