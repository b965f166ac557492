"""What can be set about detection, beside what the engine's recipe says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

from ...models.detectors import DetectorSettings
from ...models.detectors.settings import BoxHead, BoxLoss, Norm
from ...train import settings
from ...train.settings import Check, Settings
from .variation import Variation

HEADS = ("retinanet", "rcnn", "cascade")


def _sides(least: int) -> Check:
    def read(text: str) -> Any:
        found = settings.parse_value(text) if text.strip() else None
        return found if isinstance(found, tuple) else () if found is None else (found,)

    def good(value: Any) -> bool:
        return isinstance(value, tuple) and len(value) >= least and all(isinstance(n, int) and n > 0 for n in value)

    return Check(f"sides in pixels with commas{', or none' if not least else ''}", good, read)


@dataclass(frozen=True)
class Detection(Settings):
    """How images become batches, which detector stands on the backbone, and how it is judged.

    None stands for what is found out when the run begins, from the data.

    Attributes:
        head: "retinanet", "rcnn" (Faster R-CNN, with masks Mask R-CNN) or "cascade" (Cascade R-CNN, with masks Cascade
            Mask R-CNN).
        masks: Whether masks are learned; None for whether the data has some.
        drop_path: Stochastic depth of the backbone's last block.
        anchor_sizes: Side of the anchors of the five levels.
        anchor_ratios: Their heights over their widths.
        detections: Objects of an image at most, in what the network reports and in what is judged. None for COCO's 100,
            or more hundreds where training images have more objects.
        min_score: What is less sure is not reported.
        nms: Of two objects of a class that overlap more than this the surer one is kept.
        proposals: Regions that are looked at, in training and in evaluation.
        rois: Regions of an image that a stage learns from.
        channels: Of the pyramid.
        head_norm: In pyramid and heads: "layer", "group", "batch" or "none".
        box_norm: In the convolutions of the box head; none for the same as `head_norm`.
        box_head: "2fc" or "4conv1fc".
        class_aware: Of a cascade: whether each class has boxes of its own.
        box_loss: Of a cascade: "smooth_l1" or "giou".
        sampling: Points in a bin of a region along each side; 0 for as many as it has pixels.
        relu_between: Of RetinaNet: whether the seventh level comes from the positive part of the sixth.
        mask_padding: Whether padding is kept out of everything. False is the published arithmetic.
        frozen_norm: Whether batch norms of the backbone keep the statistics they came with.
        short_sides: Shorter sides of training images, of which one is drawn for each; none for as they are.
        long_side: Longer side at most, in evaluation as well.
        test_side: Shorter side in evaluation; 0 for images as they are. None for the last of `short_sides`, or 0.
        crop_share: Share of training images that are cropped before they are resized, as in DETR.
        jitter: Least and greatest factor of large-scale jitter, instead of `short_sides`; None for none.
        crop: Height and width of a crop of training images at the end; None for none.
        flip: Share of training images that are mirrored left and right.
        vflip: Share of training images that are mirrored top and bottom.
        photometric: Whether light and colours of training images vary.
        test_batch: Images that are judged at once, over all processes.
        test_split: The split to be judged by, such as "test"; None for the first of val and test.
        skip_bad_boxes: Whether boxes of no area or outside of their image are left out instead of refused.
        memory: Whether all images are decoded once and kept.
    """

    kind: ClassVar[str] = "settings of detect"
    free: ClassVar[tuple[str, ...]] = ("memory", "test_batch")
    bound: ClassVar[tuple[str, ...]] = (
        *("head", "masks", "anchor_sizes", "anchor_ratios", "channels", "head_norm"),
        *("box_norm", "box_head", "class_aware", "relu_between"),
    )
    tuned: ClassVar[tuple[str, ...]] = (
        *("detections", "min_score", "nms", "proposals", "sampling", "mask_padding", "test_side", "long_side"),
    )

    head: str = "rcnn"
    masks: bool | None = None
    drop_path: float = 0.0
    anchor_sizes: tuple[float, ...] = (32.0, 64.0, 128.0, 256.0, 512.0)
    anchor_ratios: tuple[float, ...] = (0.5, 1.0, 2.0)
    detections: int | None = None
    min_score: float = 0.05
    nms: float = 0.5
    proposals: tuple[int, int] = (2000, 1000)
    rois: int = 512
    channels: int = 256
    head_norm: str = "layer"
    box_norm: str | None = None
    box_head: str = "2fc"
    class_aware: bool = False
    box_loss: str = "smooth_l1"
    sampling: int = 2
    relu_between: bool = True
    mask_padding: bool = True
    frozen_norm: bool = False
    short_sides: tuple[int, ...] = (800,)
    long_side: int = 1333
    test_side: int | None = None
    crop_share: float = 0.0
    jitter: tuple[float, float] | None = None
    crop: tuple[int, int] | None = None
    flip: float = 0.5
    vflip: float = 0.0
    photometric: bool = False
    test_batch: int = 8
    test_split: str | None = None
    skip_bad_boxes: bool = False
    memory: bool = False

    checks: ClassVar[Mapping[str, Check]] = {
        "head": settings.one_of(HEADS),
        "masks": settings.truth(optional=True),
        "drop_path": settings.share(below=True),
        "anchor_sizes": settings.numbers(5, False, above=0),
        "anchor_ratios": settings.numbers(None, False, above=0),
        "detections": settings.whole(1, optional=True),
        "min_score": settings.share(),
        "nms": settings.share(),
        "proposals": settings.numbers(2, False, above=0),
        "rois": settings.whole(1),
        "channels": settings.whole(1),
        "head_norm": settings.one_of(get_args(Norm)),
        "box_norm": settings.one_of(get_args(Norm), optional=True),
        "box_head": settings.one_of(get_args(BoxHead)),
        "class_aware": settings.truth(),
        "box_loss": settings.one_of(get_args(BoxLoss)),
        "sampling": settings.whole(0),
        "relu_between": settings.truth(),
        "mask_padding": settings.truth(),
        "frozen_norm": settings.truth(),
        "short_sides": _sides(0),
        "long_side": settings.whole(32),
        "test_side": settings.whole(0, optional=True),
        "crop_share": settings.share(),
        "jitter": settings.numbers(2, True, above=0),
        "crop": settings.size(),
        "flip": settings.share(),
        "vflip": settings.share(),
        "photometric": settings.truth(),
        "test_batch": settings.whole(1),
        "test_split": settings.text(optional=True),
        "skip_bad_boxes": settings.truth(),
        "memory": settings.truth(),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.jitter is not None and self.crop is None:
            raise ValueError("crop: expected height and width beside jitter, got none")
        if self.masks and self.head == "retinanet":
            raise ValueError("masks: RetinaNet finds boxes alone; choose the head rcnn or cascade")
        self.detector()  # which checks what belongs together

    def detector(self, *, checkpointing: bool = False) -> DetectorSettings:
        """The settings of the network; what is still open is taken as COCO has it."""
        kinds: dict[tuple[str, bool], Any] = {
            ("retinanet", False): "retinanet",
            ("rcnn", False): "faster_rcnn",
            ("rcnn", True): "mask_rcnn",
            ("cascade", False): "cascade_rcnn",
            ("cascade", True): "cascade_mask_rcnn",
        }
        given: dict[str, Any] = {
            "kind": kinds[self.head, bool(self.masks)],
            "min_size": self.judged_at,
            "max_size": max(self.long_side, self.judged_at),
            "detections": self.detections or 100,
            "score": self.min_score,
            "norm": self.head_norm,
            "masked": self.mask_padding,
            "grad_checkpointing": checkpointing,
        }
        for name in ("anchor_sizes", "anchor_ratios", "nms", "proposals", "rois", "channels", "box_norm", "box_head"):
            given[name] = getattr(self, name)
        for name in ("class_aware", "box_loss", "sampling", "relu_between", "frozen_norm"):
            given[name] = getattr(self, name)
        return DetectorSettings(**given)

    @property
    def judged_at(self) -> int:
        """Shorter side in evaluation; 0 for images as they are."""
        if self.test_side is not None:
            return self.test_side
        return max(self.short_sides) if self.short_sides and self.jitter is None else 0

    def variation(self) -> Variation:
        """How training images are varied."""
        names = ("short_sides", "long_side", "crop_share", "jitter", "crop", "flip", "vflip", "photometric")
        return Variation(**{name: getattr(self, name) for name in names})


@dataclass(frozen=True)
class Drawing(Settings):
    """What `affinear predict` can be told.

    Attributes:
        score: What is less sure is neither drawn nor told.
        opacity: How much of the image the colours of masks hide.
    """

    kind: ClassVar[str] = "options of detect"

    score: float = 0.5
    opacity: float = 0.45

    checks: ClassVar[Mapping[str, Check]] = {"score": settings.share(), "opacity": settings.share()}
