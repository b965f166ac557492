"""What can be set about segmentation, beside what the engine's recipe says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ...models.heads import HEADS
from ...train import settings
from ...train.settings import Check, Settings

LOOKS = ("whole", "slide")


@dataclass(frozen=True)
class Segmentation(Settings):
    """How scenes become batches, what stands on the backbone, and how it is judged.

    None stands for what is found out when the run begins, from data and network.

    Attributes:
        head: "semantic_fpn", or "upernet" with its helper.
        helper_weight: Weight of the helper's loss.
        drop_path: Stochastic depth of the backbone's last block.
        map_norms: Whether the backbone's maps end in a norm; None for what suits it.
        mask_padding: Whether the backbone is told which part of a crop is photo. False is the published arithmetic.
        crop: Height and width of a training crop; None for the smallest photo's sides, in multiples of 32, at most 512.
        short_side: What a photo's shorter side is brought to, in training before `zoom`; None for as it is.
        long_side: The most the longer side may have then; None for any.
        zoom: Least and greatest factor of training photos after that.
        one_class: Largest share of one class in a training crop.
        flip: Probability that a training photo is mirrored.
        photometric: Whether light and colours of training photos vary.
        balance: How much more pixels of rare classes count in training: by their class's share of all training pixels
            to the power of minus this. 0 for all alike, 1 for classes that count alike.
        mean: What is taken off each channel, where white is 1.
        std: What each channel is divided by then.
        look: How a photo is judged: "whole", or "slide" through windows.
        window: Height and width of a window; None for the crop's.
        window_stride: How far windows are apart; None for two thirds of a window.
        test_batch: Photos that are judged at once, over all processes.
        test_split: Folder of the photos to be judged by, such as "test"; None for the first of validation, val, test.
        zero_is_class: Whether 0 in a map is the first class, and not what is unlabelled.
        memory: Whether all photos are decoded once and kept.
    """

    kind: ClassVar[str] = "settings of segment"
    free: ClassVar[tuple[str, ...]] = ("memory", "test_batch")
    bound: ClassVar[tuple[str, ...]] = ("head", "map_norms")
    tuned: ClassVar[tuple[str, ...]] = ("mask_padding",)

    head: str = "semantic_fpn"
    helper_weight: float = 0.4
    drop_path: float = 0.0
    map_norms: bool | None = None
    mask_padding: bool = True
    crop: tuple[int, int] | None = None
    short_side: int | None = None
    long_side: int | None = None
    zoom: tuple[float, float] = (0.5, 2.0)
    one_class: float = 0.75
    flip: float = 0.5
    photometric: bool = True
    balance: float = 0.0
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    look: str = "whole"
    window: tuple[int, int] | None = None
    window_stride: tuple[int, int] | None = None
    test_batch: int = 8
    test_split: str | None = None
    zero_is_class: bool = False
    memory: bool = False

    checks: ClassVar[Mapping[str, Check]] = {
        "head": settings.one_of(tuple(HEADS)),
        "helper_weight": settings.at_least_0(),
        "drop_path": settings.share(below=True),
        "map_norms": settings.truth(optional=True),
        "mask_padding": settings.truth(),
        "crop": settings.size(),
        "short_side": settings.whole(32, optional=True),
        "long_side": settings.whole(32, optional=True),
        "zoom": Check(
            "two numbers above 0 that rise",
            lambda value: settings.numbers(2, False, above=0).good(value) and value[0] <= value[1],
        ),
        "one_class": settings.share(),
        "flip": settings.share(),
        "photometric": settings.truth(),
        "balance": settings.share(),
        "mean": settings.numbers(3, True),
        "std": settings.numbers(3, True, above=0),
        "look": settings.one_of(LOOKS),
        "window": settings.size(),
        "window_stride": settings.size(),
        "test_batch": settings.whole(1),
        "test_split": settings.text(optional=True),
        "zero_is_class": settings.truth(),
        "memory": settings.truth(),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.long_side is not None and (self.short_side is None or self.long_side < self.short_side):
            raise ValueError(f"long_side: expected at least short_side, {self.short_side}, got {self.long_side}")
        window, stride = self.window, self.window_stride
        if window is not None and stride is not None and (stride[0] > window[0] or stride[1] > window[1]):
            raise ValueError(
                f"window_stride: expected at most the window's sides, {window[0]} x {window[1]}, or pixels between "
                f"windows would not be seen, got {stride[0]} x {stride[1]}"
            )


@dataclass(frozen=True)
class Drawing(Settings):
    """What `affinear predict` can be told.

    Attributes:
        opacity: How much of the photo the colours of the classes hide.
    """

    kind: ClassVar[str] = "options of segment"
    opacity: float = 0.55

    checks: ClassVar[Mapping[str, Check]] = {"opacity": settings.share()}
