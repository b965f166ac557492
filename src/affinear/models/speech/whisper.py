"""Features as Whisper takes them: log-mel of a window of one length, filled up with silence (arXiv 2212.04356)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .features import LogMel

SAMPLE_RATE, POINTS, HOP = 16_000, 400, 160
FLOOR = 1e-10
RANGE = 8.0  # powers of ten below the loudest band of a window; what is quieter is as quiet as that
LINEAR_UP_TO, PER_MEL = 1000.0, 200 / 3  # Hz; below, a mel is so many of them
GROWTH = math.log(6.4) / 27  # of the frequency in a mel above that


class WhisperMel(nn.Module):
    """Whisper's features of waves: `frames` frames of 10 ms, however short a wave is.

    Args:
        bands: 80, or 128 for the large networks since the third.
        frames: Of a window; 3000, half a minute, as all that were released have it.

    Example:
        >>> import torch
        >>> from affinear.models.speech import WhisperMel
        >>> mel = WhisperMel(80, frames=3000)
        >>> mel(torch.randn(2, 16_000)).shape                   # a second
        torch.Size([2, 80, 3000])
        >>> mel.samples
        480000
    """

    def __init__(self, bands: int = 80, frames: int = 3000) -> None:
        super().__init__()
        self.frames, self.samples = frames, HOP * frames
        filters = slaney_filters(bands, POINTS, SAMPLE_RATE)
        self.mel = LogMel(SAMPLE_RATE, bands, window=torch.hann_window(POINTS), filters=filters, floor=FLOOR)

    def forward(self, waves: Tensor) -> Tensor:
        """Features (B, bands, frames) in float32 of waves (B, S) at 16 kHz.

        Raises:
            ValueError: If they are longer than a window.
        """
        if waves.shape[1] > self.samples:
            raise ValueError(f"waves: expected at most {self.samples:,} samples, got {waves.shape[1]:,}; cut them")
        window = F.pad(waves.float(), (0, self.samples - waves.shape[1]))
        around = F.pad(window[:, None], (POINTS // 2, POINTS // 2), mode="reflect")[:, 0]  # each frame is in the middle
        tens = self.mel(around)[:, :-1] / math.log(10)
        tens = tens.maximum(tens.amax(dim=(1, 2), keepdim=True) - RANGE)
        return ((tens + 4) / 4).transpose(1, 2)


def slaney_filters(bands: int, points: int, sample_rate: int) -> Tensor:
    """Triangles (points // 2 + 1, bands) from 0 Hz to half the sample rate, each with an area of one.

    Slaney's mel scale is linear up to 1000 Hz, which are 15 mels, and logarithmic from there on: 27 mels more are 6.4
    times the frequency.

    Example:
        >>> slaney_filters(80, 400, 16_000).shape
        torch.Size([201, 80])
    """
    knee, highest = LINEAR_UP_TO / PER_MEL, sample_rate / 2
    top = knee + math.log(highest / LINEAR_UP_TO) / GROWTH if highest > LINEAR_UP_TO else highest / PER_MEL
    mels = torch.linspace(0, top, bands + 2, dtype=torch.float64)
    corners = torch.where(mels < knee, PER_MEL * mels, LINEAR_UP_TO * torch.exp(GROWTH * (mels - knee)))
    lines = torch.linspace(0, highest, points // 2 + 1, dtype=torch.float64)[:, None]
    left, peak, right = corners[:-2], corners[1:-1], corners[2:]
    found = torch.minimum((lines - left) / (peak - left), (right - lines) / (right - peak)).clamp_min(0)
    return (2 * found / (right - left)).float()
