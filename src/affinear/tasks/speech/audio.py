"""Recordings out of files: WAV by Python itself, everything else by soundfile where it is installed."""

from __future__ import annotations

import os
import wave
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .resampling import Resampler, resample

LONGEST = 4 * 3600  # seconds of one recording; packed silence takes next to no room in a file
BLOCK = 2**16  # samples that are read at a time where a recording is heard as it comes
RATES = (1_000, 768_000)  # samples of a second that a recording may have; a head that tells others is damaged
UNTOLD = 2**62  # samples and more, where libsndfile was not told how many
SUFFIXES = (".wav", ".flac", ".ogg", ".oga", ".opus", ".mp3", ".aif", ".aiff", ".au", ".caf", ".w64")

Samples = NDArray[np.float32]


class CorruptAudio(ValueError):
    """A recording that cannot be read; the message says which, and why."""


def read_audio(path: str | Path, sample_rate: int, begin: float = 0.0, end: float | None = None) -> Tensor:
    """A recording, or a part of it, as one channel (S,) in float32 at a sample rate; several channels are averaged.

    Args:
        path: WAV with whole numbers of 8 to 32 bits, or anything that soundfile reads.
        sample_rate: Samples of a second.
        begin: Where the part begins, in seconds.
        end: Where it ends; None for the end of the recording.

    Raises:
        CorruptAudio: If it cannot be read, or is empty.
    """
    rate, blocks = open_audio(path, begin, end)
    found, left = list[Samples](), LONGEST * rate
    for block in blocks:
        found.append(block)
        left -= len(block)
        if left < 0:
            raise CorruptAudio(f"{path}: expected at most {LONGEST / 3600:g} hours of sound at once; cut it into parts")
    if not found:
        raise CorruptAudio(f"{path}: expected a recording, got one without a sample")
    return resample(torch.from_numpy(np.concatenate(found)), rate, sample_rate)


def follow_audio(path: str | Path, sample_rate: int) -> Iterator[Tensor]:
    """The same piece by piece, never more than a few seconds in memory."""
    rate, blocks = open_audio(path)
    resampler, empty = Resampler(rate, sample_rate), True
    for block in blocks:
        empty = False
        yield resampler(torch.from_numpy(block))
    if empty:
        raise CorruptAudio(f"{path}: expected a recording, got one without a sample")
    yield resampler.rest()


def seconds_of(path: str | Path) -> float:
    """How long a recording is, by the head of its file.

    Raises:
        CorruptAudio: If it cannot be read.
    """
    file = _open_wave(path)
    if file is None:
        info = _with_soundfile(path, lambda soundfile: soundfile.info(str(path)))
        _check_told(path, info.frames)
        return info.frames / _rate(path, info.samplerate)
    with file:
        # A head that was written into a pipe tells of more than there is.
        room = os.path.getsize(path) // (file.getsampwidth() * file.getnchannels())
        return min(file.getnframes(), room) / _rate(path, file.getframerate())


def open_audio(path: str | Path, begin: float = 0.0, end: float | None = None) -> tuple[int, Iterator[Samples]]:
    """The sample rate of a recording, and its samples as one channel, block by block.

    Raises:
        CorruptAudio: If it cannot be read.
    """
    file = _open_wave(path)  # the blocks close it
    if file is None:
        return _by_soundfile(path, begin, end)
    try:
        rate, width = _rate(path, file.getframerate()), file.getsampwidth()
        if width not in (1, 2, 3, 4):
            raise CorruptAudio(f"{path}: expected samples of 8 to 32 bits, got {8 * width}")
    except CorruptAudio:
        file.close()
        raise
    return rate, _wave_blocks(file, path, round(begin * rate), None if end is None else round(end * rate))


def _open_wave(path: str | Path) -> wave.Wave_read | None:
    """A WAV file that Python can read, or None.

    Raises:
        CorruptAudio: If it is no regular file.
    """
    _check_file(path)
    try:
        return wave.open(str(path), "rb")
    except (wave.Error, EOFError, OSError, RuntimeError):  # the last of chunks that reach beyond the file
        return None


def _check_file(path: str | Path) -> None:
    """Raise CorruptAudio unless it is a regular file: a pipe would never end."""
    try:
        if Path(path).is_file():
            return
        kind = "a folder" if Path(path).is_dir() else "no file" if Path(path).exists() else "nothing of that name"
    except (OSError, ValueError):  # a name too long for any file, or of letters that none can have
        kind = "a name that no file can have"
    raise CorruptAudio(f"{path}: expected a recording, got {kind}")


