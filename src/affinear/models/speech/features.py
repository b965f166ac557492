"""Log-mel features: how much energy each band of a recording has, every hundredth of a second."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

FLOOR = 1e-8  # of a band's energy; what is quieter is silence
AT_ONCE = 3000  # frames that are turned into spectra together, half a minute: an hour takes no more memory


class LogMel(nn.Module):
    """Logarithms of energies in bands that are evenly spaced on the mel scale.

    Every frame is a Hann window of 25 ms unless told otherwise, and they are 10 ms apart. A frame depends on its own
    samples alone: no padding, no mean over the recording, so a recording that comes in pieces gives the same frames.

    Args:
        sample_rate: Samples of a second.
        bands: How many bands there are, from 20 Hz to half the sample rate.
        window: (L,), what a frame of L samples is multiplied with; None for a symmetric Hann window of 25 ms.
        filters: (points // 2 + 1, bands), what each line of a spectrum of so many points counts in a band; None for
            those of `mel_filters`.
        floor: Of a band's energy; what is quieter is silence.

    Example:
        >>> import torch
        >>> from affinear.models.speech import LogMel
        >>> mel = LogMel(16_000)
        >>> mel(torch.randn(2, 16_000)).shape                   # a second
        torch.Size([2, 98, 80])
        >>> mel.frames(16_000)
        98
    """

    window: Tensor
    filters: Tensor

    def __init__(
        self,
        sample_rate: int = 16_000,
        bands: int = 80,
        *,
        window: Tensor | None = None,
        filters: Tensor | None = None,
        floor: float = FLOOR,
    ) -> None:
        super().__init__()
        if window is None:
            window = torch.hann_window(round(0.025 * sample_rate), periodic=False)
        self.sample_rate, self.bands, self.floor = sample_rate, bands, floor
        self.length, self.hop = len(window), round(0.010 * sample_rate)
        if filters is None:
            filters = mel_filters(bands, 2 ** max(9, math.ceil(math.log2(self.length))), sample_rate)
        self.points = 2 * (len(filters) - 1)
        self.register_buffer("window", window, persistent=False)
        self.register_buffer("filters", filters, persistent=False)

    def frames(self, samples: int) -> int:
        """How many frames so many samples give."""
        return max(0, (samples - self.length) // self.hop + 1)

    def samples(self, frames: int) -> int:
        """The fewest samples that give so many frames."""
        return self.length + (frames - 1) * self.hop if frames else 0

    def forward(self, waves: Tensor) -> Tensor:
        """Features (B, T, bands) in float32 of waves (B, S), whose loudest may be 1."""
        frames = self.frames(waves.shape[1])
        pieces = [
            self._some(waves[:, first * self.hop : self.samples(min(frames, first + AT_ONCE))])
            for first in range(0, frames, AT_ONCE)
        ]
        return torch.cat(pieces, dim=1) if pieces else waves.new_zeros(len(waves), 0, self.bands, dtype=torch.float32)

    def _some(self, waves: Tensor) -> Tensor:
        with torch.autocast(waves.device.type, enabled=False):
            pieces = waves.float().unfold(1, self.length, self.hop) * self.window
            spectrum = torch.fft.rfft(pieces, self.points)
            energy = spectrum.real.square() + spectrum.imag.square()
            return (energy @ self.filters).clamp_min(self.floor).log()

    def extra_repr(self) -> str:
        """What `print` shows."""
        return f"sample_rate={self.sample_rate}, bands={self.bands}"


def mel_filters(bands: int, points: int, sample_rate: int, lowest: float = 20.0) -> Tensor:
    """Triangles (points // 2 + 1, bands) over the lines of a spectrum, each from its neighbours' peaks to its own.

    The mel scale is 2595 log10(1 + f / 700). A band that lies between two lines gets the nearest one.

    Example:
        >>> mel_filters(80, 512, 16_000).shape
        torch.Size([257, 80])
    """
    highest = sample_rate / 2
    low, high = (2595 * math.log10(1 + f / 700) for f in (lowest, highest))
    corners = 700 * (10 ** (torch.linspace(low, high, bands + 2, dtype=torch.float64) / 2595) - 1)
    lines = torch.linspace(0, highest, points // 2 + 1, dtype=torch.float64)[:, None]
    left, peak, right = corners[:-2], corners[1:-1], corners[2:]
    found = torch.minimum((lines - left) / (peak - left), (right - lines) / (right - peak)).clamp_min(0)
    for band in (found.sum(dim=0) == 0).nonzero().flatten().tolist():
        found[(lines[:, 0] - peak[band]).abs().argmin(), band] = 1
    return found.float()
