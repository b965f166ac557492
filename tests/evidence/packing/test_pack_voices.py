"""Voices in few bytes: what is read again is what was heard, rounded, with a frame between any two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest


@pytest.fixture
def voices(script: Any) -> Any:
    return script("packing.pack_voices")


def smooth(random: np.random.Generator, frames: int, bands: int) -> Any:
    """Features (frames, bands) that a picture keeps well."""
    time, band = np.arange(frames)[:, None] / frames, np.arange(bands) / bands
    phase = random.uniform(0, 6)
    return (-4 + 4 * np.sin(6 * time + phase) * np.cos(4 * band + phase)).astype(np.float32)


def test_what_is_halved_is_within_half_a_step_of_the_mean_of_two_frames(voices: Any):
    random = np.random.default_rng()
    features = random.uniform(-13, 9, (2 * random.integers(3, 40), voices.BANDS)).astype(np.float32)
    means = features.reshape(-1, 2, voices.BANDS).mean(axis=1)
    found = voices.FLOOR + voices.STEP * voices.halved(features).astype(np.float64)
    assert found.shape == means.shape
    assert np.abs(found - means).max() <= voices.STEP / 2 + 1e-4


def test_between_any_two_frames_is_their_mean(voices: Any):
    random = np.random.default_rng()
    frames = random.integers(0, 256, (random.integers(3, 40), voices.BANDS)).astype(np.uint8)
    found = voices.doubled(frames)
    np.testing.assert_array_equal(found[::2], frames)
    np.testing.assert_array_equal(found[1:-1:2], (frames[:-1].astype(int) + frames[1:]) // 2)
    np.testing.assert_array_equal(found[-1], found[-2])


def test_silence_is_the_floor_and_nothing_is_above_what_a_byte_holds(voices: Any):
    features = np.concatenate([np.full((2, voices.BANDS), -1e9), np.full((2, voices.BANDS), 1e9)]).astype(np.float32)
    assert voices.halved(features).tolist() == [[0] * voices.BANDS, [255] * voices.BANDS]


def test_rows_get_their_own_features(voices: Any, tmp_path: Path):
    random = np.random.default_rng()
    lengths = random.integers(20, 3 * voices.ACROSS, 3).tolist()  # more than a strip
    parts = [voices.halved(smooth(random, 2 * n, voices.BANDS)) for n in lengths]
    rows = [{"speaker": "one", "text": "a", "frames": 2 * n} for n in lengths]
    size = voices.write_packed(tmp_path, rows, parts, quality=90)
    assert size == (tmp_path / "voices.webp").stat().st_size
    told, found = voices.read_packed(tmp_path)
    assert told == rows
    for part, features in zip(parts, found, strict=True):
        off = features.astype(int) - voices.doubled(part)
        assert off.shape == (2 * len(part), voices.BANDS)
        assert np.abs(off).mean() < 2


def test_every_speaker_gives_the_same_share_of_lines_every_time(voices: Any):
    names = [name for name, count in (("one", 40), ("two", 20)) for _ in range(count)]
    lines = [voices.Line(Path("a.ogg"), name, float(n), None, str(n)) for n, name in enumerate(names)]
    chosen = voices.some_of(lines, 0.25)
    assert [sum(line.speaker == name for line in chosen) for name in ("one", "two")] == [10, 5]
    assert chosen == voices.some_of(lines, 0.25)
    assert [line.begin for line in chosen] == sorted(line.begin for line in chosen)
