"""Recordings and their transcripts: what a data set of speech is once it is open."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .audio import read_audio

LOUDEST = 2**15  # what 1 is as a whole number of 16 bits, as WAV files have it
TAIL = 64  # bytes at the end of a file that its fingerprint sees


@dataclass(frozen=True)
class Recording:
    """A recording, or a part of one.

    Attributes:
        path: Its file.
        text: What is said, in plain words.
        speaker: Who says it; "" if nobody knows.
        seconds: How long it is.
        begin: Where in the file it begins, in seconds.
        end: Where it ends; None for the end of the file.
        line: Of the manifest, from 1; 0 where there is none.
        written: What is said, as the transcript has it, with signs and capitals.
    """

    path: str
    text: str
    speaker: str
    seconds: float
    begin: float = 0.0
    end: float | None = None
    line: int = 0
    written: str = ""

    @property
    def name(self) -> str:
        """What people find it by."""
        return f"{self.path} from {self.begin:g} s" if self.begin else self.path


@dataclass(frozen=True, eq=False)
class Recordings:
    """One half of a data set.

    Attributes:
        rows: The recordings.
        sample_rate: Samples of a second.
        stored: Each as whole numbers of 16 bits, where all are kept in memory.
    """

    rows: Sequence[Recording]
    sample_rate: int
    stored: Sequence[NDArray[np.int16]] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        """A wave (S,), float32.

        Raises:
            CorruptAudio: If the file cannot be read.
        """
        if self.stored is not None:
            return torch.from_numpy(self.stored[index]).float() / LOUDEST
        row = self.rows[index]
        return read_audio(row.path, self.sample_rate, row.begin, row.end)

    def path(self, index: int) -> str:
        """What a recording is called."""
        return self.rows[index].name

    @property
    def seconds(self) -> float:
        """How long all of them are together."""
        return sum(row.seconds for row in self.rows)

    def some(self, indices: Sequence[int]) -> Recordings:
        """A part of the half."""
        stored = None if self.stored is None else [self.stored[i] for i in indices]
        return replace(self, rows=[self.rows[i] for i in indices], stored=stored)


@dataclass(frozen=True, eq=False)
class Voices:
    """A data set that is open.

    Attributes:
        name: For people.
        train: To learn from.
        test: To be judged by.
        fingerprint: Of names, texts and files.
    """

    name: str
    train: Recordings
    test: Recordings
    fingerprint: str

    @property
    def sizes(self) -> tuple[int, int]:
        """How many recordings there are to learn from, and to be judged by."""
        return len(self.train), len(self.test)


def fingerprint(root: Path, halves: Sequence[Sequence[Recording]]) -> str:
    """A few letters that are others for other texts, parts or files; of a file its name, its size and its end."""
    digest = hashlib.blake2b(digest_size=8)
    known: dict[str, bytes] = {}
    for half in halves:
        for row in half:
            if row.path not in known:
                known[row.path] = _look(row.path)
            said = f"\n{os.path.relpath(row.path, root)} {row.begin} {row.end} {row.speaker} {row.text} "
            digest.update(said.encode("utf-8", "surrogatepass") + known[row.path])
        digest.update(b"\n\n")
    return digest.hexdigest()


def _look(path: str) -> bytes:
    try:
        if not os.path.isfile(path):  # a pipe would never end
            return b"no file"
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL))
            return f"{size} ".encode() + file.read()
    except (OSError, ValueError):  # the latter of names that no file can have
        return b"cannot be read"
