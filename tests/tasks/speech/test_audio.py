"""Recordings out of files, at any rate, whole or piece by piece."""

from __future__ import annotations

import builtins
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from affinear.tasks.speech.audio import CorruptAudio, follow_audio, read_audio, seconds_of
from affinear.tasks.speech.resampling import Resampler, resample

from .tiny import write


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("channels", [1, 2])
def test_wav_of_any_width_reads_as_soundfile_reads_it(tmp_path: Path, width: int, channels: int):
    samples = np.random.default_rng().uniform(-0.9, 0.9, 600)
    path = write(tmp_path / "a.wav", samples, 8000, width, channels)
    expected, rate = soundfile.read(path, dtype="float32", always_2d=True)
    assert rate == 8000
    torch.testing.assert_close(read_audio(path, 8000), torch.from_numpy(expected.mean(1)), atol=1e-6, rtol=0)
    assert seconds_of(path) == 600 / channels / 8000


@pytest.mark.parametrize(("name", "subtype"), [("a.wav", "PCM_24"), ("a.wav", "FLOAT"), ("a.flac", "PCM_16")])
def test_other_kinds_are_read_too(tmp_path: Path, name: str, subtype: str):
    samples = np.random.default_rng().uniform(-0.5, 0.5, 500).astype(np.float32)
    soundfile.write(tmp_path / name, samples, 16_000, subtype=subtype)
    torch.testing.assert_close(read_audio(tmp_path / name, 16_000), torch.from_numpy(samples), atol=2**-15, rtol=0)
    assert seconds_of(tmp_path / name) == 500 / 16_000


def test_a_part_of_a_recording(tmp_path: Path):
    samples = np.random.default_rng().uniform(-0.5, 0.5, 8000)
    wav, flac = write(tmp_path / "a.wav", samples), tmp_path / "a.flac"
    soundfile.write(flac, samples, 8000)
    for path in (wav, flac):
        whole, part = read_audio(path, 8000), read_audio(path, 8000, 0.25, 0.5)
        assert torch.equal(part, whole[2000:4000])


def test_what_is_no_recording_is_told_in_a_sentence(tmp_path: Path):
    (tmp_path / "broken.wav").write_bytes(b"RIFF")
    write(tmp_path / "empty.wav", [])
    soundfile.write(tmp_path / "nan.wav", np.full(10, np.nan, np.float32), 8000, subtype="FLOAT")
    for name, said in (
        ("broken.wav", "cannot be read"),
        ("empty.wav", "without a sample"),
        ("nan.wav", "not finite"),
        ("absent.wav", "nothing of that name"),
        (".", "a folder"),
    ):
        with pytest.raises(CorruptAudio, match=said) as refused:
            read_audio(tmp_path / name, 8000)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("rate", [0, 1, 2**31])
def test_a_head_with_a_rate_that_cannot_be_is_refused_before_it_fills_memory(tmp_path: Path, rate: int):
    path = write(tmp_path / "a.wav", np.zeros(100))
    content = bytearray(path.read_bytes())
    content[24:28] = rate.to_bytes(4, "little")
    path.write_bytes(content)
    for read in (lambda: read_audio(path, 16_000), lambda: seconds_of(path), lambda: list(follow_audio(path, 16_000))):
        with pytest.raises(CorruptAudio, match="samples a second, got"):
            read()


def test_a_head_that_was_written_into_a_pipe_does_not_make_a_recording_longer(tmp_path: Path):
    count = int(np.random.default_rng().integers(100, 2000))
    path = write(tmp_path / "a.wav", np.zeros(count))
    content = bytearray(path.read_bytes())
    content[4:8] = content[40:44] = b"\xff" * 4  # of the file, and of its samples
    path.write_bytes(content)
    assert len(read_audio(path, 8000)) == count
    assert seconds_of(path) == pytest.approx(count / 8000, abs=44 / 8000)


