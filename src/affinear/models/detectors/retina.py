"""RetinaNet's heads and losses: every place of every level says what it sees, without proposals."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.retinanet import RetinaNet, RetinaNetHead
from torchvision.ops import box_iou

from .anchors import Anchors, on_image, sizes_of
from .neck import MAKERS, Backbone, keep
from .settings import DetectorSettings

BETWEEN = -2  # torchvision's mark of an anchor that is neither object nor background


class Dense(RetinaNet):
    """torchvision's RetinaNet on a batch that is made already; padding is neither looked at nor learned from.

    Args:
        backbone: With a pyramid from stride 8 on.
        classes: Number of classes.
        settings: Of the detector.
    """

    def __init__(self, backbone: Backbone, classes: int, settings: DetectorSettings) -> None:
        anchors = Anchors(sizes_of(settings.anchor_sizes, settings.octaves), settings.anchor_ratios, backbone.strides)
        count = anchors.num_anchors_per_location()[0]
        super().__init__(
            backbone,
            classes,
            anchor_generator=anchors,
            head=RetinaNetHead(settings.channels, count, classes, norm_layer=MAKERS[settings.norm]),
            score_thresh=settings.score,
            nms_thresh=settings.nms,
            detections_per_img=settings.detections,
        )

    def forward(self, images: ImageList, targets: list[dict[str, Tensor]] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Losses in training, detections of each image in evaluation."""
        backbone = self.backbone
        assert isinstance(backbone, Backbone)
        levels = list(backbone(images.tensors, images.image_sizes).values())
        masks = backbone.masks(images.tensors, images.image_sizes)
        pairs = list(zip(levels, masks, strict=True))
        logits = [self._tower("classification_head", "cls_logits", level, mask) for level, mask in pairs]
        deltas = [self._tower("regression_head", "bbox_reg", level, mask) for level, mask in pairs]
        anchors = self.anchor_generator(images, levels)
        if self.training:
            assert targets is not None
            outputs = {"cls_logits": torch.cat(logits, dim=1), "bbox_regression": torch.cat(deltas, dim=1)}
            losses = self.head.compute_loss(targets, outputs, anchors, self._matched(images, anchors, targets))
            return {f"loss_{name}": loss for name, loss in losses.items()}
        return self._found(images, logits, deltas, anchors)

    def _tower(self, name: str, last: str, level: Tensor, mask: Tensor | None) -> Tensor:
        """What a head says of a level, (B, places * anchors, numbers), in float32."""
        head: Any = getattr(self.head, name)
        for layer in head.conv:
            level = keep(layer(level), mask)
        out: Tensor = getattr(head, last)(level).float()
        count = self.anchor_generator.num_anchors_per_location()[0]
        return out.unflatten(1, (count, -1)).permute(0, 3, 4, 1, 2).flatten(1, 3)

    def _matched(self, images: ImageList, anchors: list[Tensor], targets: list[dict[str, Tensor]]) -> list[Tensor]:
        """The object of each anchor; -1 for background, `BETWEEN` for what is not learned from."""
        found: list[Tensor] = []
        for one, size, target in zip(anchors, images.image_sizes, targets, strict=True):
            if len(target["boxes"]):
                matched = self.proposal_matcher(box_iou(target["boxes"], one))
            else:
                matched = torch.full((len(one),), -1, device=one.device)
            found.append(matched.masked_fill(~on_image(one, size), BETWEEN))
        return found

    def _found(
        self, images: ImageList, logits: list[Tensor], deltas: list[Tensor], anchors: list[Tensor]
    ) -> list[dict[str, Tensor]]:
        inside = torch.stack([on_image(one, size) for one, size in zip(anchors, images.image_sizes, strict=True)])
        counts = [one.shape[1] for one in logits]
        logits = [
            one.masked_fill(~here[..., None], -torch.inf)
            for one, here in zip(logits, inside.split(counts, dim=1), strict=True)
        ]
        outputs = {"cls_logits": logits, "bbox_regression": deltas}
        return self.postprocess_detections(outputs, [list(one.split(counts)) for one in anchors], images.image_sizes)
