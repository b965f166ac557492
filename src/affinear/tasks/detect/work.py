"""Detection at work on one job: loaders, loss, score and report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ...train.draws import NOTHING
from ...train.loading import in_order, shuffled_by
from ...train.page import Section
from ...train.task import Job, Score, Work
from .coco import Coco
from .finding import found_of
from .precision import Kind, Matches, Truth, match
from .report import sections
from .samples import Asked, Shown, TestSamples, TrainSamples, as_it_is
from .scoring import score_of
from .settings import Detection


class DetectWork(Work[Coco, Detection]):
    """Varied images to learn from, and whole images to be judged by.

    Args:
        job: With nothing left open.
        data: Open.
        device: Where batches will be.
    """

    def __init__(self, job: Job[Detection], data: Coco, device: torch.device) -> None:
        super().__init__(job, data, device)
        self._truths: dict[int, Truth] = {}  # of test images, drawn when first judged

    @property
    def masks(self) -> bool:
        """Whether masks are learned and judged."""
        return bool(self.job.settings.masks)

    def train_loader(self) -> DataLoader[Any]:
        """Batches of images and what they show."""
        recipe, half = self.job.recipe, self.data.train
        samples = TrainSamples(half, self.job.settings.variation(), self.masks, self.skipped.tally("train", half))
        return shuffled_by(recipe, samples, len(half), name=self.data.name, collate=as_it_is)

    def test_loader(self) -> DataLoader[Any]:
        """Batches of whole images, of any sizes."""
        samples = TestSamples(self.data.test, self.skipped.tally("test", self.data.test))
        recipe, settings = self.job.recipe, self.job.settings
        return in_order(samples, len(self.data.test), settings.test_batch, workers=recipe.workers, collate=as_it_is)

    def loss(self, network: nn.Module, batch: Any) -> Tensor:
        """The sum of all losses."""
        shown = cast(Shown, batch)
        losses: dict[str, Tensor] = network(shown.images, shown.targets)
        return torch.stack([loss.float() for loss in losses.values()]).sum()

    def score(self, network: nn.Module, batches: Iterable[Any], accelerator: Accelerator) -> Score:
        """Average precision over the whole test set, of boxes and of masks."""
        cap = self.job.settings.detections
        assert cap is not None
        kinds: tuple[Kind, ...] = ("box", "mask") if self.masks else ("box",)
        matches: dict[Kind, list[Matches]] = {kind: [] for kind in kinds}
        seen: list[int] = []
        with torch.no_grad():
            for batch in batches:
                for number, told in self._look(network, cast(Asked, batch), accelerator):
                    found, truth = found_of(told, self.data.test.sizes[number]), self.truth(number)
                    seen.append(number)
                    for kind in kinds:
                        matches[kind] += match(number, truth, found, kind, cap)
        every: dict[Kind, list[Matches]] = {kind: gather_object(found) for kind, found in matches.items()}
        count = len(cast("list[int]", gather_object(seen)))
        return score_of(every, self.data.class_names, count, cap, self.skipped.names)

    def truth(self, number: int) -> Truth:
        """What a test image shows, as it is judged by."""
        if number not in self._truths:
            half = self.data.test
            self._truths[number] = half.objects[number].truth(half.sizes[number], self.masks)
        return self._truths[number]

    def names(self, indices: Sequence[int]) -> list[str]:
        """The files of training images."""
        return [self.data.train.path(index) for index in indices]

    def report(self, network: nn.Module) -> list[Section]:
        """The hardest test images, beside the truth."""
        return sections(network, self.data, self.job.settings, self.truth)

    def _look(
        self, network: nn.Module, asked: Asked, accelerator: Accelerator
    ) -> Iterable[tuple[int, dict[str, Tensor]]]:
        """What is found in each image of a batch that is one, with its number."""
        real = [i for i, number in enumerate(asked.numbers.tolist()) if number != NOTHING]
        if not real:
            return ()
        with accelerator.autocast():
            told: list[dict[str, Tensor]] = network([asked.images[i] for i in real])
        return zip((int(asked.numbers[i]) for i in real), told, strict=True)
