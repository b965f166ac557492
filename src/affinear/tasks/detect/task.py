"""`--task detect`: objects, as boxes and masks."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from ...models import making
from ...models.detectors import Detector
from ...models.making import MOST_NUMBERS
from ...train.task import Answer, Job, Measure, Setup, Task, Trained
from ...train.weights import fill
from ..fewer import fewer
from ..images.backbone import backbone_weights, drop_path_of
from ..images.reading import CorruptImage, open_image
from .coco import Coco
from .drawing import drawn, jpeg
from .finding import as_tensor, at_least, found_of
from .opening import Reading, open_coco
from .precision import Found
from .recipes import MASK_RCNN_1X, RECIPES, SMALL
from .scoring import BOX_AP, MEASURES
from .settings import Detection, Drawing
from .work import DetectWork

HUNDRED = 100
MOST_CLASSES = 2**16


class Detect(Task[Coco, Detection]):
    """Objects in images, as boxes and masks: a backbone of any family under RetinaNet, R-CNN or a cascade."""

    name: ClassVar[str] = "detect"
    about: ClassVar[str] = "objects, as boxes and masks"
    unit: ClassVar[str] = "images"
    fits_few: ClassVar[bool] = True
    parts: ClassVar[str] = "classes"
    metric: ClassVar[Measure] = BOX_AP
    measures: ClassVar[tuple[Measure, ...]] = MEASURES
    settings = Detection
    options = Drawing

    @property
    def recipes(self) -> Mapping[str, Setup]:
        """The published recipes by name."""
        return MappingProxyType({name: Setup(self, *parts) for name, parts in RECIPES.items()})

    def preset(self, model: str, name: str | None) -> Setup:
        """The recipe of this name, or Mask R-CNN's, with the stochastic depth that suits the backbone."""
        return self.named(name or MASK_RCNN_1X).changed(drop_path=drop_path_of(model))

    def open(self, spec: str, settings: Detection) -> Coco:
        """Folders of images and COCO's JSON, open and looked through."""
        reading = Reading(skip_bad_boxes=settings.skip_bad_boxes, memory=settings.memory)
        return open_coco(spec, test_split=settings.test_split, reading=reading)

    def settle(self, job: Job[Detection], data: Coco) -> Job[Detection]:
        """The job with masks, the cap of detections and classes decided."""
        settings = job.settings
        if settings.masks and not data.masks:
            raise ValueError(f"masks: expected none, as {data.name} has objects without a segmentation, got true")
        masks = settings.masks
        if masks is None:
            masks = data.masks and settings.head != "retinanet"
        most = -(-data.train.most // HUNDRED) * HUNDRED
        settled = dataclasses.replace(
            settings,
            masks=masks,
            detections=settings.detections or max(HUNDRED, most),
            test_side=settings.judged_at,
        )
        facts = {"class_names": list(data.class_names), "categories": list(data.categories)}
        # Lists of images and of objects have new shapes at every step: there is nothing to compile once and for all.
        recipe = dataclasses.replace(job.recipe, compile=False)
        return dataclasses.replace(job, recipe=recipe, settings=settled, facts=facts)

    def network(self, job: Job[Detection], *, room: int = MOST_NUMBERS) -> nn.Module:
        """Backbone and detector of a settled job."""
        given = dict(job.model_args)
        if job.settings.drop_path:
            given.setdefault("drop_path_rate", job.settings.drop_path)
        making.check(job.model, given)
        settings = job.settings.detector(checkpointing=job.recipe.checkpointing)
        classes = len(job.facts["class_names"])
        with torch.device("meta"):
            outline = Detector(job.model, classes, settings, given)
        numbers = sum(tensor.numel() for tensor in (*outline.parameters(), *outline.buffers()))
        if numbers > room:
            raise ValueError(f"model_args: {job.model} would have {numbers:,} numbers, and there is room for {room:,}")
        return Detector(job.model, classes, settings, given)

    def work(self, job: Job[Detection], data: Coco, device: torch.device) -> DetectWork:
        """A settled job at work."""
        return DetectWork(job, data, device)

    def check_job(self, job: Job[Detection]) -> None:
        """Names of classes and a cap, as a file of weights must have them."""
        names = job.facts.get("class_names")
        listed: list[Any] = names if isinstance(names, list) else []
        if not 0 < len(listed) <= MOST_CLASSES or not all(isinstance(name, str) for name in listed):
            raise ValueError(f"class_names: expected names in a list, got {making.short(names)}")
        if job.settings.detections is None or job.settings.masks is None:
            raise ValueError("settings: expected detections and masks as the weights were trained with, got none")

    def check_data(self, trained: Trained[Coco, Detection], data: Coco) -> None:
        """Raise ValueError if the data has other classes than the network, or no masks where it learned some."""
        known, here = tuple(trained.job.facts["class_names"]), data.class_names
        if known != here:
            other = next((f"{a!r}, not {b!r}" for a, b in zip(known, here, strict=False) if a != b), None)
            said = f"; the first that differs is {other}" if other else ""
            raise ValueError(
                f"data: expected the {len(known)} classes the network was trained for, got {len(here)}{said}"
            )
        if trained.job.settings.masks and not data.masks:
            raise ValueError(f"data: the network finds masks, but {data.name} has objects without a segmentation")

    def summary(self, job: Job[Detection], data: Coco) -> str:
        """Images, objects, classes, and how many detections of an image count."""
        cap, most = job.settings.detections, max(data.train.most, data.test.most)
        shapes = "boxes and masks" if job.settings.masks else "boxes"
        short = f", though an image has {most} objects" if cap is not None and most > cap else ""
        objects = sum(len(one.labels) for one in data.train.objects)
        return (
            f"{len(data.train):,} training and {len(data.test):,} test images, {objects:,} {shapes} to "
            f"learn from, {len(data.class_names)} classes; at most {cap} detections an image{short}"
        )

    def start(self, network: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
        """Load weights: of a whole detector, its classifiers fresh if the classes are others; or of a backbone."""
        assert isinstance(network, Detector)
        if any(name.startswith(("dense.", "regions.")) for name in tensors):
            fill(network, tensors, source, fresh=classifiers(network))
            return
        body = network.backbone.features.body
        fill(body, backbone_weights(tensors, body.state_dict()), source)

    def bare(
        self, path: Path, model: str | None, model_args: Mapping[str, Any], changes: Mapping[str, Any]
    ) -> Trained[Coco, Detection]:
        """Weights of a detector that do not tell what they belong to cannot be read: classes have no names in them."""
        raise ValueError(
            f"{path}: the file does not tell which detector it belongs to; give the folder of a run, or what "
            "`affinear convert --task detect` wrote"
        )

    def limited(self, data: Coco, limit: int) -> Coco:
        """At most so many images of each half, evenly among all."""
        return fewer(data, limit)

    def variants(self, model: str) -> Mapping[str, Mapping[str, Any]]:
        """Every mechanism in all blocks, and none at all; of a network of others, itself."""
        if not _has_mechanisms(model):
            return {"own": {}}
        return {name: self.variant(model, name) for name in ("softmax", "linear", "inline", "nala", "mala", "none")}

    def variant(self, model: str, name: str) -> Mapping[str, Any]:
        """The backbone with this mechanism in all of its blocks; "own" for the backbone as it is."""
        if name == "own":
            return {}
        if not _has_mechanisms(model):
            raise ValueError(f"variant: expected 'own', as {model} has no mechanism to choose, got {name!r}")
        return {"mechanism": name, "stage_types": "llll"}

    def trial(self, model: str, data: Coco) -> Setup:
        """The recipe for few images."""
        return self.preset(model, SMALL)

    @torch.no_grad()
    def predict(self, trained: Trained[Coco, Detection], sources: Sequence[str], options: Any) -> Iterator[Answer]:
        """Which objects an image shows: how many of each class, the image with them drawn, and COCO's JSON."""
        assert isinstance(options, Drawing)
        network, facts = trained.network, trained.job.facts
        device, names = next(network.parameters()).device, facts["class_names"]
        for source in sources:
            try:
                image = open_image(source)
            except (CorruptImage, OSError) as error:
                yield Answer(source, error=str(error).removeprefix(f"{source}: "))
                continue
            told = network([as_tensor(np.asarray(image)).to(device)])[0]
            found = at_least(found_of(told, (image.height, image.width)), options.score)
            rows = as_coco(found, Path(source).name, facts["categories"])
            counts = Counter(names[label] for label in found.labels.tolist())
            said = ", ".join(f"{count} x {name}" for name, count in counts.most_common())
            yield Answer(
                source,
                text=said or f"nothing with a score of {options.score:.0%} or more",
                content={"size": [image.height, image.width], "objects": rows},
                files={
                    f"{Path(source).stem}_objects.jpg": jpeg(drawn(image, found, names, options.opacity)),
                    f"{Path(source).stem}_objects.json": json.dumps(rows).encode(),
                },
            )


def _has_mechanisms(model: str) -> bool:
    return {"mechanism", "stage_types"} <= making.takes(model).keys()


def as_coco(found: Found, image: str | int, categories: Sequence[int]) -> list[dict[str, Any]]:
    """What was found in an image as COCO's JSON of results has it.

    Args:
        found: With boxes as left, top, width and height.
        image: What the image is called.
        categories: What the data set calls its classes.
    """
    rows: list[dict[str, Any]] = []
    for i, label in enumerate(found.labels.tolist()):
        row: dict[str, Any] = {
            "image_id": image,
            "category_id": categories[label],
            "bbox": [round(number, 2) for number in found.boxes[i].tolist()],
            "score": round(float(found.scores[i]), 5),
        }
        if found.masks is not None:
            row["segmentation"] = found.masks[i].json()
        rows.append(row)
    return rows


def classifiers(network: Detector) -> tuple[str, ...]:
    """How the names of weights begin that have one row for each class."""
    parts = ("cls_score", "bbox_pred", "mask_fcn_logits", "classification_head.cls_logits")
    found = (name.rpartition(".")[0] for name, _ in network.named_parameters())
    return tuple(dict.fromkeys(f"{name}." for name in found if name.endswith(parts) and ".rpn." not in name))


TASK = Detect()
