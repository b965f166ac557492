"""`--task segment`: a class for every pixel."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, cast

import numpy as np
import timm
import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor, nn

from ...models import making
from ...models.heads import Segmenter
from ...train.task import Answer, Job, Measure, Setup, Task, Trained
from ...train.weights import fill
from ..fewer import fewer
from ..images.backbone import backbone_weights, drop_path_of
from ..images.reading import CorruptImage, open_image
from .drawing import map_file, overlay, photo_file
from .looking import labels_of
from .opening import MOST_CLASSES, UNKNOWN, open_scenes
from .pairs import Numbers, Scenes
from .recipes import RECIPES, SEMANTIC_FPN_80K, SMALL
from .samples import as_bytes
from .settings import Drawing, Segmentation
from .work import Normalize, SegmentWork, look_of

LARGEST_CROP, STRIDE = 512, 32
LARGEST, MOST_AT_ONCE = 2**13, 2**16  # that a file of weights may ask for
NAMED = 5  # classes that an answer names


class Segment(Task[Scenes, Segmentation]):
    """A class for every pixel: a backbone of any family under SemanticFPN or UperNet."""

    name: ClassVar[str] = "segment"
    about: ClassVar[str] = "a class for every pixel"
    samples: ClassVar[str] = "photos"
    fits_few: ClassVar[bool] = True
    parts: ClassVar[str] = "classes"
    metric: ClassVar[Measure] = Measure("miou", "mIoU")
    measures: ClassVar[tuple[Measure, ...]] = (metric, Measure("macc", "mAcc"), Measure("aacc", "aAcc"))
    settings = Segmentation
    options = Drawing

    @property
    def recipes(self) -> Mapping[str, Setup]:
        """The published recipes by name."""
        return MappingProxyType({name: Setup(self, *parts) for name, parts in RECIPES.items()})

    def preset(self, model: str, name: str | None) -> Setup:
        """The recipe of this name, or SemanticFPN's; published ones with the backbone's stochastic depth."""
        setup = self.named(name or SEMANTIC_FPN_80K)
        return setup if name == SMALL else setup.changed(drop_path=drop_path_of(model))

    def open(self, spec: str, settings: Segmentation) -> Scenes:
        """Folders of photos and maps, open and looked through."""
        return open_scenes(
            spec, zero_is_class=settings.zero_is_class, test_split=settings.test_split, memory=settings.memory
        )

    def settle(self, job: Job[Segmentation], data: Scenes) -> Job[Segmentation]:
        """The job with crop, windows, colours and classes decided."""
        crop = job.settings.crop or _crop(data, job.settings)
        settings = dataclasses.replace(job.settings, crop=crop)
        return settled(dataclasses.replace(job, settings=settings, facts={"classes": list(data.classes)}))

    def network(self, job: Job[Segmentation], *, room: int = making.MOST_NUMBERS) -> nn.Module:
        """Backbone and head of a settled job."""
        if room < making.MOST_NUMBERS:  # as a file of weights asks for it: first without memory
            with torch.device("meta"):
                outline = _segmenter(job)
            numbers = sum(tensor.numel() for tensor in (*outline.parameters(), *outline.buffers()))
            if numbers > room:
                raise ValueError(
                    f"model_args: {job.model} would have {numbers:,} numbers, and there is room for {room:,}"
                )
        network = _segmenter(job)
        if job.recipe.checkpointing:
            network.set_grad_checkpointing()
        return network

    def work(self, job: Job[Segmentation], data: Scenes, device: torch.device) -> SegmentWork:
        """A settled job at work."""
        return SegmentWork(job, data, device)

    def check_parts(self, job: Job[Segmentation], part: int) -> None:
        """Raise ValueError if a process gets one crop at a time and UperNet cannot learn from it."""
        if part == 1 and job.settings.head == "upernet" and not job.recipe.sync_bn:
            raise ValueError(
                "batch_size: expected two crops or more for each process and part of a step, since UperNet's batch "
                "norms cannot learn from one, got 1; take fewer processes or parts, or set sync_bn"
            )

    def check_job(self, job: Job[Segmentation]) -> None:
        """Raise ValueError if a job that was read from a file lacks a fact, or asks for what no user would."""
        classes: Any = job.facts.get("classes")
        listed = cast("list[Any]", classes) if isinstance(classes, list) else []
        if not 0 < len(listed) <= MOST_CLASSES or not all(isinstance(name, str) for name in listed):
            raise ValueError(f"classes: expected names in a list, got {making.short(classes)}")
        settings = job.settings
        for name in ("crop", "window", "window_stride", "mean", "std"):
            if getattr(settings, name) is None:
                raise ValueError(f"settings: {name}: expected what the weights were trained with, got none")
        sides = (*(settings.crop or ()), *(settings.window or ()), settings.short_side or 0, settings.long_side or 0)
        if max(sides) > LARGEST or job.recipe.batch_size > MOST_AT_ONCE or settings.test_batch > MOST_AT_ONCE:
            raise ValueError(
                f"settings: expected sides of at most {LARGEST} and batches of at most {MOST_AT_ONCE}, got sides of "
                f"{max(sides)} and batches of {max(job.recipe.batch_size, settings.test_batch)}"
            )

    def summary(self, job: Job[Segmentation], data: Scenes) -> str:
        """Photos, classes and the size of crops."""
        assert job.settings.crop is not None
        height, width = job.settings.crop
        return f"{super().summary(job, data)}, {len(data.classes)} classes, learnt from crops of {height} x {width}"

    def check_data(self, trained: Trained[Scenes, Segmentation], data: Scenes) -> None:
        """Raise ValueError if the data has other classes than the network."""
        known = tuple(trained.job.facts["classes"])
        if known != data.classes:
            other = next((f"{a!r}, not {b!r}" for a, b in zip(known, data.classes, strict=False) if a != b), None)
            said = f"; the first that differs is {other}" if other else ""
            raise ValueError(
                f"data: expected the {len(known)} classes the network was trained for, got {len(data.classes)}{said}"
            )

    def start(self, network: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
        """Load weights: of a whole segmenter, its classifiers fresh if the classes are others; or of a backbone."""
        assert isinstance(network, Segmenter)
        if any(name.startswith("backbone.") for name in tensors):
            fill(network, tensors, source, fresh=("head.classifier.", "helper.classifier."))
            return
        body = network.backbone.body
        fill(body, backbone_weights(tensors, body.state_dict()), source)

    def bare(
        self, path: Path, model: str | None, model_args: Mapping[str, Any], changes: Mapping[str, Any]
    ) -> Trained[Scenes, Segmentation]:
        """Weights of a segmenter that do not tell what they belong to cannot be read: classes have no names in them."""
        raise ValueError(
            f"{path}: the file does not tell which segmenter it belongs to; give the folder of a run, or what "
            "`affinear convert --task segment` wrote"
        )

    def limited(self, data: Scenes, limit: int) -> Scenes:
        """At most so many photos of each half, evenly among all."""
        return fewer(data, limit)

    def variants(self, model: str) -> Mapping[str, Mapping[str, Any]]:
        """Every mechanism in all blocks, and none at all; of a network of others, itself."""
        if "mechanism" not in making.takes(model):
            return {"own": {}}
        return {name: _in_every_block(name) for name in ("softmax", "linear", "inline", "nala", "mala", "none")}

    def variant(self, model: str, name: str) -> Mapping[str, Any]:
        """The backbone with this mechanism in all of its blocks; "own" for the backbone as it is."""
        if name == "own":
            return {}
        if not {"mechanism", "stage_types"} <= making.takes(model).keys():
            raise ValueError(f"variant: expected 'own', as {model} has no mechanism to choose, got {name!r}")
        return _in_every_block(name)

    def variant_about(self, name: str) -> str:
        """What a variant is, in a few words."""
        told = {"own": "the network as it is", "none": "no attention: the convolutions and the gate alone"}
        return told.get(name, f"{name} in every block")

    def trial(self, model: str, data: Scenes) -> Setup:
        """The recipe for few photos."""
        return self.preset(model, SMALL)

    @torch.no_grad()
    def predict(self, trained: Trained[Scenes, Segmentation], sources: Sequence[str], options: Any) -> Iterator[Answer]:
        """Which classes a photo shows, their map, and the photo under their colours."""
        assert isinstance(options, Drawing)
        job, network = trained.job, trained.network
        device = next(network.parameters()).device
        normalize, look = Normalize(job.settings, device), look_of(job.settings)
        classes: list[str] = job.facts["classes"]
        for source in sources:
            try:
                photo = open_image(source)
            except (CorruptImage, OSError) as error:
                yield Answer(source, error=str(error))
                continue
            image = normalize(as_bytes(photo, job.settings.short_side, job.settings.long_side).to(device))[None]
            labels = labels_of(network, image, look, (photo.height, photo.width))[0].short().cpu().numpy()
            counts = np.bincount(labels.ravel(), minlength=len(classes))
            shares = {classes[i]: counts[i] / labels.size for i in np.argsort(-counts) if counts[i]}
            stem = Path(source).stem
            numbers = Numbers(len(classes), job.settings.zero_is_class)
            yield Answer(
                source,
                text=", ".join(f"{name} {share:.1%}" for name, share in list(shares.items())[:NAMED]),
                content={"size": [photo.height, photo.width], "shares": {k: float(v) for k, v in shares.items()}},
                files={
                    f"{stem}_classes.png": map_file(labels, numbers),
                    f"{stem}_overlay.jpg": photo_file(overlay(photo, labels, len(classes), options.opacity)),
                },
            )


def settled(job: Job[Segmentation]) -> Job[Segmentation]:
    """The job with windows and colours decided, which crop and network tell."""
    settings, (mean, std) = job.settings, _colours(job.model)
    window = settings.window or settings.crop
    assert window is not None
    stride = settings.window_stride or (-(-2 * window[0] // 3), -(-2 * window[1] // 3))
    changes = {"window": window, "window_stride": stride, "mean": settings.mean or mean, "std": settings.std or std}
    return dataclasses.replace(job, settings=settings.changed(**changes))


def _in_every_block(mechanism: str) -> dict[str, Any]:
    return {"mechanism": mechanism, "stage_types": "llll"}


def _segmenter(job: Job[Segmentation]) -> Segmenter:
    """The network of a settled job; `Features` checks its arguments, which anybody may have given."""
    settings, given = job.settings, dict(job.model_args)
    if settings.drop_path:
        given.setdefault("drop_path_rate", settings.drop_path)
    return Segmenter(
        job.model,
        settings.head,
        num_classes=len(job.facts["classes"]),
        masked=settings.mask_padding,
        norms=settings.map_norms,
        model_args=given,
    )


def _colours(model: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and spread of colours that the backbone is used to."""
    known = timm.get_pretrained_cfg(model) if timm.is_model(model) else None
    if known is None or len(known.mean) != 3:
        return IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
    return tuple(known.mean), tuple(known.std)


def _crop(data: Scenes, settings: Segmentation) -> tuple[int, int]:
    """The largest crop that every photo can fill, in multiples of 32, at most 512 on a side."""
    sizes = [size for size in data.train.sizes if size != UNKNOWN]
    if settings.short_side is not None or not sizes:
        side = min(LARGEST_CROP, settings.short_side or LARGEST_CROP)
        return side, side
    smallest = min(min(size) for size in sizes)
    side = max(STRIDE, min(LARGEST_CROP, smallest // STRIDE * STRIDE))
    return side, side


TASK = Segment()
