"""SpecAugment: bands and moments of the features that are left out at random."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Masks:
    """What is left out of every recording.

    Attributes:
        bands: Stripes over bands.
        band_width: Bands that a stripe has at most.
        times: Stripes over time.
        time_share: Share of a recording that a stripe over time has at most.
    """

    bands: int = 2
    band_width: int = 27
    times: int = 10
    time_share: float = 0.05


def mask(features: Tensor, frames: Tensor, masks: Masks) -> Tensor:
    """Features (B, T, F) with stripes of zeros, others for each recording; they are normalised, so zero is the mean.

    Args:
        features: Of recordings.
        frames: (B,), frames of each.
        masks: How many stripes of which width.
    """
    batch, length, bands = features.shape
    width = torch.full((batch,), float(min(masks.band_width, bands)), device=features.device)
    whole = torch.full((batch,), bands, device=features.device)
    out = features.masked_fill(_stripes(whole, width, masks.bands, bands)[:, None], 0)
    return out.masked_fill(_stripes(frames, masks.time_share * frames, masks.times, length)[..., None], 0)


def _stripes(lengths: Tensor, widest: Tensor, count: int, places: int) -> Tensor:
    """Where stripes lie, (B, places), boolean: widths up to `widest` and places within `lengths`, all as likely."""
    if not count:
        return torch.zeros(len(lengths), places, dtype=torch.bool, device=lengths.device)
    drawn = torch.rand(2, len(lengths), count, device=lengths.device)
    width = (drawn[0] * (widest.floor()[:, None] + 1)).floor().clamp(max=lengths[:, None])
    first = (drawn[1] * (lengths[:, None] - width + 1)).floor()
    place = torch.arange(places, device=lengths.device)[None, :, None]
    return ((place >= first[:, None]) & (place < (first + width)[:, None])).any(dim=-1)
