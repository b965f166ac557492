"""Heads: what a detector says about a region, in torchvision's modules."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor

from .neck import MAKERS
from .pooling import RegionPool
from .settings import DetectorSettings
from .stages import Heads

WIDTH = 1024  # of the last layer before classes and boxes
BOX_SIDE, MASK_SIDE = 7, 14  # of the pooled maps
BOX_WEIGHTS = (10.0, 10.0, 5.0, 5.0)  # one over the usual deviations of a box's numbers


def make_heads(
    settings: DetectorSettings,
    classes: int,
    strides: Sequence[int],
    *,
    overlap: float = 0.5,
    box_weights: tuple[float, float, float, float] = BOX_WEIGHTS,
) -> Heads:
    """One stage that tells class, box and mask of regions.

    Args:
        settings: Of the detector.
        classes: Number of classes, background not counted.
        strides: Of the levels that are pooled from.
        overlap: From which intersection over union on a region shows an object.
        box_weights: One over the deviations of a box's numbers.
    """

    def pool(side: int) -> RegionPool:
        return RegionPool(side, strides, settings.sampling, settings.aligned)

    heads = Heads(
        box_roi_pool=pool(BOX_SIDE),
        box_head=_box_head(settings),
        box_predictor=_predictor(settings, classes),
        fg_iou_thresh=overlap,
        bg_iou_thresh=overlap,
        batch_size_per_image=settings.rois,
        positive_fraction=0.25,
        bbox_reg_weights=box_weights,
        score_thresh=settings.score,
        nms_thresh=settings.nms,
        detections_per_img=settings.detections,
    )
    if settings.masks:
        heads.mask_roi_pool = pool(MASK_SIDE)
        heads.mask_head = MaskRCNNHeads(settings.channels, (256,) * 4, 1, norm_layer=MAKERS[settings.norm])
        heads.mask_predictor = MaskRCNNPredictor(256, 256, classes + 1)
    return heads


def _box_head(settings: DetectorSettings) -> nn.Module:
    if settings.box_head == "2fc":
        return TwoMLPHead(settings.channels * BOX_SIDE**2, WIDTH)
    shape = (settings.channels, BOX_SIDE, BOX_SIDE)
    return FastRCNNConvFCHead(shape, [256] * 4, [WIDTH], norm_layer=MAKERS[settings.box_norm or settings.norm])


def _predictor(settings: DetectorSettings, classes: int) -> FastRCNNPredictor:
    predictor = FastRCNNPredictor(WIDTH, classes + 1)
    if not settings.aware:
        predictor.bbox_pred = nn.Linear(WIDTH, 4)
    return predictor
