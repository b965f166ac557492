"""MATLAB's bicubic: its definition, worked out pixel by pixel, and values that are known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from PIL import Image

from affinear.tasks.upscale.bicubic import resize, to_bytes


def kernel(x: float) -> float:
    x = abs(x)
    if x <= 1:
        return 1.5 * x**3 - 2.5 * x**2 + 1
    return -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2 if x <= 2 else 0.0


def by_definition(line: np.ndarray, factor: float) -> list[float]:
    """One line, resized: every old pixel within reach of a new one weighs by its distance, mirrored at the ends."""
    stretch = max(1.0, 1 / factor)
    out: list[float] = []
    for new in range(math.ceil(len(line) * factor)):
        centre = (new + 0.5) / factor - 0.5
        near = range(math.floor(centre - 2 * stretch) - 1, math.ceil(centre + 2 * stretch) + 2)
        weights = [kernel((centre - old) / stretch) for old in near]
        values = [
            line[old % (2 * len(line))] if old % (2 * len(line)) < len(line) else line[-1 - old % len(line)]
            for old in near
        ]
        out.append(sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights))
    return out


@pytest.mark.parametrize("factor", [1 / 2, 1 / 3, 1 / 4, 2, 3, 4])
@pytest.mark.parametrize("length", [1, 2, 5, 24])
def test_it_is_the_definition(factor: float, length: int):
    images = torch.rand(2, length, length + 1, dtype=torch.float64)
    lines = np.apply_along_axis(by_definition, 1, images.numpy(), factor)
    expected = np.apply_along_axis(by_definition, 2, lines, factor)
    assert torch.allclose(resize(images, factor), torch.from_numpy(expected), atol=1e-12)


def test_known_values():
    # By hand: the kernel at 1/4, 3/4, 5/4 and 7/4 is 111, 29, -9 and -3 over 128, and there are two of each.
    edge = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]], dtype=torch.float64)
    assert torch.equal(resize(edge, 1 / 2), torch.tensor([[-3, 17, 239, 259]], dtype=torch.float64) / 256)
    # Enlarged, there is one of each; beyond the border the last pixel comes again, and then the one before.
    assert torch.equal(resize(edge[:, 3:5], 2)[0], torch.tensor([-12, 26, 102, 140], dtype=torch.float64) / 128)


def test_inside_it_is_what_pillow_does():
    pixels = np.random.default_rng().uniform(0, 255, (60, 84)).astype(np.float32)
    for factor in (1 / 2, 1 / 3, 1 / 4, 2, 3):
        size = (round(84 * factor), round(60 * factor))
        theirs = np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC))
        ours = resize(torch.from_numpy(pixels).double(), factor).numpy()
        inside = slice(8, -8) if factor > 1 else slice(3, -3)
        assert np.abs(theirs - ours)[inside, inside].max() < 1e-3


def test_halves_are_rounded_up_and_nothing_is_blacker_than_black():
    assert to_bytes(torch.tensor([-7.0, 0.49, 0.5, 1.5, 254.5, 999.0])).tolist() == [0, 0, 1, 2, 255, 255]


def test_what_cannot_be_resized_is_told():
    with pytest.raises(ValueError, match="factor: expected a number above 0, got 0"):
        resize(torch.rand(2, 2), 0)
    with pytest.raises(ValueError, match="images: expected floating point"):
        resize(torch.zeros(2, 2, dtype=torch.uint8), 2)
