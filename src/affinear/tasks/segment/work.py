"""Segmentation at work on one job: loaders, loss, score and report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from ...models.heads.parts import enlarge
from ...train.loading import in_order, shuffled_by
from ...train.page import Section
from ...train.task import Job, Score, Work
from .balance import class_counts, class_weights
from .looking import Look, labels_of
from .metric import confusion, score_of, showing
from .opening import UNKNOWN, unreadable
from .pairs import UNLABELLED, Scenes
from .report import sections
from .samples import Crops, Photos, TestSamples, TrainSamples, as_it_is
from .settings import Segmentation
from .variation import Variation


class SegmentWork(Work[Scenes, Segmentation]):
    """Crops to learn from, and whole photos to be judged by.

    Args:
        job: With nothing left open.
        data: Open.
        device: Where batches will be.
    """

    def __init__(self, job: Job[Segmentation], data: Scenes, device: torch.device) -> None:
        super().__init__(job, data, device)
        self.variation, self.look = variation_of(job.settings), look_of(job.settings)
        self.normalize = Normalize(job.settings, device)
        # Whether a crop can hold anything but photo; where none can, nobody has to be told of padding.
        self.pads = any(self.variation.pads(size) for size in data.train.sizes if size != UNKNOWN)

    def train_loader(self) -> DataLoader[Any]:
        """Batches of crops, each of all processes together."""
        recipe, pairs = self.job.recipe, self.data.train
        samples = TrainSamples(pairs, self.variation, self.skipped.tally("train", pairs))
        return shuffled_by(recipe, samples, len(pairs), name=self.data.name, noun="photos", collate=as_it_is)

    def test_loader(self) -> DataLoader[Any]:
        """Batches of whole photos, of any sizes."""
        settings, pairs = self.job.settings, self.data.test
        samples = TestSamples(pairs, settings.short_side, settings.long_side, self.skipped.tally("test", pairs))
        workers = self.job.recipe.workers
        return in_order(samples, len(pairs), settings.test_batch, workers=workers, collate=as_it_is)

    def look_through(self) -> None:
        """Photos and maps: each of a thousand decoded, of more a thousand, and the beginnings of the others."""
        halves = {"train": self.data.train, "test": self.data.test}
        for name, half in halves.items():
            self.skipped.tally(name, half)
        self.skipped.absorb([(name, index) for name, half in halves.items() for index in unreadable(half)])

    def ready(self, batch: Any) -> Any:
        """Bytes as numbers; what is not photo is the mean colour."""
        if isinstance(batch, Crops):
            images = self.normalize(batch.images)
            if self.pads:
                images = images * self._inside(batch)
            return batch._replace(images=images)
        photos = cast(Photos, batch)
        return photos._replace(images=[self.normalize(image) for image in photos.images])

    @cached_property
    def class_weights(self) -> Tensor | None:
        """How much a pixel of each class counts; None where all count alike."""
        power, classes = self.job.settings.balance, len(self.data.classes)
        return class_weights(class_counts(self.data.train, classes), power).to(self.device) if power else None

    def loss(self, network: nn.Module, batch: Any) -> Tensor:
        """The cross entropy of every labelled pixel, at the crop's own size; the helper's counts less."""
        crops = cast(Crops, batch)
        sizes = crops.sizes if self.pads and self.job.settings.mask_padding else None
        labels = crops.labels.long()
        logits: list[Tensor] = network(crops.images, sizes)
        weights = (1.0, self.job.settings.helper_weight)
        losses = [
            weight * pixel_loss(found, labels, self.class_weights)
            for weight, found in zip(weights, logits, strict=False)
        ]
        return losses[0] if len(losses) == 1 else losses[0] + losses[1]

    def score(self, network: nn.Module, batches: Iterable[Any], accelerator: Accelerator) -> Score:
        """Count the pixels of the whole test set, and then divide."""
        classes = len(self.data.classes)
        counts = torch.zeros(classes, classes, dtype=torch.int64, device=accelerator.device)
        shown, photos = torch.zeros_like(counts[0]), torch.zeros_like(counts[0, 0])
        with torch.no_grad(), accelerator.autocast():
            for batch in batches:
                for images, labels in alike(cast(Photos, batch)):
                    found = labels_of(network, images, self.look, (labels.shape[1], labels.shape[2]))
                    counts += confusion(labels, found, classes)
                    shown += showing(labels, classes)
                    photos += len(images)
        counts, shown, photos = (cast(Tensor, accelerator.reduce(sums)) for sums in (counts, shown, photos))
        return score_of(counts.cpu(), shown.cpu(), int(photos), self.data.classes, self.skipped.names)

    def names(self, indices: Sequence[int]) -> list[str]:
        """The files of training photos."""
        return [self.data.train.path(index) for index in indices]

    def report(self, network: nn.Module) -> list[Section]:
        """The hardest test photos, beside the truth."""
        return sections(network, self.data, self.job.settings, self.look, self.normalize, self.device)

    def _inside(self, crops: Crops) -> Tensor:
        """(B, 1, H, W), one where there is photo."""
        height, width = crops.images.shape[2:]
        rows = torch.arange(height, device=crops.sizes.device) < crops.sizes[:, :1]
        columns = torch.arange(width, device=crops.sizes.device) < crops.sizes[:, 1:]
        return (rows[:, :, None] & columns[:, None, :])[:, None]


class Normalize:
    """Makes of bytes what a network wants: float32, about 0 with a spread of about 1.

    Args:
        settings: The statistics.
        device: Where the images are.
    """

    def __init__(self, settings: Segmentation, device: torch.device) -> None:
        assert settings.mean is not None
        assert settings.std is not None
        self.shift = (255 * torch.tensor(settings.mean)[:, None, None]).to(device)
        self.spread = (255 * torch.tensor(settings.std)[:, None, None]).to(device)

    def __call__(self, images: Tensor) -> Tensor:
        """Images (..., 3, H, W) in numbers; they stay as they are if they are numbers already."""
        return images.float().sub_(self.shift).div_(self.spread) if images.dtype == torch.uint8 else images


def pixel_loss(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """The mean cross entropy of labelled pixels (B, H, W); nothing, with a gradient of nothing, where there is none.

    Args:
        logits: (B, classes, h, w), brought to the labels' size.
        labels: Classes, `UNLABELLED` for none.
        weights: What a pixel of each class counts (classes,), 1 for the mean pixel; None for all alike.
    """
    logits = enlarge(logits, (labels.shape[1], labels.shape[2])).permute(0, 2, 3, 1)
    # As a list of pixels: torch's loss of pictures would first copy logits whose channels come last in memory.
    pixels = logits.flatten(0, 2).float()
    total = F.cross_entropy(pixels, labels.flatten(), weights, ignore_index=UNLABELLED, reduction="sum")
    return total / (labels != UNLABELLED).sum().clamp(min=1)


def alike(photos: Photos) -> Iterable[tuple[Tensor, Tensor]]:
    """Photos and labels of one size each, stacked; what only fills the batch up is left out."""
    groups: dict[tuple[torch.Size, torch.Size], list[int]] = {}
    for i, filled in enumerate(photos.filled):
        if not bool(filled):
            groups.setdefault((photos.images[i].shape, photos.labels[i].shape), []).append(i)
    for members in groups.values():
        yield torch.stack([photos.images[i] for i in members]), torch.stack([photos.labels[i] for i in members])


def variation_of(settings: Segmentation) -> Variation:
    """How training photos are varied under settings that leave nothing open."""
    assert settings.crop is not None
    return Variation(
        crop=settings.crop,
        short_side=settings.short_side,
        long_side=settings.long_side,
        zoom=settings.zoom,
        one_class=settings.one_class,
        flip=settings.flip,
        photometric=settings.photometric,
    )


def look_of(settings: Segmentation) -> Look:
    """How photos are judged under settings that leave nothing open."""
    assert settings.window is not None
    assert settings.window_stride is not None
    return Look("slide" if settings.look == "slide" else "whole", settings.window, settings.window_stride)
