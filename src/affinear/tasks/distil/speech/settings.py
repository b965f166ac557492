"""The settings of distilling speech: what distilling itself has, and how recordings become windows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ....train import settings
from ....train.settings import Check, Settings
from ...speech.settings import Hearing
from ..settings import SwapSettings, told_of


@dataclass(frozen=True)
class WindowSettings(Settings):
    """How recordings become windows.

    Attributes:
        language: Of the recordings, such as "en", for a teacher that knows several; None for one that does not.
        speeds: How fast training recordings are played, each as likely as the others.
        test_batch: Recordings that are judged at once, over all processes.
        test_split: The half to be judged by, such as "test-clean"; None for the first that is there of dev-clean,
            validation, test and the like.
        memory: Whether all recordings are decoded once and kept.
    """

    kind: ClassVar[str] = "settings of distilling speech"
    free: ClassVar[tuple[str, ...]] = ("memory", "test_batch")

    language: str | None = None
    speeds: tuple[float, ...] = (0.9, 1.0, 1.1)
    test_batch: int = 16
    test_split: str | None = None
    memory: bool = False

    checks: ClassVar[Mapping[str, Check]] = {
        "language": settings.text(optional=True),
        **{name: Hearing.checks[name] for name in ("speeds", "test_batch", "test_split", "memory")},
    }


@dataclass(frozen=True)
class DistilSpeechSettings(WindowSettings, SwapSettings):
    """Replaced below, by what all its fields are."""

    bound: ClassVar[tuple[str, ...]] = (*SwapSettings.bound, *WindowSettings.bound)
    checks: ClassVar[Mapping[str, Check]] = {**SwapSettings.checks, **WindowSettings.checks}


DistilSpeechSettings.__doc__ = told_of(
    """How a recogniser with a linear encoder is made and taught; recordings are read as `--task speech` reads them.

    Attributes:
""",
    WindowSettings,
)
