"""Recordings that fit into one window of a recogniser, which hears no more than that at once."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from torch import Tensor

from ...speech.audio import CorruptAudio
from ...speech.recordings import Recording, Recordings, Voices
from ...speech.samples import real_speed

BEYOND = 0.01  # seconds that rounding may add when a recording is brought to another sample rate


@dataclass(frozen=True, eq=False)
class Windows(Recordings):
    """Those of one half that fit.

    Attributes:
        most: Samples of a window.
        left: How many recordings of the half are longer and were left out.
    """

    most: int = 0
    left: int = 0

    def __getitem__(self, index: int) -> Tensor:
        """A wave (S,), float32, no longer than a window.

        Raises:
            CorruptAudio: If the file cannot be read, or is longer than a window, whatever its manifest says.
        """
        wave = super().__getitem__(index)
        if len(wave) > self.most + BEYOND * self.sample_rate:
            raise CorruptAudio(
                f"{self.path(index)}: expected {self.rows[index].seconds:.1f} s, as its manifest says, got "
                f"{len(wave) / self.sample_rate:.1f} s, which no window holds"
            )
        return wave[: self.most]


def windows_of(half: Recordings, most: int, slowest: float = 1.0) -> Windows:
    """The recordings of a half that fit into a window of so many samples, even where they are played slowest."""
    held = int(most * real_speed(slowest))
    longest = held / half.sample_rate + BEYOND
    chosen = [index for index, row in enumerate(half.rows) if row.seconds <= longest]
    some = half.some(chosen)
    return Windows(some.rows, half.sample_rate, some.stored, held, len(half) - len(chosen))


def as_spoken(data: Voices) -> Voices:
    """The data set with the texts to learn from as a recogniser writes them: with signs and capitals, if there are."""
    train = replace(data.train, rows=[replace(row, text=_written(row)) for row in data.train.rows])
    digest = hashlib.blake2b("\n".join(row.text for row in train.rows).encode(), digest_size=4).hexdigest()
    return replace(data, train=train, fingerprint=f"{data.fingerprint}-{digest}")


def _written(row: Recording) -> str:
    """The transcript itself; its plain words where all of it is in capitals, as LibriSpeech's are."""
    text = " ".join(row.written.encode("utf-8", "ignore").decode("utf-8").split())
    return row.text if not text or text.isupper() else text
