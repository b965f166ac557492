"""A stage of a detector: from regions to classes, boxes and masks, and what it learns from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.models.detection.roi_heads import RoIHeads, fastrcnn_loss
from torchvision.ops import roi_align

from .matching import BACKGROUND, Rows, bring, draw, match

Target = dict[str, Tensor]
Sizes = list[tuple[int, int]]
AT_ONCE = 2**26  # pixels of objects' masks that are cut out at once


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


@dataclass(frozen=True)
class Samples:
    """The regions of all images that a stage learns from, end to end.

    Attributes:
        boxes: (N, 4).
        truth: (N, 4), the box of the object that each is nearest to; anything where its image shows none.
        objects: (N,), the number of that object among all images' objects.
        labels: (N,), its class; 0 for background.
        copies: (N,), whether a region is an object's own box and no proposal.
        owner: (N,), its image.
        counts: Regions of each image.
        firsts: Number of the first object of each image.
    """

    boxes: Tensor
    truth: Tensor
    objects: Tensor
    labels: Tensor
    copies: Tensor
    owner: Tensor
    counts: list[int]
    firsts: list[int]

    def __iter__(self) -> Iterator[Sample]:
        names = (self.boxes, self.objects, self.labels, self.copies)
        for first, (box, number, label, copy) in zip(
            self.firsts, zip(*(one.split(self.counts) for one in names), strict=True), strict=True
        ):
            yield Sample(box, number - first, label, copy)

    @property
    def by_image(self) -> list[Tensor]:
        """The boxes of each image."""
        return list(self.boxes.split(self.counts))


def sample(stage: RoIHeads, proposals: list[Tensor], targets: Sequence[Target]) -> Samples:
    """The regions that a stage learns from: proposals and the objects' own boxes, a quarter of them objects at most."""
    found = [target["boxes"].to(proposals[0]) for target in targets]
    objects, own, given = torch.cat(found), Rows.of(found), Rows.of(proposals)
    every = [part for pair in zip(proposals, found, strict=True) for part in pair]
    boxes = torch.cat(every)
    rows = Rows([a + b for a, b in zip(given.counts, own.counts, strict=True)], boxes.device)
    matched = match(stage.proposal_matcher, own.padded(objects), own.real(), rows.padded(boxes))[rows.owner, rows.place]
    starts = bring(torch.from_numpy(own.starts), boxes.device)
    number = (starts[rows.owner] + matched.clamp(min=0)).clamp(max=max(len(objects) - 1, 0))
    if not len(objects):
        objects, labels = boxes.new_zeros(1, 4), torch.zeros_like(number)
    else:
        labels = torch.cat([target["labels"] for target in targets])[number]
    labels = labels.masked_fill(matched == BACKGROUND, 0).masked_fill(matched < BACKGROUND, -1)
    shows, others, counts = draw(stage.fg_bg_sampler, labels, rows.counts)
    taken = torch.cat((shows, others)).sort().values
    before = bring(torch.tensor(given.counts), boxes.device)
    owner, number = rows.owner[taken], number[taken]
    return Samples(
        boxes[taken],
        objects[number],
        number,
        labels[taken],
        rows.place[taken] >= before[owner],
        owner,
        counts,
        own.starts.tolist(),
    )


def tell(stage: RoIHeads, features: dict[str, Tensor], boxes: list[Tensor], sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Logits of classes and numbers of boxes of all regions, in float32."""
    logits, deltas = stage.box_predictor(stage.box_head(stage.box_roi_pool(features, boxes, sizes)))
    return logits.float(), deltas.float()


def mask_logits(stage: RoIHeads, features: dict[str, Tensor], boxes: list[Tensor], sizes: Sizes) -> Tensor:
    """Masks of all regions and classes, (N, classes + 1, 28, 28), in float32."""
    assert stage.mask_roi_pool is not None
    assert stage.mask_head is not None
    assert stage.mask_predictor is not None
    return stage.mask_predictor(stage.mask_head(stage.mask_roi_pool(features, boxes, sizes))).float()


def mask_loss(
    stage: RoIHeads, features: dict[str, Tensor], samples: Samples, sizes: Sizes, targets: Sequence[Target]
) -> Tensor:
    """How far the masks of regions that show an object are from the object's, inside of the regions."""
    shows = torch.where(samples.labels > 0)[0]
    boxes, labels, owner = samples.boxes[shows], samples.labels[shows], samples.owner[shows]
    ends = torch.arange(1, len(samples.counts) + 1, device=owner.device)
    upto: list[int] = torch.searchsorted(owner, ends).tolist()
    counts = [last - first for first, last in zip([0, *upto[:-1]], upto, strict=True)]
    logits = mask_logits(stage, features, list(boxes.split(counts)), sizes)
    if not len(shows):
        return logits.sum() * 0
    wanted = cut_out([target["masks"] for target in targets], boxes, samples.objects[shows], counts, logits.shape[-1])
    chosen = logits[torch.arange(len(labels), device=labels.device), labels]
    return F.binary_cross_entropy_with_logits(chosen, wanted)


def cut_out(masks: Sequence[Tensor], boxes: Tensor, objects: Tensor, counts: Sequence[int], side: int) -> Tensor:
    """What regions (N, 4) show of the masks of their objects, (N, side, side), in float32.

    Args:
        masks: Of each image, (objects, height, width).
        boxes: Of the regions, image by image.
        objects: (N,), which mask a region has among all.
        counts: Regions of each image.
        side: Of what comes out.
    """
    alike = len({mask.shape[1:] for mask in masks}) == 1
    if alike and sum(mask.numel() for mask in masks) <= AT_ONCE:
        groups = [(torch.cat(list(masks)), boxes, objects)]
    else:
        firsts, first = list[int](), 0
        for mask in masks:
            firsts.append(first)
            first += len(mask)
        parts = zip(masks, boxes.split(list(counts)), objects.split(list(counts)), firsts, strict=True)
        groups = [(mask, box, number - first) for mask, box, number, first in parts]
    cut = [
        roi_align(mask[:, None].to(box), torch.cat((number[:, None].to(box), box), dim=1), (side, side), 1.0)[:, 0]
        for mask, box, number in groups
    ]
    return torch.cat(cut)


class Heads(RoIHeads):
    """torchvision's heads, which learn from all images of a batch at once."""

    def forward(
        self,
        features: dict[str, Tensor],
        proposals: list[Tensor],
        image_shapes: Sizes,
        targets: list[Target] | None = None,
    ) -> tuple[list[Target], dict[str, Tensor]]:
        """Detections of each image in evaluation, losses in training."""
        if not self.training:
            return super().forward(features, proposals, image_shapes, targets)
        assert targets is not None
        samples = sample(self, proposals, targets)
        logits, deltas = tell(self, features, samples.by_image, image_shapes)
        wanted = self.box_coder.encode_single(samples.truth, samples.boxes)
        classes, boxes = fastrcnn_loss(logits, deltas, [samples.labels], [wanted])
        losses = {"loss_classifier": classes, "loss_box_reg": boxes}
        if self.has_mask():
            losses["loss_mask"] = mask_loss(self, features, samples, image_shapes, targets)
        return [], losses
