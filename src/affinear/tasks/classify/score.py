"""How well a network tells test images apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn import functional as F

from ...train.task import Measure, Part, Score
from .samples import NO_IMAGE, Batch

MOST_CLASSES = 1000  # of which it is counted which is taken for which
TOP1 = Measure("top1", "top-1", share=True)
TOP5 = Measure("top5", "top-5", share=True)
LOSS = Measure("loss", "test loss", higher_is_better=False, form=".3f")


def score(
    network: Callable[[Tensor], Tensor],
    batches: Iterable[Batch],
    class_names: tuple[str, ...],
    accelerator: Accelerator,
) -> Score:
    """Look at all batches, in all processes, and count.

    Args:
        network: In evaluation mode.
        batches: Images and targets on the network's device; rows of the target `NO_IMAGE` are not counted.
        class_names: Of all classes.
        accelerator: Which adds up what the processes counted.
    """
    count = len(class_names)
    # Rows: images, first guesses right, among the first five; by class. Sums of float64 are exact for counts.
    table = torch.zeros(3, count, dtype=torch.float64, device=accelerator.device)
    taken = torch.zeros(count**2 if count <= MOST_CLASSES else 0, dtype=torch.float64, device=accelerator.device)
    loss = torch.zeros((), dtype=torch.float64, device=accelerator.device)
    with torch.no_grad():
        for images, targets in batches:
            with accelerator.autocast():
                logits = network(images).float()
            seen = targets != NO_IMAGE
            logits, targets = logits[seen], targets[seen]
            guesses = logits.topk(min(5, count), dim=1).indices
            right = guesses == targets[:, None]
            rows = torch.stack((torch.ones_like(targets, dtype=torch.bool), right[:, 0], right.any(1))).double()
            table.index_add_(1, targets, rows)
            if len(taken):
                taken += torch.bincount(targets * count + guesses[:, 0], minlength=count**2)
            loss += F.cross_entropy(logits, targets, reduction="sum").double()
    sums: Any = accelerator.reduce((table, loss, taken))
    return _score(sums[0], sums[1], sums[2], class_names)


def _score(table: Tensor, loss: Tensor, taken: Tensor, class_names: tuple[str, ...]) -> Score:
    counts, first, five = table.tolist()
    total = int(sum(counts))
    if not total:
        raise ValueError("data: expected test images, got none that can be read")
    parts = tuple(
        Part(name, int(n), {"top1": right / n if n else 0.0})
        for name, n, right in zip(class_names, counts, first, strict=True)
    )
    numbers = {"top1": sum(first) / total, "top5": sum(five) / total, "loss": loss.item() / total}
    rows = taken.long().view(len(class_names), -1).tolist() if len(taken) else []
    return Score(numbers, total, parts, confusion=tuple(map(tuple, rows)))
