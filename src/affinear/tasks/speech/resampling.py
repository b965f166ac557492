"""Another number of samples a second: band-limited interpolation, whole or piece by piece."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

ZEROS = 24  # of the sinc on each side: how steep the filter is
BETA = 9.0  # of Kaiser's window: what is let through beyond is 90 dB down
ROLLOFF = 0.945  # of the band that is kept
AT_ONCE = 2**14  # samples that are computed together


class Resampler:
    """Makes samples at one rate of samples at another, as they come.

    Sample m of the new rate is the sum of the old ones about its moment, weighed by a sinc that ends smoothly, at most
    as wide as the narrower of both bands; only as many sets of weights exist as moments between two samples do.

    Args:
        before: Samples of a second that come.
        after: Samples of a second that go.

    Example:
        >>> import torch
        >>> up = Resampler(8_000, 16_000)
        >>> wave = torch.randn(1000)
        >>> pieces = [up(piece) for piece in wave.split(300)] + [up.rest()]
        >>> torch.equal(torch.cat(pieces), resample(wave, 8_000, 16_000))
        True
    """

    def __init__(self, before: int, after: int) -> None:
        common = math.gcd(before, after)
        self.down, self.up = before // common, after // common
        self.weights = _weights(self.down, self.up)
        self.reach = self.weights.shape[1] // 2
        self._held = torch.zeros(self.reach - 1)  # nothing comes before the beginning
        self._first = 1 - self.reach  # number of the first sample held
        self._made = 0

    def __call__(self, wave: Tensor) -> Tensor:
        """All new samples (T,) whose moment has enough of what comes after it, with some more old ones (S,)."""
        if self.down == self.up:
            return wave
        self._held = torch.cat((self._held, wave))
        seen = self._first + len(self._held)  # samples before this number are there
        # The last sample that the moment m * down / up needs is number floor(m * down / up) + reach.
        ready = max(0, -((self.reach - seen) * self.up // self.down)) if seen > self.reach else 0
        return self._make(ready)

    def rest(self) -> Tensor:
        """What is left at the end: as many samples in all as the length calls for."""
        if self.down == self.up:
            return torch.zeros(0)
        total = -(-(self._first + len(self._held)) * self.up // self.down)
        self._held = torch.cat((self._held, torch.zeros(self.reach)))
        return self._make(total)

    def _make(self, until: int) -> Tensor:
        # Into one tensor: many small ones between large ones would leave an hour's memory in shreds.
        out = torch.empty(max(0, until - self._made))
        for part in out.split(AT_ONCE) if len(out) else ():
            number = torch.arange(self._made, self._made + len(part))
            place, phase = number * self.down // self.up, number * self.down % self.up
            windows = self._held.unfold(0, 2 * self.reach, 1)[place - self.reach + 1 - self._first]
            part.copy_((windows * self.weights[phase]).sum(-1))
            self._made += len(part)
        keep = self._made * self.down // self.up - self.reach + 1
        if keep > self._first:
            self._held, self._first = self._held[keep - self._first :].clone(), keep
        return out


def resample(wave: Tensor, before: int, after: int) -> Tensor:
    """A wave (S,) at another rate, (ceil(S * after / before),), float32.

    Example:
        >>> resample(torch.ones(441), 44_100, 16_000).shape
        torch.Size([160])
    """
    if before == after:
        return wave
    made = Resampler(before, after)
    return torch.cat((made(wave), made.rest()))


@lru_cache(maxsize=16)
def _weights(down: int, up: int) -> Tensor:
    """What old samples weigh for each moment between two of them, (up, 2 reach); each row sums to one."""
    width = min(1.0, up / down) * ROLLOFF  # of the band, over that of the old rate
    reach = math.ceil(ZEROS / width)
    moment = torch.arange(up, dtype=torch.float64)[:, None] / up
    away = torch.arange(1 - reach, reach + 1, dtype=torch.float64) - moment
    window = torch.i0(BETA * (1 - (away / reach).square()).clamp_min(0).sqrt()) / torch.i0(torch.tensor(BETA).double())
    found = torch.where(away.abs() < reach, torch.sinc(width * away) * window, torch.zeros((), dtype=torch.float64))
    return (found / found.sum(dim=1, keepdim=True)).float()
