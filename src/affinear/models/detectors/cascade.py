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
from torchvision.models.detection.roi_heads import RoIHeads, maskrcnn_inference, maskrcnn_loss
from torchvision.ops import clip_boxes_to_image, generalized_box_iou_loss

from .heads import make_heads
from .settings import DetectorSettings

Target = dict[str, Tensor]
Sizes = list[tuple[int, int]]
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


@dataclass(frozen=True)
class Sample:
    """The regions of one image that a stage learns from.

    Attributes:
        boxes: (N, 4).
        matched: (N,), the object that each is nearest to.
        labels: (N,), its class; 0 for background.
        copies: (N,), whether a region is an object's own box and no proposal.
    """

    boxes: Tensor
    matched: Tensor
    labels: Tensor
    copies: Tensor


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
            boxes = [one.boxes for one in samples]
            logits, deltas = tell(stage, features, boxes, sizes)
            labels = torch.cat([one.labels for one in samples])
            found = {
                "loss_classifier": F.cross_entropy(logits, labels),
                "loss_box_reg": self._box_loss(stage, deltas, samples, targets),
            }
            if stage.has_mask():
                found["loss_mask"] = _mask_loss(stage, features, samples, sizes, targets)
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
                proposals = _clipped(refined.split(counts), sizes)
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

    def _box_loss(self, stage: RoIHeads, deltas: Tensor, samples: list[Sample], targets: list[Target]) -> Tensor:
        """Over regions that show an object; divided by the number of all."""
        labels = torch.cat([one.labels for one in samples])
        boxes = torch.cat([one.boxes for one in samples])
        truth = torch.cat([objects_of(one, target) for one, target in zip(samples, targets, strict=True)])
        shows = torch.where(labels > 0)[0]
        deltas, boxes, truth = self._of_class(deltas, labels)[shows], boxes[shows], truth[shows]
        if self.loss == "giou":
            loss = GIOU_WEIGHT * generalized_box_iou_loss(decode(stage, deltas, boxes), truth, reduction="sum")
        else:
            wanted = stage.box_coder.encode_single(truth, boxes)
            loss = F.smooth_l1_loss(deltas, wanted, beta=1.0, reduction="sum")
        return loss / max(len(labels), 1)

    def _refined_samples(
        self, stage: RoIHeads, logits: Tensor, deltas: Tensor, samples: list[Sample], sizes: Sizes
    ) -> list[Tensor]:
        """What the next stage starts from: the boxes of this one, without copies of the objects' own."""
        labels = torch.cat([one.labels for one in samples])
        labels = torch.where(labels > 0, labels, logits[:, 1:].argmax(dim=1) + 1)
        boxes = torch.cat([one.boxes for one in samples])
        refined = decode(stage, self._of_class(deltas, labels), boxes).detach()
        parts = refined.split([len(one.boxes) for one in samples])
        kept = [part[~one.copies] for part, one in zip(parts, samples, strict=True)]
        return _clipped(kept, sizes)


def sample(stage: RoIHeads, proposals: list[Tensor], targets: list[Target]) -> list[Sample]:
    """The regions that a stage learns from: proposals and the objects' own boxes, a quarter of them objects at most."""
    truth = [target["boxes"].to(proposals[0]) for target in targets]
    every = stage.add_gt_proposals(proposals, truth)
    matched, labels = stage.assign_targets_to_proposals(every, truth, [target["labels"] for target in targets])
    taken = stage.subsample(labels)
    return [
        Sample(every[i][one], matched[i][one], labels[i][one], one >= len(proposals[i])) for i, one in enumerate(taken)
    ]


def tell(stage: RoIHeads, features: dict[str, Tensor], boxes: list[Tensor], sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Logits of classes and numbers of boxes of all regions, in float32."""
    logits, deltas = stage.box_predictor(stage.box_head(stage.box_roi_pool(features, boxes, sizes)))
    return logits.float(), deltas.float()


def decode(stage: RoIHeads, deltas: Tensor, boxes: Tensor) -> Tensor:
    """Boxes (N, 4) moved by their numbers (N, 4)."""
    return stage.box_coder.decode_single(deltas, boxes)


def objects_of(sample: Sample, target: Target) -> Tensor:
    """The object's box of each region, (N, 4); anything where an image has no object."""
    if not len(target["boxes"]):
        return torch.zeros_like(sample.boxes)
    return target["boxes"].to(sample.boxes)[sample.matched]


def mask_logits(stage: RoIHeads, features: dict[str, Tensor], boxes: list[Tensor], sizes: Sizes) -> Tensor:
    """Masks of all regions and classes, (N, classes + 1, 28, 28), in float32."""
    assert stage.mask_roi_pool is not None
    assert stage.mask_head is not None
    assert stage.mask_predictor is not None
    return stage.mask_predictor(stage.mask_head(stage.mask_roi_pool(features, boxes, sizes))).float()


def _mask_loss(
    stage: RoIHeads, features: dict[str, Tensor], samples: list[Sample], sizes: Sizes, targets: list[Target]
) -> Tensor:
    shows = [torch.where(one.labels > 0)[0] for one in samples]
    boxes = [one.boxes[here] for one, here in zip(samples, shows, strict=True)]
    matched = [one.matched[here] for one, here in zip(samples, shows, strict=True)]
    logits = mask_logits(stage, features, boxes, sizes)
    return maskrcnn_loss(logits, boxes, [t["masks"] for t in targets], [t["labels"] for t in targets], matched)


def _clipped(boxes: Sequence[Tensor], sizes: Sizes) -> list[Tensor]:
    return [clip_boxes_to_image(one, size) for one, size in zip(boxes, sizes, strict=True)]
