"""Released detectors as files that `affinear eval` and `affinear predict` take."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...models.checkpoints import Converted, Weights
from ...models.detectors import Detector, released
from ...train.task import Job
from ..sealing import converted
from .recipes import CASCADE_3X, MASK_RCNN_1X, RETINANET_1X
from .settings import Detection
from .task import TASK

COCO = 80  # classes


def convert(
    weights: Weights, model: str, classes: Path | None = None, model_args: Mapping[str, Any] | None = None
) -> Converted:
    """A released detector as one of ours, with all that a file of weights tells of itself.

    Args:
        weights: As `affinear.models.checkpoints.read` gives them.
        model: The backbone's name, such as "mavit_tiny".
        classes: A list of their names, one per line; None for COCO's, or for numbers where there are not 80.
        model_args: Arguments of the backbone, where they are not the released ones.

    Raises:
        ValueError: If a tensor does not fit, or there are more or fewer names than classes.
    """
    args = dict(model_args or {})
    network = released.read(weights.tensors, model, args)
    categories, names = _classes(network.classes, classes)
    settings = settings_of(network)
    cascade, dense = settings.head == "cascade", settings.head == "retinanet"
    recipe = TASK.recipes[CASCADE_3X if cascade else RETINANET_1X if dense else MASK_RCNN_1X].recipe
    job = Job(model, args, recipe, settings, {"class_names": names, "categories": categories})
    return converted(TASK.name, job, network, weights)


def settings_of(network: Detector) -> Detection:
    """The settings of the task that make this detector."""
    made = network.settings
    kind = made.kind
    names = ("box_norm", "box_head", "class_aware", "box_loss", "sampling", "relu_between")
    settings = Detection(
        head="retinanet" if kind == "retinanet" else "cascade" if made.cascade else "rcnn",
        masks=made.masks,
        detections=made.detections,
        head_norm=made.norm,
        mask_padding=made.masked,
        test_side=made.min_size,
        long_side=made.max_size,
        **{name: getattr(made, name) for name in names},
    )
    assert dataclasses.asdict(settings.detector()) == dataclasses.asdict(made)
    return settings


def _classes(count: int, file: Path | None) -> tuple[list[int], list[str]]:
    """Numbers and names of the classes."""
    if file is not None:
        names = [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        if len(names) != count:
            raise ValueError(f"{file}: expected {count} names, as the weights have classes, got {len(names)}")
        return list(range(1, count + 1)), names
    if count != COCO:
        return list(range(1, count + 1)), [f"class {i + 1}" for i in range(count)]
    from torchvision.models.detection import MaskRCNN_ResNet50_FPN_Weights

    listed: list[str] = MaskRCNN_ResNet50_FPN_Weights.COCO_V1.meta["categories"]
    known = {number: name for number, name in enumerate(listed) if number and name != "N/A"}
    return list(known), list(known.values())
