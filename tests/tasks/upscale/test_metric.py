"""PSNR and SSIM on Y, against torchmetrics and by hand."""

from __future__ import annotations

import pytest
import torch
from torchmetrics.functional.image import structural_similarity_index_measure

from affinear.tasks.upscale.metric import compared, luma, psnr, score_of, ssim


def test_luma_goes_from_16_to_235():
    black, white = (torch.full((3, 2, 2), level, dtype=torch.uint8) for level in (0, 255))
    assert torch.equal(luma(black), torch.full((2, 2), 16.0, dtype=torch.float64))
    assert torch.allclose(luma(white), torch.full((2, 2), 235.0, dtype=torch.float64))
    red = torch.tensor([200, 0, 0], dtype=torch.uint8)[:, None, None]
    assert luma(red).item() == pytest.approx(16 + 65.481 * 200 / 255)


def test_psnr_is_that_of_the_mean_square():
    one = torch.randint(0, 255, (9, 13)).double()
    assert psnr(one, one + 3) == pytest.approx(20 * torch.tensor(255 / 3.0).log10().item(), abs=1e-5)
    assert psnr(one, one) == 100


def test_ssim_is_wangs():
    one, noise = 255 * torch.rand(40, 31, dtype=torch.float64), 20 * torch.randn(40, 31, dtype=torch.float64)
    _, everywhere = structural_similarity_index_measure(
        one[None, None], (one + noise)[None, None], sigma=1.5, data_range=255.0, return_full_image=True
    )
    inside = everywhere[..., 5:-5, 5:-5].mean().item()  # torchmetrics mirrors the border, and counts it
    assert ssim(one, one + noise) == pytest.approx(inside, abs=1e-10)


def test_the_border_does_not_count():
    one = torch.randint(0, 256, (3, 30, 40), dtype=torch.uint8)
    other = one.clone()
    other[:, :4] = 0
    other[:, :, -4:] = 0
    assert compared(one, other, 4) == (100, pytest.approx(1))
    assert compared(one, other, 3)[0] < 100


def test_sets_are_told_apart_and_photos_count_the_same():
    sums = torch.tensor([[2, 60.0, 1.6, 56.0], [0, 0, 0, 0], [1, 36.0, 0.9, 33.0]], dtype=torch.float64)
    score = score_of(sums, ("Set5", "none", "Set14"), ())
    assert score.numbers == pytest.approx({"psnr": 32.0, "ssim": 2.5 / 3, "gain": 32.0 - 89 / 3})
    assert [(part.name, part.count) for part in score.parts] == [("Set5", 2), ("Set14", 1)]
    assert score.parts[0].numbers == pytest.approx({"psnr": 30.0, "ssim": 0.8, "gain": 2.0})
