"""How well a network tells test images apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn import functional as F

from ...train.task import Measure, Part, Score
from .samples import NO_IMAGE, Batch

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
            loss += F.cross_entropy(logits, targets, reduction="sum").double()
    return _score(accelerator.reduce(table), accelerator.reduce(loss), class_names)  # pyright: ignore[reportArgumentType]


def _score(table: Tensor, loss: Tensor, class_names: tuple[str, ...]) -> Score:
    counts, first, five = table.tolist()
    total = int(sum(counts))
    if not total:
        raise ValueError("data: expected test images, got none that can be read")
    parts = tuple(
        Part(name, int(n), {"top1": right / n if n else 0.0})
        for name, n, right in zip(class_names, counts, first, strict=True)
    )
    return Score({"top1": sum(first) / total, "top5": sum(five) / total, "loss": loss.item() / total}, total, parts)
