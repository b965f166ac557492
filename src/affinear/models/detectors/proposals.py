"""Proposals: the regions of an image in which there may be something."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead, concat_box_prediction_layers

from .anchors import Anchors, on_image, sizes_of
from .settings import DetectorSettings

NEVER = 1e-12  # less likely than any real region, more than an anchor on padding


class Proposals(RegionProposalNetwork):
    """torchvision's region proposal network; anchors on padding neither propose nor learn."""

    def forward(
        self, images: ImageList, features: dict[str, Tensor], targets: list[dict[str, Tensor]] | None = None
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Boxes of each image, and in training the losses."""
        levels = list(features.values())
        objectness, deltas = self.head(levels)
        anchors = self.anchor_generator(images, levels)
        counts = [level[0].numel() for level in objectness]
        objectness, deltas = concat_box_prediction_layers(objectness, deltas)
        objectness, deltas = objectness.float(), deltas.float()  # bfloat16 counts in steps of pixels
        inside = [on_image(one, size) for one, size in zip(anchors, images.image_sizes, strict=True)]
        boxes = self.box_coder.decode(deltas.detach(), anchors).view(len(anchors), -1, 4)
        likely = objectness.detach().view(len(anchors), -1).masked_fill(~torch.stack(inside), -torch.inf)
        found, _ = self.filter_proposals(boxes, likely, images.image_sizes, counts)
        if not self.training:
            return found, {}
        assert targets is not None
        labels, matched = self.assign_targets_to_anchors(anchors, targets)
        labels = [one.masked_fill(~here, -1) for one, here in zip(labels, inside, strict=True)]
        loss, box_loss = self.compute_loss(objectness, deltas, labels, self.box_coder.encode(matched, anchors))
        return found, {"loss_objectness": loss, "loss_rpn_box_reg": box_loss}


def make_proposals(settings: DetectorSettings, strides: tuple[int, ...]) -> Proposals:
    """The proposal network of a detector."""
    anchors = Anchors(sizes_of(settings.anchor_sizes, settings.octaves), settings.anchor_ratios, strides)
    train, test = settings.proposals
    options: dict[str, Any] = {
        "fg_iou_thresh": 0.7,
        "bg_iou_thresh": 0.3,
        "batch_size_per_image": 256,
        "positive_fraction": 0.5,
        "pre_nms_top_n": {"training": train, "testing": test},
        "post_nms_top_n": {"training": train, "testing": test},
        "nms_thresh": 0.7,
        "score_thresh": NEVER,
    }
    head = RPNHead(settings.channels, anchors.num_anchors_per_location()[0])
    return Proposals(anchors, head, **options)
