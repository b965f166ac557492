"""From waves to features as the network wants them: log-mel, about 0 with a spread of about 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...models.speech import LogMel
from ...models.speech.conformer import REACH
from .settings import Hearing

LEAST = 1e-2  # spread that a band is divided by at least: silence has none


class Ear(nn.Module):
    """Makes features of waves, normalised as the settings say.

    Args:
        settings: With nothing left open.
        facts: Where features are normalised by the corpus, its `mean` and `std` of every band.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, settings: Hearing, facts: Mapping[str, Any]) -> None:
        super().__init__()
        self.mel = LogMel(settings.sample_rate, settings.bands)
        self.by_corpus = settings.normalization == "corpus"
        self.register_buffer("mean", torch.tensor(facts.get("mean", []), dtype=torch.float32), persistent=False)
        self.register_buffer("std", torch.tensor(facts.get("std", []), dtype=torch.float32), persistent=False)

    @property
    def least(self) -> int:
        """The fewest samples that the network takes."""
        return self.mel.samples(REACH)

    def forward(self, waves: Tensor, samples: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Features (B, T, F) of waves (B, S), zeros after the end of each, and the frames of each, (B,).

        Args:
            waves: Silence is appended to what is too short to be heard.
            samples: (B,), samples of each; None where all of them fill the batch.
        """
        waves = F.pad(waves, (0, max(0, self.least - waves.shape[1])))
        features = self.mel(waves)
        if samples is None:
            frames = torch.full((len(waves),), features.shape[1], device=waves.device)
        else:
            frames = ((samples.clamp(min=self.least) - self.mel.length) // self.mel.hop + 1).clamp(min=REACH)
        inside = (torch.arange(features.shape[1], device=waves.device) < frames[:, None])[..., None]
        return self.normalized(features, inside).masked_fill(~inside, 0), frames

    def normalized(self, features: Tensor, inside: Tensor | None = None) -> Tensor:
        """Features (B, T, F) about 0 with a spread of about 1; only those inside count for a recording's own."""
        if self.by_corpus:
            return (features - self.mean) / self.std
        weight = torch.ones_like(features[..., :1]) if inside is None else inside.to(features.dtype)
        count = weight.sum(dim=1, keepdim=True).clamp_min(1)
        centred = features - (features * weight).sum(dim=1, keepdim=True) / count
        spread = ((centred * weight).square().sum(dim=1, keepdim=True) / count).sqrt()
        return centred / spread.clamp_min(LEAST)
