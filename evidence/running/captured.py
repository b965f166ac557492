"""A training step that becomes one CUDA graph after some steps, so that the host has nothing left to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from affinear.bench.timing import capture_or_why, run_aside


class Captured:
    """Work that is captured where that is possible, and done as it is elsewhere.

    Attributes:
        graph: What is replayed; None as long as there is none.
        why: Why there is none for good.

    Args:
        work: Reads and writes tensors that stay in their places.
        device: Where it computes.
        eager: How often it is done before: what is set up on first use may not be set up in a capture.
    """

    def __init__(self, work: Callable[[], object], device: torch.device, eager: int = 11) -> None:
        self.work, self.eager, self.number = work, eager, 0
        self.graph: Any = None
        self.why = "" if device.type == "cuda" else "no GPU"
        self.side = None if self.why else torch.cuda.Stream()

    def __call__(self) -> None:
        """Do it once."""
        if self.number == self.eager and not self.why:
            self.graph, self.why = capture_or_why(self.work)  # which computes nothing
        self.number += 1
        if self.graph is not None:
            self.graph.replay()
        elif self.side is None or self.why:
            self.work()
        else:
            run_aside([self.work], self.side)
