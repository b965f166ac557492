"""Generation at work on one job: loaders, loss, score and report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ...train.loading import in_order, shuffled_by
from ...train.page import Section
from ...train.task import Job, Score, Work
from ..images.batching import Batching
from . import metrics, report
from .drawing import as_bytes, grid, png_file, seen
from .features import features_of
from .opening import Pictures
from .process import Process, process_of
from .samples import NO_CLASS, Batch, Noisy, Request, Requests, TrainSamples, as_it_is, some
from .sampling import Network, Way, sample
from .settings import Generation

CALM = {"ddpm": "ddim", "flow": "euler"}  # samplers without chance, for strips
JUDGED_AT_ONCE = 250  # pictures whose features are computed together


class GenerateWork(Work[Pictures, Generation]):
    """Images to learn from, and noise to be made into images that are judged.

    Args:
        job: With nothing left open.
        data: Open.
        device: Where batches will be.
    """

    def __init__(self, job: Job[Generation], data: Pictures, device: torch.device) -> None:
        super().__init__(job, data, device)
        settings = job.settings
        assert settings.image_size is not None
        self.latent: bool = job.facts["latent"]
        self.shape: tuple[int, int, int] = (job.facts["channels"], *settings.image_size)
        self.classes: list[str] = job.facts["class_names"]
        self.process: Process = process_of(settings.process)
        self.batching = batching_of(job)
        self._features: nn.Module | None = None
        self._real: Tensor | None = None  # features of the reference, which every evaluation asks for

    def train_loader(self) -> DataLoader[Any]:
        """Batches of images, each of all processes together."""
        recipe, half = self.job.recipe, self.data.train
        flip = 0.0 if self.latent else self.job.settings.flip
        samples = TrainSamples(half, self.batching, flip, self.skipped.tally("train", half))
        return shuffled_by(recipe, samples, len(half), name=self.data.name, collate=as_it_is)

    def test_loader(self) -> DataLoader[Any]:
        """Batches of noise and classes."""
        settings, recipe = self.job.settings, self.job.recipe
        requests = Requests(settings.made, len(self.classes), self.shape, recipe.seed)
        return in_order(requests, settings.made, settings.judge_batch, workers=recipe.workers, collate=as_it_is)

    def ready(self, batch: Any) -> Any:
        """Bytes as numbers from -1 to 1, latents at their scale."""
        if not isinstance(batch, Batch):
            return batch
        return batch._replace(images=numbers(batch.images, self.job.settings.latent_scale))

    def vary(self, batch: Any) -> Noisy:
        """Draw noise, times, and whose class is not told."""
        images, labels = cast(Batch, batch)
        untold = torch.rand(len(labels), device=labels.device) < self.job.settings.label_drop
        labels = labels.masked_fill(untold, len(self.classes))
        return Noisy(images, labels, torch.randn_like(images), self.process.times(len(images), images.device))

    def loss(self, network: nn.Module, batch: Any) -> Tensor:
        """The mean over the batch of what the process asks."""
        images, labels, noise, times = cast(Noisy, batch)
        told = network(self.process.noisy(images, noise, times), times, labels)
        return self.process.losses(told, images, noise, times).mean()

    @torch.no_grad()
    def score(self, network: nn.Module, batches: Iterable[Any], accelerator: Accelerator) -> Score:
        """Make images and compare their features with those of the reference."""
        made: list[Tensor] = []
        labels: list[Tensor] = []
        for batch in batches:
            noise, told = cast(Request, batch)
            with accelerator.autocast():
                drawn = sample(cast(Network, network), self.process, way_of(self.job), noise, told.clamp(min=0))
            made.append(self._seen_by_features(drawn))
            labels.append(told)
        gathered = cast(Tensor, accelerator.gather(torch.cat(made)))
        kept = cast(Tensor, accelerator.gather(torch.cat(labels))) != NO_CLASS
        return self._judged(gathered[kept], accelerator)

    def names(self, indices: Sequence[int]) -> list[str]:
        """The files or numbers of training images."""
        return [self.data.train.path(index) for index in indices]

    @torch.no_grad()
    def glimpse(self, network: nn.Module) -> bytes:
        """A grid of samples, as a PNG file."""
        settings = self.job.settings
        made = report.samples(self._drawer(network), self.classes, self.shape, self.job.recipe.seed, settings.made)
        return png_file(grid(made, report.columns_of(self.classes, settings.made)))

    @torch.no_grad()
    def report(self, network: nn.Module) -> list[Section]:
        """Samples of the classes, strips between noises, and what guidance does."""
        settings = self.job.settings
        return report.sections(
            self._drawer(network), self.classes, self.shape, self.job.recipe.seed, settings.made, judged_by(settings)
        )

    def _drawer(self, network: nn.Module) -> report.Draw:
        """What makes pictures of this network."""
        bf16 = self.device.type == "cuda" and self.job.recipe.precision == "bf16"

        def draw(noise: Tensor, labels: Tensor, guidance: float | None, calm: bool) -> Tensor:
            way = way_of(self.job, guidance, CALM[self.job.settings.process] if calm else None)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=bf16):
                made = sample(cast(Network, network), self.process, way, noise.to(self.device), labels.to(self.device))
            return seen(made, self.latent)

        return draw

    def _seen_by_features(self, images: Tensor) -> Tensor:
        """Features (B, D), float32, of pictures, rounded to 256 brightnesses as files have them, or of latents."""
        if self._features is None:
            self._features = features_of(self.job.settings.features, self.shape[0], images.device)
        shown = images if self.latent or images.dtype == torch.uint8 else as_bytes(images)
        return torch.cat([self._features(part) for part in shown.split(JUDGED_AT_ONCE)])

    def _reference(self, accelerator: Accelerator) -> Tensor:
        """Features (N, D) of the real images, computed once, by every process for itself."""
        if self._real is None and self.data.known is not None:
            self._real = torch.from_numpy(self.data.known).to(self.device)
        if self._real is None:
            settings = self.job.settings
            half = self.data.train if settings.reference == "train" else self.data.test
            scale = settings.latent_scale
            parts = [
                self._seen_by_features(
                    numbers(part.to(accelerator.device), scale) if self.latent else part.to(self.device)
                )
                for part in some(half, self.batching, settings.reference_limit, JUDGED_AT_ONCE)
            ]
            self._real = torch.cat(parts)
        return self._real

    def _judged(self, made: Tensor, accelerator: Accelerator) -> Score:
        real = self._reference(accelerator)
        chosen = torch.linspace(0, len(real) - 1, min(len(real), len(made)), device=real.device).long()
        as_many = real[chosen]
        precision, recall = metrics.precision_recall(as_many, made, self.job.settings.neighbours)
        found = {
            "frechet": metrics.frechet(metrics.moments(real), metrics.moments(made)),
            "kernel": metrics.kernel_distance(as_many, made),
            "precision": precision,
            "recall": recall,
        }
        return Score(found, len(made))


def numbers(images: Tensor, latent_scale: float) -> Tensor:
    """What a network learns from, float32: bytes from -1 to 1, latents at their scale."""
    return images.float() / 127.5 - 1 if images.dtype == torch.uint8 else images.float() * latent_scale


def batching_of(job: Job[Generation]) -> Batching:
    """Size and channels of pictures under a job that has nothing left open."""
    size, channels = job.settings.image_size, job.facts["channels"]
    assert size is not None
    of_pictures = channels if channels in (1, 3) else 3  # of latents nobody asks
    half = (0.5,) * of_pictures
    return Batching(job.recipe.batch_size, size, of_pictures, half, half, interpolation="bicubic")


def way_of(job: Job[Generation], guidance: float | None = None, sampler: str | None = None) -> Way:
    """How images are made to be judged, or with another guidance or sampler."""
    settings = job.settings
    return Way(
        sampler or settings.sampler,
        settings.sample_steps,
        settings.guidance if guidance is None else guidance,
        clip=not job.facts["latent"],
    )


def judged_by(settings: Generation) -> str:
    """What distances are of, in a sentence."""
    if settings.features == "inception":
        return f"Over features of Inception, so that the Fréchet distance is FID, of {settings.made:,} made images."
    return (
        f"Over features of a small random network, of {settings.made:,} made images: for comparing networks trained on "
        "the same data. It is no FID; --set features=inception measures that."
    )
