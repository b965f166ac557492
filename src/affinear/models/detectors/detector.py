"""Detector: a backbone of timm that finds objects, with torchvision's detectors around it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection.image_list import ImageList

from .cascade import CascadeHeads
from .heads import make_heads
from .neck import Backbone
from .proposals import make_proposals
from .retina import Dense
from .settings import DetectorSettings

Target = dict[str, Tensor]
DIVISOR = 32  # sides of a batch are multiples of the coarsest stride


class Detector(nn.Module):
    """Finds objects in images of any sizes.

    In training, it takes images and targets and gives losses by name, to be summed. In evaluation, it takes images and
    gives for each a dict of "boxes" (N, 4) as left, top, right and bottom in the image's own pixels, "labels" (N,),
    "scores" (N,) and, where it learned masks, "masks" (N, 28, 28), the chance of each part of a box to be inside.

    Classes count from 0. Images are (3, H, W), bytes or floats from 0 to 1. Targets are dicts of "boxes" (N, 4),
    "labels" (N,) and, for masks, "masks" (N, H, W).

    Args:
        backbone: Any name that timm takes with `features_only`, such as "mavit_tiny" or "resnet50".
        classes: Number of classes.
        settings: All else.
        model_args: What the backbone is made with.

    Example:
        >>> import torch
        >>> import affinear.models
        >>> settings = DetectorSettings("cascade_mask_rcnn", channels=32, min_size=64, max_size=96, detections=5)
        >>> detector = Detector("mavit_tiny", 3, settings).eval()
        >>> found, = detector([torch.rand(3, 50, 70)])
        >>> sorted(found)
        ['boxes', 'labels', 'masks', 'scores']
    """

    def __init__(
        self,
        backbone: str,
        classes: int,
        settings: DetectorSettings | None = None,
        model_args: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if classes < 1:
            raise ValueError(f"classes: expected 1 or more, got {classes}")
        self.settings = settings or DetectorSettings()
        self.classes = classes
        made = Backbone(backbone, self.settings, model_args)
        strides = made.strides
        self.dense = self.regions = None
        self.first = int(self.settings.kind != "retinanet")  # torchvision's number of class 0; before it, background
        if not self.first:
            self.dense = Dense(made, classes, self.settings)
        else:
            cascade = self.settings.cascade
            self.regions = nn.ModuleDict(
                {
                    "backbone": made,
                    "rpn": make_proposals(self.settings, strides),
                    "roi_heads": CascadeHeads(self.settings, classes, strides[:4])
                    if cascade
                    else make_heads(self.settings, classes, strides[:4]),
                }
            )
        self.register_buffer("mean", torch.tensor(IMAGENET_DEFAULT_MEAN)[:, None, None], persistent=False)
        self.register_buffer("std", torch.tensor(IMAGENET_DEFAULT_STD)[:, None, None], persistent=False)

    @property
    def backbone(self) -> Backbone:
        """The backbone and its pyramid."""
        found: Any = self.dense.backbone if self.dense is not None else self._region("backbone")
        return found

    def forward(self, images: Sequence[Tensor], targets: Sequence[Target] | None = None) -> Any:
        """Losses by name in training, a dict of what was found for each image in evaluation."""
        if self.training and targets is None:
            raise ValueError("targets: expected what each image shows, as the network is in training; call eval() else")
        batch = self.batch(images)
        learned = self._shifted(targets) if self.training and targets is not None else None
        if self.dense is not None:
            found = self.dense(batch, learned)
        else:
            features = self._region("backbone")(batch.tensors, batch.image_sizes)
            proposals, losses = self._region("rpn")(batch, features, learned)
            found, more = self._region("roi_heads")(features, proposals, batch.image_sizes, learned)
            found = {**losses, **more} if self.training else found
        if self.training:
            return found
        every = zip(found, images, batch.image_sizes, strict=True)
        return [self._placed(one, image, size) for one, image, size in every]

    def batch(self, images: Sequence[Tensor]) -> ImageList:
        """Images as one batch: normalised, in evaluation resized, in the upper left corners of places of one size."""
        ready = [self._normal(image) for image in images]
        if not self.training:
            ready = [resized(image, self.settings.min_size, self.settings.max_size) for image in ready]
        height, width = (max(one.shape[side] for one in ready) for side in (-2, -1))
        height, width = (-(-side // DIVISOR) * DIVISOR for side in (height, width))
        room = [(0, width - one.shape[-1], 0, height - one.shape[-2]) for one in ready]
        filled = [F.pad(one, more) if any(more) else one for one, more in zip(ready, room, strict=True)]
        return ImageList(torch.stack(filled), [(one.shape[-2], one.shape[-1]) for one in ready])

    def group_matcher(self, coarse: bool = False) -> Callable[[str], int]:
        """How parameters group into layers, for layer-wise learning rates: the backbone's own, then all that is new."""
        place = next(name for name, module in self.named_modules() if module is self.backbone.features)
        return self.backbone.features.matcher(f"{place}.", coarse)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Whether training recomputes the backbone's activations instead of keeping them."""
        self.backbone.features.set_grad_checkpointing(enable)

    def _normal(self, image: Tensor) -> Tensor:
        if image.ndim != 3 or image.shape[0] != 3:
            raise ValueError(f"images: expected each as (3, height, width), got {tuple(image.shape)}")
        mean, std = self.get_buffer("mean"), self.get_buffer("std")
        image = image.to(mean.device)
        return ((image / 255 if image.dtype == torch.uint8 else image) - mean) / std

    def _shifted(self, targets: Sequence[Target]) -> list[Target]:
        """Targets as torchvision has them: for regions, class 0 is background."""
        boxes = [target["boxes"].float() for target in targets]
        right = all(one.shape[-1:] == (4,) for one in boxes)
        every = torch.cat(boxes) if right else None
        if every is None or not bool((every[:, 2:] > every[:, :2]).all()):
            raise ValueError("targets: expected boxes as left, top, right and bottom, of some area each")
        return [
            {**target, "boxes": box, "labels": target["labels"] + self.first}
            for target, box in zip(targets, boxes, strict=True)
        ]

    def _placed(self, found: Target, image: Tensor, size: tuple[int, int]) -> Target:
        """What was found in the resized image, in the pixels of the image itself."""
        scale = found["boxes"].new_tensor((image.shape[-1] / size[1], image.shape[-2] / size[0])).repeat(2)
        placed = {**found, "boxes": found["boxes"] * scale, "labels": found["labels"] - self.first}
        if "masks" in placed:
            placed["masks"] = placed["masks"][:, 0]
        return placed

    def _region(self, name: str) -> Any:
        assert self.regions is not None
        return self.regions[name]


def resized(image: Tensor, shorter: int, longer: int) -> Tensor:
    """An image (3, H, W) whose shorter side is as wanted, unless the longer one would be too long then.

    Args:
        image: Floats.
        shorter: Wanted shorter side; 0 leaves the image as it is.
        longer: Longer side at most.
    """
    height, width = image.shape[-2:]
    size = fitting((height, width), shorter, longer)
    if size == (height, width):
        return image
    return F.interpolate(image[None], size=size, mode="bilinear", align_corners=False, antialias=True)[0]


def fitting(size: tuple[int, int], shorter: int, longer: int) -> tuple[int, int]:
    """Height and width of an image whose shorter side is as wanted, unless the longer one would be too long then.

    Examples:
        >>> fitting((480, 640), 800, 1333), fitting((100, 400), 800, 1333)
        ((800, 1067), (333, 1333))
    """
    if not shorter:
        return size
    scale = min(shorter / min(size), longer / max(size))
    return math.floor(size[0] * scale + 0.5), math.floor(size[1] * scale + 0.5)