def _check_told(path: str | Path, samples: int) -> None:
    """Raise CorruptAudio for a head that does not tell how many samples there are: soundfile cannot read on then."""
    if samples >= UNTOLD:
        raise CorruptAudio(
            f"{path}: expected a head that tells how long the recording is, got one that was written into a pipe; "
            "write the file anew, as ffmpeg -i OLD NEW does"
        )


def _rate(path: str | Path, rate: int) -> int:
    """Samples of a second as a file's head tells them, if they can be."""
    if not RATES[0] <= rate <= RATES[1]:
        raise CorruptAudio(f"{path}: expected {RATES[0]:,} to {RATES[1]:,} samples a second, got {rate:,}")
    return rate


def _wave_blocks(file: wave.Wave_read, path: str | Path, first: int, last: int | None) -> Iterator[Samples]:
    with file:
        width, channels, count = file.getsampwidth(), file.getnchannels(), file.getnframes()
        last = count if last is None else min(count, last)
        if first:
            file.setpos(min(first, count))
        block = max(1, BLOCK // channels)  # a head may tell of 65,535
        for start in range(first, last, block):
            content = file.readframes(min(block, last - start))
            if not content:
                if start == first:
                    raise CorruptAudio(f"{path}: expected {count:,} samples, as its head says, got none")
                return  # cut off while it was written; what is there counts
            content = content[: len(content) // (width * channels) * width * channels]
            yield as_numbers(content, width).reshape(-1, channels).mean(axis=1, dtype=np.float32)


def as_numbers(content: bytes, width: int) -> Samples:
    """Whole numbers of so many bytes, as a WAV file has them, as numbers from -1 to 1.

    Examples:
        >>> as_numbers(bytes([0, 128, 255]), 1).tolist(), as_numbers(bytes([0, 128, 255, 127]), 2).round(3).tolist()
        ([-1.0, 0.0, 0.9921875], [-1.0, 1.0])
    """
    if width == 1:  # the only one without a sign
        return ((np.frombuffer(content, np.uint8).astype(np.int16) - 128) / 128).astype(np.float32)
    if width == 3:
        parts = np.frombuffer(content, np.uint8).reshape(-1, 3)
        whole = np.zeros((len(parts), 4), np.uint8)
        whole[:, 1:] = parts
        return (whole.view("<i4")[:, 0] / 2**31).astype(np.float32)
    return (np.frombuffer(content, f"<i{width}") / 2.0 ** (8 * width - 1)).astype(np.float32)


def _by_soundfile(path: str | Path, begin: float, end: float | None) -> tuple[int, Iterator[Samples]]:
    file: Any = _with_soundfile(path, lambda soundfile: soundfile.SoundFile(str(path)))
    try:
        _check_told(path, int(file.frames))
        rate = _rate(path, int(file.samplerate))
    except CorruptAudio:
        file.close()
        raise

    def blocks() -> Iterator[Samples]:
        with file:
            first, last = round(begin * rate), None if end is None else round(end * rate)
            block = max(1, BLOCK // int(file.channels))
            if first:
                _with_soundfile(path, lambda _: file.seek(min(first, len(file))))
            while last is None or first < last:
                wanted = block if last is None else min(block, last - first)
                found: Samples = _with_soundfile(path, lambda _: file.read(wanted, "float32", always_2d=True))  # noqa: B023
                if not len(found):
                    return
                if not np.isfinite(found).all():
                    raise CorruptAudio(f"{path}: expected numbers, got samples that are not finite")
                first += len(found)
                yield found.mean(axis=1, dtype=np.float32)

    return rate, blocks()


def _with_soundfile(path: str | Path, use: Callable[[Any], Any]) -> Any:
    try:
        import soundfile
    except (ImportError, OSError):  # the latter where its own library is missing
        raise CorruptAudio(
            f"{path}: expected WAV with whole numbers, which needs no other package, got another kind; "
            "pip install 'affinear[speech]' reads it"
        ) from None
    try:
        return use(soundfile)
    except MemoryError:
        raise
    except Exception as error:  # damaged files make it raise several kinds
        raise CorruptAudio(f"{path}: cannot be read as a recording ({str(error).strip().splitlines()[0]})") from error
