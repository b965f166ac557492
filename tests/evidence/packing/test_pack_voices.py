"""Voices in few bytes: what is read again is what was heard, rounded, with a frame between any two."""

from __future__ import annotations

import bz2
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest


@pytest.fixture
def voices(script: Any) -> Any:
    return script("packing.pack_voices")


def test_what_is_unpacked_is_within_half_a_step_of_the_mean_of_two_frames(voices: Any):
    random = np.random.default_rng()
    features = random.uniform(-13, 20, (2 * random.integers(3, 40), voices.BANDS)).astype(np.float32)
    found = voices.FLOOR + voices.STEP * voices.unpack(voices.pack(features)).astype(np.float64)
    means = features.reshape(-1, 2, voices.BANDS).mean(axis=1)
    assert found.shape == features.shape
    assert np.abs(found[::2] - means).max() <= voices.STEP + 1e-4  # which is half of what is packed
    np.testing.assert_allclose(found[1:-1:2], (found[:-2:2] + found[2::2]) / 2, atol=1e-9)
    np.testing.assert_array_equal(found[-1], found[-2])


def test_silence_is_the_floor_and_nothing_is_above_what_a_byte_holds(voices: Any):
    features = np.concatenate([np.full((4, voices.BANDS), -1e9), np.full((4, voices.BANDS), 1e9)]).astype(np.float32)
    found = voices.unpack(voices.pack(features))
    assert found[:2].tolist() == np.zeros((2, voices.BANDS)).tolist()
    assert found[-1].tolist() == [2 * voices.HIGHEST] * voices.BANDS


def test_rows_get_their_own_features(voices: Any, tmp_path: Path):
    random = np.random.default_rng()
    lengths = random.integers(4, 30, 5).tolist()
    packed = [voices.pack(random.normal(0, 4, (n, voices.BANDS)).astype(np.float32)) for n in lengths]
    rows = [{"speaker": "one", "text": "a", "frames": 2 * (n // 2)} for n in lengths]
    (tmp_path / "voices.json").write_text(json.dumps(rows), encoding="utf-8")
    (tmp_path / "voices.bz2").write_bytes(bz2.compress(b"".join(part.tobytes() for part in packed)))
    told, found = voices.read_packed(tmp_path)
    assert told == rows
    for part, features in zip(packed, found, strict=True):
        np.testing.assert_array_equal(features, voices.unpack(part))


def test_every_speaker_gives_the_same_share_of_lines_every_time(voices: Any):
    names = [name for name, count in (("one", 40), ("two", 20)) for _ in range(count)]
    lines = [voices.Line(Path("a.ogg"), name, float(n), None, str(n)) for n, name in enumerate(names)]
    chosen = voices.some_of(lines, 0.25)
    assert [sum(line.speaker == name for line in chosen) for name in ("one", "two")] == [10, 5]
    assert chosen == voices.some_of(lines, 0.25)
    assert [line.begin for line in chosen] == sorted(line.begin for line in chosen)