def test_a_flac_that_does_not_tell_its_length_is_refused_in_a_sentence(tmp_path: Path):
    path = tmp_path / "a.flac"
    soundfile.write(path, np.random.default_rng().uniform(-0.5, 0.5, 900), 8000)
    content = bytearray(path.read_bytes())
    content[21] &= 0xF0
    content[22:26] = bytes(4)
    path.write_bytes(content)
    for read in (lambda: read_audio(path, 8000), lambda: seconds_of(path), lambda: list(follow_audio(path, 8000))):
        with pytest.raises(CorruptAudio, match="written into a pipe; write the file anew"):
            read()


def test_without_soundfile_wav_is_read_and_the_rest_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = write(tmp_path / "a.wav", [0.5] * 10)
    soundfile.write(tmp_path / "a.flac", np.zeros(10), 8000)
    imported = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "soundfile":
            raise ImportError(name)
        return imported(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "soundfile")
    monkeypatch.setattr(builtins, "__import__", without)
    assert len(read_audio(path, 8000)) == 10
    with pytest.raises(CorruptAudio, match=r"affinear\[speech\]"):
        read_audio(tmp_path / "a.flac", 8000)


def tone_of(pitch: float, length: int, rate: int) -> torch.Tensor:
    return torch.sin(2 * math.pi * pitch * torch.arange(length, dtype=torch.float64) / rate).float()


@pytest.mark.parametrize(("before", "after"), [(8000, 16_000), (44_100, 16_000), (11_025, 16_000), (48_000, 8000)])
def test_a_tone_is_the_same_tone_at_another_rate(before: int, after: int):
    pitch = np.random.default_rng().uniform(100, 0.8 * min(before, after) / 2)
    tone = tone_of(pitch, before // 4, before)
    found = resample(tone, before, after)
    assert len(found) == -(-len(tone) * after // before)
    expected = tone_of(pitch, len(found), after)
    inside = slice(len(found) // 5, -len(found) // 5)  # silence before and after has an edge
    assert (found - expected)[inside].abs().max() < 1e-3


def test_what_a_lower_rate_cannot_hold_is_left_out():
    assert resample(tone_of(6000, 16_000, 16_000), 16_000, 8000)[1000:-1000].abs().max() < 1e-4


@pytest.mark.parametrize(("before", "after"), [(11_025, 16_000), (44_100, 16_000), (7919, 8000), (8000, 8000)])
def test_pieces_of_any_size_give_the_same_samples(before: int, after: int, tmp_path: Path):
    random = np.random.default_rng()
    wave = torch.randn(int(random.integers(1, 5000)))
    resampler, pieces, rest = Resampler(before, after), [], wave
    while len(rest):
        size = int(random.integers(1, 900))
        pieces.append(resampler(rest[:size]))
        rest = rest[size:]
    torch.testing.assert_close(torch.cat((*pieces, resampler.rest())), resample(wave, before, after), atol=1e-6, rtol=0)
    path = write(tmp_path / "a.wav", wave.numpy() / 5, before)
    torch.testing.assert_close(torch.cat(list(follow_audio(path, after))), read_audio(path, after), atol=1e-6, rtol=0)


def test_a_recording_of_a_sample_at_a_time_gives_the_same_samples():
    wave = torch.randn(60)
    resampler = Resampler(11_025, 16_000)
    pieces = [resampler(piece) for piece in wave.split(1)] + [resampler.rest()]
    assert torch.equal(torch.cat(pieces), resample(wave, 11_025, 16_000))


LONG = """
from pathlib import Path
import torch
from affinear.tasks.speech.resampling import resample

def held(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))

wave = torch.zeros(2_000_000)
before = held("VmRSS")
resample(wave, 11_025, 16_000)
print((held("VmHWM") - before) // 1024)
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells what a process held at most")
def test_three_minutes_at_another_rate_take_little_more_than_themselves():
    told = subprocess.run([sys.executable, "-c", LONG], capture_output=True, text=True, check=True)
    assert int(told.stdout) < 200  # megabytes; in a process whose memory is not in shreds yet


def test_a_constant_stays_what_it_is():
    found = resample(torch.full((4000,), 0.5), 11_025, 16_000)
    torch.testing.assert_close(found[500:-500], torch.full_like(found[500:-500], 0.5), atol=1e-5, rtol=0)
