"""Super-resolution at work on one job: loaders, loss, score and report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from ...train.loading import in_order, shuffled_by
from ...train.page import Section
from ...train.task import Job, Score, Work
from .bicubic import resize, to_bytes
from .looking import Look, enlarged
from .metric import NUMBERS, compared, score_of
from .opening import Album
from .report import sections
from .samples import Crops, TestSamples, TrainSamples, Whole, as_it_is, as_numbers, paired, shrunk
from .settings import Upscaling


class UpscaleWork(Work[Album, Upscaling]):
    """Crops to learn from, and whole photos to be judged by.

    Args:
        job: With nothing left open.
        data: Open.
        device: Where batches will be.
    """

    def __init__(self, job: Job[Upscaling], data: Album, device: torch.device) -> None:
        super().__init__(job, data, device)
        self.scale, self.look = job.settings.scale, look_of(job.settings)

    def train_loader(self) -> DataLoader[Any]:
        """Batches of crops, each of all processes together."""
        recipe, settings, photos = self.job.recipe, self.job.settings, self.data.train
        assert settings.patch is not None
        tally = self.skipped.tally("train", photos)
        return shuffled_by(
            recipe,
            TrainSamples(photos, settings.patch, self.scale, settings.turn, tally),
            len(photos) * settings.crops,
            name=self.data.name,
            noun="crops",
            collate=as_it_is,
        )

    def test_loader(self) -> DataLoader[Any]:
        """Batches of whole photos, of any sizes."""
        photos, settings = self.data.test, self.job.settings
        samples = TestSamples(photos, self.data.set_of, self.scale, self.skipped.tally("test", photos))
        workers = self.job.recipe.workers
        return in_order(samples, len(photos), settings.test_batch, workers=workers, collate=as_it_is)

    def ready(self, batch: Any) -> Any:
        """Crops in numbers, and the small ones that are made of them; photos stay bytes."""
        return paired(batch, self.scale) if isinstance(batch, Crops) and batch.small.ndim != 4 else batch

    def loss(self, network: nn.Module, batch: Any) -> Tensor:
        """The mean absolute difference."""
        crops = cast(Crops, batch)
        return F.l1_loss(network(crops.small).float(), crops.large)

    def score(self, network: nn.Module, batches: Iterable[Any], accelerator: Accelerator) -> Score:
        """PSNR and SSIM of every photo, and bicubic's PSNR beside them."""
        sums = torch.zeros(len(self.data.sets), NUMBERS, dtype=torch.float64, device=accelerator.device)
        # Photos have many sizes: to try kernels for each would take longer than they do.
        with torch.no_grad(), accelerator.autocast(), torch.backends.cudnn.flags(enabled=True, benchmark=False):
            for batch in batches:
                for large, number in zip(*cast(Whole, batch), strict=True):
                    if int(number) >= 0:
                        sums[int(number)] += sums.new_tensor(self.judged(network, large))
        sums = cast(Tensor, accelerator.reduce(sums))
        return score_of(sums.cpu(), self.data.sets, self.skipped.names)

    def names(self, indices: Sequence[int]) -> list[str]:
        """The files of training photos."""
        return [self.data.train.path(index % len(self.data.train)) for index in indices]

    def report(self, network: nn.Module) -> list[Section]:
        """Test photos before and after, in the precision that they are judged in."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.job.recipe.precision == "bf16"):
            return sections(network, self.data, self.scale, self.look, self.device)

    def judged(self, network: nn.Module, large: Tensor) -> tuple[float, float, float, float]:
        """One photo, its PSNR and SSIM, and the PSNR of bicubic."""
        small = shrunk(large, self.scale)
        found = torch.cat(list(enlarged(network, as_numbers(small)[None], self.look)), dim=2)[0]
        peak, similarity = compared(to_bytes(255 * found.float()), large, self.scale)
        bicubic = compared(to_bytes(resize(small.float(), self.scale)), large, self.scale)[0]
        return 1.0, peak, similarity, bicubic


def look_of(settings: Upscaling) -> Look:
    """How photos are judged."""
    return Look(settings.look, tile=settings.tile, overlap=settings.overlap)
