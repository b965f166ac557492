"""Scores of tokens that a network heard, kept small, to be put into words later and without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

FINE = 0.05  # between two logarithms that are told apart; what is less likely than 255 of them has as much


def keep_scores(path: Path, scores: Sequence[Tensor]) -> None:
    """Write logarithms of probabilities (N, pieces) of every recording; the file is there whole or not at all."""
    small = [(one.float() / -FINE).round().clamp(0, 255).to(torch.uint8).cpu().numpy() for one in scores]
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.part")
    with beside.open("wb") as file:
        np.savez_compressed(file, scores=np.concatenate(small), counts=np.array([len(one) for one in small]))
    beside.replace(path)


def kept_scores(path: Path) -> list[Tensor]:
    """The logarithms of every recording, to within `FINE`."""
    with np.load(path) as found:
        small, counts = torch.from_numpy(found["scores"]), found["counts"].tolist()
    return list((-FINE * small.float()).split(counts))
