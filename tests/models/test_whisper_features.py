"""Whisper's features beside those of transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import WhisperFeatureExtractor

from affinear.models.speech import WhisperMel
from affinear.models.speech.whisper import slaney_filters


@pytest.mark.parametrize("bands", [80, 128])
@pytest.mark.parametrize("samples", [1, 333, 16_000, 480_000])
def test_features_are_those_of_transformers(bands: int, samples: int):
    waves = 0.1 * torch.randn(2, samples)
    waves[1] *= 1e-3  # each has a floor of its own
    judge: Any = WhisperFeatureExtractor(feature_size=bands)
    expected = judge([wave.numpy() for wave in waves], sampling_rate=16_000, return_tensors="np")["input_features"]
    found = WhisperMel(bands)(waves)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.from_numpy(np.asarray(expected)), rtol=0, atol=1e-5)


def test_windows_may_be_of_another_length_and_silence_is_a_number():
    mel = WhisperMel(16, frames=100)
    judge: Any = WhisperFeatureExtractor(feature_size=16, chunk_length=1)
    wave = torch.randn(12_345)
    expected = judge(wave.numpy(), sampling_rate=16_000, return_tensors="np")["input_features"]
    torch.testing.assert_close(mel(wave[None]), torch.from_numpy(np.asarray(expected)), rtol=0, atol=1e-5)
    assert mel(torch.zeros(1, 5)).unique().tolist() == [-1.5]
    with pytest.raises(ValueError, match="waves: expected at most 16,000 samples, got 16,001; cut them"):
        mel(torch.zeros(1, 16_001))


def test_features_do_not_know_of_lower_precision():
    wave = torch.randn(1, 8000)
    mel = WhisperMel(20, frames=100)
    with torch.autocast("cpu", torch.bfloat16):
        found = mel(wave)
    torch.testing.assert_close(found, mel(wave), rtol=0, atol=0)


def test_triangles_have_an_area_of_one():
    filters = slaney_filters(4, 8000, 16_000)
    torch.testing.assert_close(filters.sum(dim=0) * 16_000 / 8000, torch.ones(4), rtol=0.01, atol=0)
