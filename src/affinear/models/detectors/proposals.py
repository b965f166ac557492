"""Proposals: the regions of an image in which there may be something."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead, concat_box_prediction_layers
from torchvision.ops import batched_nms

from .anchors import Anchors, on_images, sizes_of
from .matching import BETWEEN, Rows, bring, clip, draw, limits, match
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
        anchors = self.anchor_generator(images, levels)[0]  # every image has the same
        counts = [level[0].numel() for level in objectness]
        objectness, deltas = concat_box_prediction_layers(objectness, deltas)
        objectness, deltas = objectness.float(), deltas.float()  # bfloat16 counts in steps of pixels
        rims = limits(images.image_sizes, anchors.device)
        inside = on_images(anchors, rims)
        boxes = self.box_coder.decode(deltas.detach(), [anchors] * len(rims)).view(len(rims), -1, 4)
        likely = objectness.detach().view(len(rims), -1).masked_fill(~inside, -torch.inf)
        found = self._filtered(boxes, likely, rims, counts)
        if not self.training:
            return found, {}
        assert targets is not None
        return found, self._losses(objectness.flatten(), deltas, anchors, inside, targets)

    def _filtered(self, boxes: Tensor, likely: Tensor, rims: Tensor, counts: list[int]) -> list[Tensor]:
        """The likeliest boxes of each image that do not repeat each other, the likeliest first.

        Args:
            boxes: (B, N, 4), level by level.
            likely: (B, N), logits.
            rims: (B, 2), of the images.
            counts: Boxes of each level.
        """
        top = self._get_top_n_idx(likely, counts)
        level = bring(torch.repeat_interleave(torch.tensor(counts)), top.device)[top]
        scores = likely.gather(1, top).sigmoid()
        boxes = clip(boxes.gather(1, top[..., None].expand(-1, -1, 4)), rims[:, None])
        good = ((boxes[..., 2:] - boxes[..., :2]) >= self.min_size).all(dim=-1) & (scores >= self.score_thresh)
        scores = scores.masked_fill(~good, -1)  # behind all others, where they are in nobody's way
        kept = [
            batched_nms(*one, self.nms_thresh)[: self.post_nms_top_n()]
            for one in zip(boxes, scores, level, strict=True)
        ]
        rows = Rows.of(kept)
        place = torch.cat(kept)
        stays = torch.where(good[rows.owner, place])[0]
        owner = rows.owner[stays]
        ends = torch.arange(1, len(kept) + 1, device=owner.device)
        upto: list[int] = torch.searchsorted(owner, ends).tolist()
        sizes = [last - first for first, last in zip([0, *upto[:-1]], upto, strict=True)]
        return list(boxes[owner, place[stays]].split(sizes))

    def _losses(
        self, objectness: Tensor, deltas: Tensor, anchors: Tensor, inside: Tensor, targets: list[dict[str, Tensor]]
    ) -> dict[str, Tensor]:
        """Of anchors that were drawn: whether they show an object, and how far it is from them."""
        found = [target["boxes"] for target in targets]
        rows = Rows.of(found)
        objects = rows.padded(torch.cat(found))
        matched = match(self.proposal_matcher, objects, rows.real(), anchors[None])
        labels = (matched >= 0).float().masked_fill(matched == BETWEEN, -1).masked_fill(~inside, -1).flatten()
        shows, others, _ = draw(self.fg_bg_sampler, labels, [len(anchors)] * len(targets))
        every = torch.cat((shows, others))
        image, place = shows // len(anchors), shows % len(anchors)
        truth = objects[image, matched[image, place]] if objects.numel() else anchors[place]
        wanted = self.box_coder.encode_single(truth, anchors[place])
        distance = F.smooth_l1_loss(deltas[shows], wanted, beta=1 / 9, reduction="sum") / max(len(every), 1)
        unsure = F.binary_cross_entropy_with_logits(objectness[every], labels[every])
        return {"loss_objectness": unsure, "loss_rpn_box_reg": distance}


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
