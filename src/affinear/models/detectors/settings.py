"""What a detector is made with, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

Kind: TypeAlias = Literal["retinanet", "faster_rcnn", "mask_rcnn", "cascade_rcnn", "cascade_mask_rcnn"]
Norm: TypeAlias = Literal["layer", "group", "batch", "none"]
BoxHead: TypeAlias = Literal["2fc", "4conv1fc"]
BoxLoss: TypeAlias = Literal["smooth_l1", "giou"]


@dataclass(frozen=True)
class DetectorSettings:
    """Every setting of a detector but its backbone and its classes.

    None stands for what is usual for the kind.

    Attributes:
        kind: Which detector. Those with "mask" in their name learn masks as well.
        min_size: Shorter side of images in evaluation; larger ones and smaller ones are resized. 0 leaves all as they
            are.
        max_size: Longer side of images in evaluation at most.
        anchor_sizes: Side of the anchors of the five levels.
        anchor_ratios: Their heights over their widths.
        anchor_octaves: Sizes between one level and the next: 3 for RetinaNet, else 1.
        detections: Objects of an image at most.
        score: What is less sure is not reported.
        nms: Of two objects of a class that overlap more than this the surer one is kept.
        proposals: Regions that are looked at, in training and in evaluation.
        rois: Regions of an image that a stage learns from.
        channels: Of all maps of the pyramid.
        norm: In pyramid and heads: "layer" normalises every place by itself and so knows neither batch nor padding;
            "group" and "batch" are the usual ones; "none" is what released detectors have.
        box_norm: In the convolutions of the box head; None for the same as `norm`.
        box_head: Layers before boxes are told: two linear ones, or four convolutions and a linear one.
        class_aware: Of a cascade: whether each class has boxes of its own. The others' classes always have.
        box_loss: Of a cascade: on the numbers of boxes, or "giou" on the boxes. The others are torchvision's.
        aligned: Whether regions are pooled with half a pixel's shift, as they should be.
        sampling: Points in a bin of a region along each side; 0 for as many as it has pixels.
        relu_between: Of RetinaNet: whether the seventh level comes from the positive part of the sixth. The released
            ones have nothing between.
        masked: Whether padding is kept out of everything, where the backbone can do that.
        frozen_norm: Whether batch norms of the backbone keep the statistics they came with.
        grad_checkpointing: Whether training recomputes the backbone's activations instead of keeping them.

    Examples:
        >>> DetectorSettings("cascade_mask_rcnn").aware
        False
        >>> DetectorSettings("yolo")
        Traceback (most recent call last):
        ValueError: kind: expected one of retinanet, faster_rcnn, mask_rcnn, cascade_rcnn, cascade_mask_rcnn, got 'yolo'
    """

    kind: Kind = "mask_rcnn"
    min_size: int = 800
    max_size: int = 1333
    anchor_sizes: tuple[float, ...] = (32.0, 64.0, 128.0, 256.0, 512.0)
    anchor_ratios: tuple[float, ...] = (0.5, 1.0, 2.0)
    anchor_octaves: int | None = None
    detections: int = 100
    score: float = 0.05
    nms: float = 0.5
    proposals: tuple[int, int] = (2000, 1000)
    rois: int = 512
    channels: int = 256
    norm: Norm = "layer"
    box_norm: Norm | None = None
    box_head: BoxHead = "2fc"
    class_aware: bool = False
    box_loss: BoxLoss = "smooth_l1"
    aligned: bool = True
    sampling: int = 2
    relu_between: bool = True
    masked: bool = True
    frozen_norm: bool = False
    grad_checkpointing: bool = False

    def __post_init__(self) -> None:
        for name, choices in (("kind", Kind), ("norm", Norm), ("box_head", BoxHead), ("box_loss", BoxLoss)):
            if getattr(self, name) not in get_args(choices):
                raise ValueError(f"{name}: expected one of {', '.join(get_args(choices))}, got {getattr(self, name)!r}")
        if self.box_norm is not None and self.box_norm not in get_args(Norm):
            raise ValueError(f"box_norm: expected one of {', '.join(get_args(Norm))} or None, got {self.box_norm!r}")
        if len(self.anchor_sizes) != 5 or min(self.anchor_sizes) <= 0:
            raise ValueError(f"anchor_sizes: expected five sides above 0, one for each level, got {self.anchor_sizes}")
        if not self.anchor_ratios or min(self.anchor_ratios) <= 0:
            raise ValueError(f"anchor_ratios: expected numbers above 0, got {self.anchor_ratios}")
        for name in ("detections", "rois", "channels"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected 1 or more, got {getattr(self, name)}")
        if len(self.proposals) != 2 or min(self.proposals) < 1:
            raise ValueError(f"proposals: expected two numbers of 1 or more, got {self.proposals}")
        for name in ("score", "nms"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}: expected a number from 0 to 1, got {getattr(self, name)}")
        if self.min_size and not 0 < self.min_size <= self.max_size:
            raise ValueError(
                f"min_size: expected 0, or a side of at most max_size = {self.max_size}, got {self.min_size}"
            )
        if self.norm == "group" and self.channels % 32:
            raise ValueError(f"channels: expected a multiple of 32 for norm 'group', got {self.channels}")
        if not self.cascade and (self.class_aware or self.box_loss == "giou"):
            raise ValueError(f"class_aware, box_loss: these are for cascades; leave them out for {self.kind}")

    @property
    def masks(self) -> bool:
        """Whether masks are learned."""
        return "mask" in self.kind

    @property
    def cascade(self) -> bool:
        """Whether boxes are refined in three stages."""
        return self.kind.startswith("cascade")

    @property
    def octaves(self) -> int:
        """Sizes of anchors between one level and the next."""
        return self.anchor_octaves or (3 if self.kind == "retinanet" else 1)

    @property
    def aware(self) -> bool:
        """Whether each class has boxes of its own."""
        return not self.cascade or self.class_aware
