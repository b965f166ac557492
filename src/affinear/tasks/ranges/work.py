"""Ranges at work on one job: loaders, loss, score and report."""

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
from ...train.task import Job, Part, Score, Work
from .report import sections
from .samples import NO_CLASS, Batch, Sequences, as_it_is
from .sequences import Ranges
from .settings import RangesSettings


class RangesWork(Work[Ranges, RangesSettings]):
    """Long sequences to learn from, and to be judged by.

    Args:
        job: With nothing left open.
        data: Open.
        device: Where batches will be.
    """

    def __init__(self, job: Job[RangesSettings], data: Ranges, device: torch.device) -> None:
        super().__init__(job, data, device)
        assert job.settings.length is not None
        self.length = job.settings.length
        # Where every sequence is as long as the row, nobody has to be told of padding.
        self.pads = min(split.shortest for split in (data.train, data.held)) < self.length

    def train_loader(self) -> DataLoader[Any]:
        """Batches of sequences, each of all processes together."""
        recipe, split = self.job.recipe, self.data.train
        return shuffled_by(
            recipe, Sequences(split, self.length), len(split), name=self.data.name, noun="sequences", collate=as_it_is
        )

    def test_loader(self) -> DataLoader[Any]:
        """Batches of sequences to be judged by."""
        settings, split = self.job.settings, self.data.held
        workers = self.job.recipe.workers
        samples = Sequences(split, self.length)
        return in_order(samples, len(split), settings.test_batch, workers=workers, collate=as_it_is)

    def ready(self, batch: Any) -> Any:
        """Tokens as the embedding wants them."""
        return cast(Batch, batch)._replace(tokens=cast(Batch, batch).tokens.long())

    def loss(self, network: nn.Module, batch: Any) -> Tensor:
        """The cross entropy of classes."""
        return F.cross_entropy(self._logits(network, batch).float(), cast(Batch, batch).labels)

    def _logits(self, network: nn.Module, batch: Any) -> Tensor:
        found = cast(Batch, batch)
        return network(found.tokens, found.lengths) if self.pads else network(found.tokens)

    def score(self, network: nn.Module, batches: Iterable[Any], accelerator: Accelerator) -> Score:
        """Count what is right, by class, over all processes."""
        classes = len(self.data.classes)
        # Rows: sequences, right guesses; by class. Sums of float64 are exact for counts.
        table = torch.zeros(2, classes, dtype=torch.float64, device=accelerator.device)
        loss = torch.zeros((), dtype=torch.float64, device=accelerator.device)
        with torch.no_grad(), accelerator.autocast():
            for batch in batches:
                logits, labels = self._logits(network, batch).float(), cast(Batch, batch).labels
                seen = labels != NO_CLASS
                logits, labels = logits[seen], labels[seen]
                right = logits.argmax(1) == labels
                table.index_add_(1, labels, torch.stack((torch.ones_like(right), right)).double())
                loss += F.cross_entropy(logits, labels, reduction="sum").double()
        counts, hits = cast(Tensor, accelerator.reduce(table)).tolist()
        total = int(sum(counts))
        parts = tuple(
            Part(name, int(n), {"accuracy": hit / n if n else 0.0})
            for name, n, hit in zip(self.data.classes, counts, hits, strict=True)
        )
        summed = cast(Tensor, accelerator.reduce(loss)).item()
        return Score({"accuracy": sum(hits) / total, "loss": summed / total}, total, parts)

    def names(self, indices: Sequence[int]) -> list[str]:
        """What training sequences are called."""
        return [self.data.train.path(index) for index in indices]

    def report(self, network: nn.Module) -> list[Section]:
        """The sequences that the network is most wrong about."""
        return sections(network, self.data, self.length, self.device)
