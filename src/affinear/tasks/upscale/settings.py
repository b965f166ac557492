"""What can be set about super-resolution, beside what the engine's recipe says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ...models.upscaler import SCALES
from ...train import settings
from ...train.settings import Check, Settings

LOOKS = ("whole", "strips", "tiles")
FORMATS = ("png", "jpg", "webp", "tif")


@dataclass(frozen=True)
class Upscaling(Settings):
    """How photos become pairs of small and large, and how the network is judged.

    None stands for what is found out when the run begins, from the data.

    Attributes:
        scale: How many times larger: 2, 3 or 4.
        patch: Side of a small training crop; None for 64, or the largest that every photo fills.
        crops: How often a photo comes within an epoch, each time with another crop.
        turn: Whether training crops are mirrored and turned by right angles.
        drop_path: Stochastic depth of the last layer.
        look: How a photo is judged: "whole", in "strips", which gives the same, or in "tiles".
        tile: Side of a tile, in pixels of the small photo.
        overlap: Pixels around a tile that are looked at too.
        test_sets: Folders to be judged by, with a plus between them; None for all that are there.
        test_batch: Photos that are judged at once, over all processes.
        memory: Whether all photos are decoded once and kept.
    """

    kind: ClassVar[str] = "settings of upscale"
    free: ClassVar[tuple[str, ...]] = ("memory", "test_batch")
    bound: ClassVar[tuple[str, ...]] = ("scale",)

    scale: int = 2
    patch: int | None = None
    crops: int = 16
    turn: bool = True
    drop_path: float = 0.0
    look: str = "whole"
    tile: int = 256
    overlap: int = 32
    test_sets: str | None = None
    test_batch: int = 4
    memory: bool = False

    checks: ClassVar[Mapping[str, Check]] = {
        "scale": Check("2, 3 or 4", lambda value: isinstance(value, int) and value in SCALES),
        "patch": settings.whole(8, optional=True),
        "crops": settings.whole(1),
        "turn": settings.truth(),
        "drop_path": settings.share(below=True),
        "look": settings.one_of(LOOKS),
        "tile": settings.whole(8),
        "overlap": settings.whole(0),
        "test_sets": settings.text(optional=True),
        "test_batch": settings.whole(1),
        "memory": settings.truth(),
    }


@dataclass(frozen=True)
class Enlarging(Settings):
    """What `affinear predict` can be told.

    Attributes:
        look: "auto" for the whole photo, in strips where it is large; "whole", "strips" or "tiles".
        strip: Rows of a strip, about.
        tile: Side of a tile, in pixels of the photo.
        overlap: Pixels around a tile that are looked at too.
        format: Ending of the file that is written: png, jpg, webp or tif.
        quality: Of jpg and webp, from 1 to 100.
    """

    kind: ClassVar[str] = "options of upscale"

    look: str = "auto"
    strip: int = 64
    tile: int = 256
    overlap: int = 32
    format: str = "png"
    quality: int = 95

    checks: ClassVar[Mapping[str, Check]] = {
        "look": settings.one_of(("auto", *LOOKS)),
        "strip": settings.whole(1),
        "tile": settings.whole(8),
        "overlap": settings.whole(0),
        "format": settings.one_of(FORMATS),
        "quality": Check("a whole number from 1 to 100", lambda value: settings.whole(1).good(value) and value <= 100),
    }
