"""Perplexity and accuracy over all tokens that are judged, and by how many came before."""

from __future__ import annotations

import math
from typing import cast

import torch
from accelerate import Accelerator
from torch import Tensor

from ...train.task import Part, Score
from .network import IGNORED, positions

MOST = 80.0  # nats that are still told as a perplexity


class Sums:
    """Losses and hits by position, added up.

    Positions are counted from the beginning of the document, or of the row, whichever came later: they say how much
    the network could know. The first bucket has 0 to 31, the others double.

    Args:
        context: Tokens of a row.
        device: Where batches are.
    """

    def __init__(self, context: int, device: torch.device) -> None:
        self.edges = [0]
        while self.edges[-1] < context:
            self.edges.append(max(32, 2 * self.edges[-1]))
        self.table = torch.zeros(3, len(self.edges) - 1, dtype=torch.float64, device=device)  # targets, losses, hits
        self.bounds = torch.tensor(self.edges[1:-1], device=device)

    def add(self, losses: Tensor, right: Tensor, targets: Tensor, fresh: Tensor) -> None:
        """Count a batch, all (B, N)."""
        asked = targets != IGNORED
        begun = fresh.clone()
        begun[:, 0] = True
        bucket = torch.bucketize(positions(begun)[asked], self.bounds, right=True)
        rows = torch.stack((torch.ones_like(losses), losses, right.to(losses.dtype)))[:, asked].double()
        self.table.index_add_(1, bucket, rows)

    def score(self, accelerator: Accelerator, rows: int) -> Score:
        """What came out, over all processes.

        Raises:
            ValueError: If there was nothing to foretell.
        """
        counts, losses, hits = cast(Tensor, accelerator.reduce(self.table)).tolist()
        total = sum(counts)
        if not total:
            raise ValueError("data: expected tokens to be judged by, got none")
        parts = tuple(
            Part(
                f"tokens {first} to {last - 1}",
                int(n),
                {"perplexity": perplexity(loss / n), "loss": loss / n, "accuracy": hit / n},
                "tokens",
            )
            for first, last, n, loss, hit in zip(self.edges, self.edges[1:], counts, losses, hits, strict=False)
            if n
        )
        loss = sum(losses) / total
        numbers = {"perplexity": perplexity(loss), "accuracy": sum(hits) / total, "loss": loss}
        return Score(numbers, rows, parts, counted="rows")


def perplexity(loss: float) -> float:
    """The exponential of a loss, as long as that is a number worth telling."""
    return math.exp(min(loss, MOST))
