"""From images to noise and back: diffusion with a learned variance, and straight flows. What a network is asked.

Diffusion: Denoising Diffusion Probabilistic Models, arXiv 2006.11239; the learned variance and its loss: arXiv
2102.09672. Flow: arXiv 2209.03003, as SiT has it, arXiv 2401.08740. `docs/generation.md` has the formulas.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from functools import cache

import torch
from torch import Tensor

STEPS, FIRST_BETA, LAST_BETA = 1000, 1e-4, 0.02
BIN = 1 / 255  # half of what one of 256 brightnesses takes of the range from -1 to 1
FAR = 0.999  # beyond this, the outermost brightness reaches to infinity
NAMES = ("ddpm", "flow")


class Process(ABC):
    """How an image becomes noise. All is computed in the images' dtype, which is float32 when a network learns.

    Attributes:
        learns_variance: Whether the network's second half of channels tells a variance.
    """

    learns_variance: bool

    @abstractmethod
    def times(self, count: int, device: torch.device) -> Tensor:
        """Random times (count,) to learn from, as the network is told them: from 0 to 1,000."""

    @abstractmethod
    def noisy(self, clean: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        """Images (B, C, H, W) at their times, on the way to the noise."""

    @abstractmethod
    def losses(self, told: Tensor, clean: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        """The loss of each image (B,), of what the network told (B, C or 2 C, H, W) about `noisy`."""


class Flow(Process):
    """Straight lines: x_t = (1 - t) x + t noise with t from 0 to 1; the network tells the velocity, noise - x.

    Example:
        >>> import torch
        >>> flow, x = Flow(), torch.zeros(1, 1, 2, 2)
        >>> float(flow.noisy(x, torch.ones_like(x), torch.tensor([250.0])).mean())
        0.25
    """

    learns_variance = False

    def times(self, count: int, device: torch.device) -> Tensor:
        """Evenly from 0 to 1,000."""
        return STEPS * torch.rand(count, device=device)

    def noisy(self, clean: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        """Between image and noise, in proportion to the time."""
        return torch.lerp(clean, noise, _over(times / STEPS, clean).to(clean.dtype))

    def losses(self, told: Tensor, clean: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        """The squared error of the velocity."""
        return _mean((told.to(clean.dtype) - (noise - clean)).square())


class Diffusion(Process):
    """A thousand small steps of noise with variances that rise in a straight line; the network tells the noise.

    Its second half of channels tells the variance of a step back, between the two that are known to bound it. The loss
    of the variance is the variational bound, in bits, with the noise held fixed.
    """

    learns_variance = True

    @property
    def kept(self) -> Tensor:
        """The share of the image's variance that is left after each step, (1000,), float64."""
        return _kept_on(torch.device("cpu"))

    def times(self, count: int, device: torch.device) -> Tensor:
        """Whole numbers from 0 to 999."""
        return torch.randint(STEPS, (count,), device=device)

    def noisy(self, clean: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        """A smaller image in more noise."""
        of_image, of_noise = self.amounts(times, clean)
        return of_image * clean + of_noise * noise

    def losses(self, told: Tensor, clean: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        """The squared error of the noise, and the bound for the variance."""
        guess, share = told.to(clean.dtype).chunk(2, dim=1)
        return _mean((guess - noise).square()) + self.bound(guess.detach(), share, clean, noise, times)

    def bound(self, guess: Tensor, share: Tensor, clean: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        """Bits (B,) by which a step back, of this noise and this variance, differs from the best one there is."""
        noisy = self.noisy(clean, noise, times)
        mean, log_variance = self.back(noisy, guess, share, times, times - 1)
        best, (lowest, _) = self._between(clean, noisy, times, times - 1), self._variances(times, times - 1, clean)
        apart = 0.5 * (
            log_variance - lowest - 1 + (lowest - log_variance).exp() + (best - mean).square() * (-log_variance).exp()
        )
        bits = torch.where(_over(times, clean) == 0, -_brightness(clean, mean, 0.5 * log_variance), apart)
        return _mean(bits) / math.log(2)

    def back(
        self, noisy: Tensor, guess: Tensor, share: Tensor, times: Tensor, before: Tensor, clip: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Mean and log variance of the step from `times` to `before`, (B,), which is -1 for the image itself.

        Args:
            noisy: Images (B, C, H, W) at their times.
            guess: What the network says of their noise.
            share: What it says of the variance: -1 for the lowest, 1 for the highest there can be.
            times: Where the images are.
            before: Where the step leads.
            clip: Whether the image that is guessed on the way stays between -1 and 1, as pixels do.
        """
        mean = self._between(self.clean(noisy, guess, times, clip), noisy, times, before)
        lowest, highest = self._variances(times, before, noisy)
        return mean, torch.lerp(lowest, highest, (share + 1) / 2)

    def clean(self, noisy: Tensor, guess: Tensor, times: Tensor, clip: bool = False) -> Tensor:
        """The image that is left when the noise that was guessed is taken off."""
        of_image, of_noise = self.amounts(times, noisy)
        found = (noisy - of_noise * guess) / of_image
        return found.clamp(-1, 1) if clip else found

    def amounts(self, times: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """How much of image and of noise there is at times (B,), each (B, 1, 1, 1); at -1 there is image alone."""
        kept, _ = self._exact(times, times)
        return _over(kept.sqrt(), like).to(like.dtype), _over((1 - kept).sqrt(), like).to(like.dtype)

    def _exact(self, times: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """What is kept at both times in float64, since steps are differences of what is nearly one."""
        kept = _kept_on(times.device)
        one = torch.ones((), dtype=kept.dtype, device=kept.device)
        now, then = (torch.where(at < 0, one, kept[at.clamp(min=0)]) for at in (times, before))
        return now, then

    def _between(self, clean: Tensor, noisy: Tensor, times: Tensor, before: Tensor) -> Tensor:
        """The mean of the image at `before`, which is known where image and noisy image are."""
        now, then = self._exact(times, before)
        step = now / then
        of_clean, of_noisy = then.sqrt() * (1 - step) / (1 - now), step.sqrt() * (1 - then) / (1 - now)
        return _over(of_clean, clean).to(clean.dtype) * clean + _over(of_noisy, clean).to(clean.dtype) * noisy

    def _variances(self, times: Tensor, before: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Logarithms of the lowest and the highest variance of a step back, each (B, 1, 1, 1)."""
        now, then = self._exact(times, before)
        highest = 1 - now / then
        lowest = highest * (1 - then) / (1 - now)
        # The last step has none; as published, it then takes that of the step before it.
        second, first = self.kept[1].item(), self.kept[0].item()
        lowest = torch.where(before < 0, (1 - second / first) * (1 - first) / (1 - second), lowest)
        return _over(lowest.log(), like).to(like.dtype), _over(highest.log(), like).to(like.dtype)


@cache
def _kept_on(device: torch.device) -> Tensor:
    """The same on a device, where it stays: to bring it there at every step would keep a GPU waiting."""
    betas = torch.linspace(FIRST_BETA, LAST_BETA, STEPS, dtype=torch.float64, device="cpu")
    return (1 - betas).cumprod(0).to(device)


def process_of(name: str) -> Process:
    """The process of a setting's name."""
    return Diffusion() if name == "ddpm" else Flow()


def _brightness(clean: Tensor, mean: Tensor, log_spread: Tensor) -> Tensor:
    """The log probability of each pixel's brightness, one of 256 from -1 to 1, under a normal distribution."""
    narrow = (-log_spread).exp()
    above, below = (torch.special.ndtr(narrow * (clean - mean + side)) for side in (BIN, -BIN))
    inside = torch.where(clean > FAR, 1 - below, torch.where(clean < -FAR, above, above - below))
    return inside.clamp(min=1e-12).log()


def _over(numbers: Tensor, like: Tensor) -> Tensor:
    """Numbers (B,) beside images (B, C, H, W)."""
    return numbers.view(-1, *[1] * (like.ndim - 1))


def _mean(x: Tensor) -> Tensor:
    return x.flatten(1).mean(dim=1)
