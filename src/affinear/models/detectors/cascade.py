"""Cascade: boxes that are refined in stages, each stricter about what it calls an object.

Paper: Cascade R-CNN: Delving into High Quality Object Detection, arXiv 1712.00726. Where the paper leaves a choice, it
is mmdetection's here: each stage assigns and samples anew, and has a mask head of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection.roi_heads import RoIHeads, maskrcnn_inference
from torchvision.ops import clip_boxes_to_image, generalized_box_iou_loss

from .heads import make_heads
from .matching import clip, limits
from .settings import DetectorSettings
from .stages import Samples, Sizes, Target, mask_logits, mask_loss, sample, tell

GIOU_WEIGHT = 10.0


@dataclass(frozen=True)
class Step:
    """One stage of the cascade.

    Attributes:
        overlap: From which intersection over union on a region shows an object.
        deviations: Of the numbers of a box.
        weight: Of its losses.
    """

    overlap: float
    deviations: tuple[float, float, float, float]
    weight: float


STEPS = (
    Step(0.5, (0.1, 0.1, 0.2, 0.2), 1.0),
    Step(0.6, (0.05, 0.05, 0.1, 0.1), 0.5),
    Step(0.7, (0.033, 0.033, 0.067, 0.067), 0.25),
)


class CascadeHeads(nn.Module):
    """Three stages on torchvision's heads.

    Args:
        settings: Of the detector.
        classes: Number of classes, background not counted.
        strides: Of the levels that are pooled from.
    """

    def __init__(self, settings: DetectorSettings, classes: int, strides: Sequence[int]) -> None:
        super().__init__()
        self.aware, self.loss = settings.aware, settings.box_loss
        self.stages = nn.ModuleList(
            make_heads(
                settings,
                classes,
                strides,
                overlap=step.overlap,
                box_weights=tuple(1 / one for one in step.deviations),  # pyright: ignore[reportArgumentType]
            )
            for step in STEPS
        )

    def forward(
        self, features: dict[str, Tensor], proposals: list[Tensor], sizes: Sizes, targets: list[Target] | None = None
    ) -> tuple[list[Target], dict[str, Tensor]]:
        """Detections of each image in evaluation, losses in training, as torchvision's heads give them."""
        if self.training:
            assert targets is not None
            return [], self.learn(features, proposals, sizes, targets)
        return self.find(features, proposals, sizes), {}

    def learn(
        self, features: dict[str, Tensor], proposals: list[Tensor], sizes: Sizes, targets: list[Target]
    ) -> dict[str, Tensor]:
        """The losses of all stages, weighted."""
        losses: dict[str, Tensor] = {}
        for number, (stage, step) in enumerate(zip(self._stages(), STEPS, strict=True)):
            samples = sample(stage, proposals, targets)
            logits, deltas = tell(stage, features, samples.by_image, sizes)
            found = {
                "loss_classifier": F.cross_entropy(logits, samples.labels),
                "loss_box_reg": self._box_loss(stage, deltas, samples),
            }
            if stage.has_mask():
                found["loss_mask"] = mask_loss(stage, features, samples, sizes, targets)
            losses.update({f"{name}_{number}": step.weight * loss for name, loss in found.items()})
            proposals = self._refined_samples(stage, logits, deltas, samples, sizes)
        return losses

    def find(self, features: dict[str, Tensor], proposals: list[Tensor], sizes: Sizes) -> list[Target]:
        """Detections: boxes of the last stage, classes and masks of all."""
        stages = self._stages()
        every: list[Tensor] = []
        deltas = proposals[0]
        for stage in stages:
            logits, deltas = tell(stage, features, proposals, sizes)
            every.append(logits)
            if stage is not stages[-1]:
                best = logits[:, 1:].argmax(dim=1) + 1
                refined = decode(stage, self._of_class(deltas, best), torch.cat(proposals))
                counts = [len(one) for one in proposals]
                proposals = [
                    clip_boxes_to_image(one, size) for one, size in zip(refined.split(counts), sizes, strict=True)
                ]
        logits = torch.stack(every).mean(dim=0)
        wide = deltas if self.aware else deltas.repeat(1, logits.shape[1])
        boxes, scores, labels = stages[-1].postprocess_detections(logits, wide, proposals, sizes)
        found = [
            {"boxes": box, "scores": score, "labels": label}
            for box, score, label in zip(boxes, scores, labels, strict=True)
        ]
        if stages[-1].has_mask():
            chances = [maskrcnn_inference(mask_logits(stage, features, boxes, sizes), labels) for stage in stages]
            for one, parts in zip(found, zip(*chances, strict=True), strict=True):
                one["masks"] = torch.stack(parts).mean(dim=0)
        return found

    def _stages(self) -> list[RoIHeads]:
        return [stage for stage in self.stages if isinstance(stage, RoIHeads)]

    def _of_class(self, deltas: Tensor, labels: Tensor) -> Tensor:
        """The box of one class of each region, (N, 4)."""
        if not self.aware:
            return deltas
        return deltas.unflatten(1, (-1, 4))[torch.arange(len(deltas), device=deltas.device), labels]

    def _box_loss(self, stage: RoIHeads, deltas: Tensor, samples: Samples) -> Tensor:
        """Over regions that show an object; divided by the number of all."""
        shows = torch.where(samples.labels > 0)[0]
        boxes, truth = samples.boxes[shows], samples.truth[shows]
        deltas = self._of_class(deltas, samples.labels)[shows]
        if self.loss == "giou":
            loss = GIOU_WEIGHT * generalized_box_iou_loss(decode(stage, deltas, boxes), truth, reduction="sum")
        else:
            wanted = stage.box_coder.encode_single(truth, boxes)
            loss = F.smooth_l1_loss(deltas, wanted, beta=1.0, reduction="sum")
        return loss / max(len(samples.labels), 1)

    def _refined_samples(
        self, stage: RoIHeads, logits: Tensor, deltas: Tensor, samples: Samples, sizes: Sizes
    ) -> list[Tensor]:
        """What the next stage starts from: the boxes of this one, without copies of the objects' own."""
        labels = torch.where(samples.labels > 0, samples.labels, logits[:, 1:].argmax(dim=1) + 1)
        refined = decode(stage, self._of_class(deltas, labels), samples.boxes).detach()
        refined = clip(refined, limits(sizes, refined.device)[samples.owner])
        kept = torch.where(~samples.copies)[0]
        ends = torch.arange(1, len(sizes) + 1, device=refined.device)
        upto: list[int] = torch.searchsorted(samples.owner[kept], ends).tolist()
        return list(refined[kept].split([last - first for first, last in zip([0, *upto[:-1]], upto, strict=True)]))


def decode(stage: RoIHeads, deltas: Tensor, boxes: Tensor) -> Tensor:
    """Boxes (N, 4) moved by their numbers (N, 4)."""
    return stage.box_coder.decode_single(deltas, boxes)
