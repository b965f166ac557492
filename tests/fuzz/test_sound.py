"""Recordings and manifests, damaged and hostile: sound and its words, or a sentence."""

from __future__ import annotations

import io
import json
import os
import random
import struct
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from fuzzing import Tally, changed, damaged, for_a_while

from affinear.tasks.speech.audio import CorruptAudio, follow_audio, read_audio, seconds_of
from affinear.tasks.speech.ngram import NGrams
from affinear.tasks.speech.opening import open_voices

RATE = 8000
KINDS = (
    ("a.wav", "WAV", "PCM_16"),
    ("a.wav", "WAV", "FLOAT"),
    ("a.flac", "FLAC", "PCM_16"),
    ("a.ogg", "OGG", "VORBIS"),
    ("a.aiff", "AIFF", "PCM_24"),
    ("a.au", "AU", "ULAW"),
    ("a.w64", "W64", "PCM_16"),
    ("a.caf", "CAF", "PCM_16"),
)


def samples() -> list[tuple[str, bytes]]:
    """A tenth of a second in every kind of file."""
    noise = np.random.default_rng().normal(0, 0.1, RATE // 10)
    found: list[tuple[str, bytes]] = []
    for name, kind, inner in KINDS:
        file = io.BytesIO()
        soundfile.write(file, noise, RATE, inner, format=kind)
        found.append((name, file.getvalue()))
    for width, channels in ((1, 1), (3, 2), (4, 7)):
        file = io.BytesIO()
        with wave.open(file, "wb") as written:
            written.setparams((channels, width, RATE, 0, "NONE", ""))
            written.writeframes(bytes(width * channels * 100))
        found.append(("a.wav", file.getvalue()))
    return found


def claims() -> list[bytes]:
    """Heads of WAV files that say more than there is."""
    return [
        b"RIFF" + struct.pack("<I", size) + b"WAVEfmt " + struct.pack("<IHHIIHH", 16, kind, channels, rate, 0, 1, bits)
        + b"data" + struct.pack("<I", size) + bytes(64)
        for size in (0, 2**32 - 1)
        for kind in (1, 3, 0xFFFE)
        for channels in (0, 1, 65535)
        for rate in (0, 1, RATE, 2**32 - 1)
        for bits in (0, 8, 16, 64, 65535)
    ]  # fmt: skip


def test_hostile_recordings(tally: Tally, draw: random.Random, tmp_path: Path):
    whole, heads = samples(), claims()
    for name, content in whole:
        (tmp_path / name).write_bytes(content)
        assert len(read_audio(tmp_path / name, RATE)) >= 100
    for number in for_a_while():
        name, content = draw.choice(whole)
        content = draw.choice(heads) if number % 4 == 0 else damaged(draw, content)
        path = tmp_path / name
        path.write_bytes(content)
        what = f"{name} {content[:80]!r}"
        found, wave_ = tally.attempt(f"read {what}", lambda path=path: read_audio(path, RATE), CorruptAudio)
        if found and not bool(wave_.isfinite().all()):
            tally.failures.append(f"{what} became something that is not finite")
        tally.attempt(f"length {what}", lambda path=path: seconds_of(path), CorruptAudio)
        tally.attempt(f"follow {what}", lambda path=path: sum(map(len, follow_audio(path, RATE))), CorruptAudio)
    tally.check()


def rows(draw: random.Random, folder: Path) -> bytes:
    names = ["0.wav", "1.wav", "2.wav", "../x.wav", "/etc/passwd", "pipe.wav", "\x00", "\ud800", "x" * 5000, ""]
    lines: list[str] = []
    for number in range(4):
        row: Any = {"audio": f"{number % 3}.wav", "text": "a b", "speaker": "s", "begin": 0.0, "end": 0.01}
        if draw.random() < 0.4:
            row["audio"] = draw.choice(names)
        row = changed(draw, row) if draw.random() < 0.6 else row
        lines.append(json.dumps(row))
    if draw.random() < 0.2:
        lines.append(draw.choice(("[" * 100_000, "9" * 10_000, '{"audio": ' * 1000)))
    text = "\n".join(lines).encode()
    return damaged(draw, text) if draw.random() < 0.3 else text


@pytest.mark.filterwarnings("ignore")
def test_hostile_manifests(tally: Tally, draw: random.Random, tmp_path: Path):
    def read(spec: str, memory: bool) -> Any:
        data = open_voices(spec, sample_rate=RATE, test_split=None, memory=memory)
        for half in (data.train, data.test):
            for index in range(len(half)):
                try:
                    half[index]
                except CorruptAudio:
                    continue
        return data.fingerprint

    os.mkfifo(tmp_path / "pipe.wav")
    for number in range(3):
        soundfile.write(tmp_path / f"{number}.wav", np.zeros(RATE // 10), RATE)
    chapter = tmp_path / "libri" / "train" / "1" / "2"
    chapter.mkdir(parents=True)
    soundfile.write(chapter / "1-2-0.flac", np.zeros(RATE // 10), RATE)
    for _ in for_a_while():
        text = rows(draw, tmp_path)
        (tmp_path / "train.jsonl").write_bytes(text)
        what = f"manifest {text[:500]!r}"
        memory = draw.random() < 0.3
        tally.attempt(what, lambda memory=memory: read(str(tmp_path / "train.jsonl"), memory), ValueError)
        text = damaged(draw, b"1-2-0 HELLO THERE\n" * 3)
        (chapter / "1-2.trans.txt").write_bytes(text)
        tally.attempt(f"transcripts {text[:200]!r}", lambda: read(str(tmp_path / "libri"), False), ValueError)
        text = damaged(draw, b"\\data\\\nngram 1=2\n\\1-grams:\n-1 a -0.5\n-2 b\n\\2-grams:\n-1 a b\n\\end\\\n")
        (tmp_path / "lm.arpa").write_bytes(text)
        tally.attempt(f"n-grams {text[:200]!r}", lambda: NGrams.read(tmp_path / "lm.arpa"), ValueError)
    tally.check()
