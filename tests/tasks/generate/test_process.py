"""From images to noise: the published formulas, each derived another way."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from affinear.tasks.generate.process import STEPS, Diffusion, Flow


def batch(count: int = 6) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images of 256 brightnesses, noise, guesses and shares, in float64."""
    images = torch.randint(0, 256, (count, 2, 3, 3)).double() / 127.5 - 1
    images[0].fill_(-1)
    images[1].fill_(1)
    return images, torch.randn_like(images), torch.randn_like(images), torch.rand_like(images) * 2 - 1


def test_noise_step_by_step_is_noise_at_once():
    """The variance after t steps, by adding one step's to the next."""
    process, variance = Diffusion(), 0.0
    for time, beta in enumerate(torch.linspace(1e-4, 0.02, STEPS, dtype=torch.float64).tolist()):
        variance = (1 - beta) * variance + beta
        assert float(1 - process.kept[time]) == pytest.approx(variance, rel=1e-12)


@pytest.mark.parametrize("time", [1, 2, 500, 999])
def test_the_bound_is_the_divergence_of_two_steps_back(time: int):
    """Bayes' rule in its own words: p(x before | x now, image) from p(now | before) and p(before | image)."""
    process, times = Diffusion(), torch.full((6,), time)
    images, noise, guess, share = batch()
    noisy, (now, before) = process.noisy(images, noise, times), process.kept[[time, time - 1]].tolist()
    step = now / before
    precision = step / (1 - step) + 1 / (1 - before)

    def back(image: Tensor) -> Tensor:
        return (math.sqrt(step) / (1 - step) * noisy + math.sqrt(before) / (1 - before) * image) / precision

    guessed = (noisy - math.sqrt(1 - now) * guess) / math.sqrt(now)
    log_variance = (1 + share) / 2 * math.log(1 - step) - (1 - share) / 2 * math.log(precision)
    expected = kl_divergence(
        Normal(back(images), torch.full_like(images, precision**-0.5)), Normal(back(guessed), (log_variance / 2).exp())
    )
    found = process.bound(guess, share, images, noise, times)
    torch.testing.assert_close(found, expected.flatten(1).mean(1) / math.log(2), rtol=1e-6, atol=1e-6)


def test_the_last_step_counts_bits_of_brightness():
    """The probabilities of all 256 brightnesses of a pixel add up to one."""
    process, count = Diffusion(), 256
    levels = (torch.arange(count).double() / 127.5 - 1).view(-1, 1, 1, 1)
    noisy = torch.full_like(levels, 0.1)
    times = torch.zeros(count, dtype=torch.int64)
    guess, share = torch.randn(1, 1, 1, 1).double().expand_as(levels), torch.full_like(levels, 0.3)
    of_image, of_noise = process.amounts(times, levels)
    bits = process.bound(guess, share, levels, (noisy - of_image * levels) / of_noise, times)
    assert float((2 ** (-bits)).sum()) == pytest.approx(1, abs=1e-6)


def test_the_variance_learns_and_the_noise_does_not_from_it():
    process = Diffusion()
    images, noise, guess, share = batch()
    told = torch.cat((guess, share), dim=1).requires_grad_()
    times = process.times(6, images.device)
    process.losses(told, images, noise, times).sum().backward()
    assert told.grad is not None
    plain = 2 * (guess - noise) / images[0].numel()
    torch.testing.assert_close(told.grad[:, :2], plain, rtol=1e-5, atol=1e-6)
    assert told.grad[:, 2:].any()


def test_a_flow_is_straight():
    images, noise, _, _ = batch()
    flow, times = Flow(), torch.rand(6) * 1000
    torch.testing.assert_close(flow.noisy(images, noise, torch.zeros(6)), images)
    torch.testing.assert_close(flow.noisy(images, noise, torch.full((6,), 1000.0)), noise)
    assert not flow.losses(noise - images, images, noise, times).any()
    drawn = flow.times(10_000, images.device)
    assert 0 <= float(drawn.min()) < 10
    assert 990 < float(drawn.max()) <= 1000
