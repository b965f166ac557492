"""A recording heard as it comes, in memory of one size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from ...models.speech import Conformer
from .decoding import greedy
from .hearing import Ear
from .text import BLANK, SPACE, Spelling

TOKENS = 16  # that are computed together: words come at most 0.64 s late


class Listener:
    """Hears waves in pieces of any size, and says the words that are whole.

    Pieces are put together to blocks of one size before anything is computed, so what is heard does not depend on how
    the recording was cut. It is what the network hears in the whole recording, token for token.

    Args:
        network: A causal one, in evaluation mode.
        ear: Its features, normalised by the corpus.
        spelling: Its pieces.

    Attributes:
        numbers: The likeliest piece of every token of the last block.

    Raises:
        ValueError: If the network cannot hear a recording as it comes.
    """

    def __init__(self, network: Conformer, ear: Ear, spelling: Spelling) -> None:
        if not ear.by_corpus:
            raise ValueError(
                "stream: expected features normalised by the corpus, got those of a network that hears the whole "
                "recording first; train one with --model-arg causal=true"
            )
        self.network, self.ear, self.spelling = network, ear, spelling
        self.stream = network.begin()
        self.device = network.head.weight.device
        self.block = 4 * TOKENS * ear.mel.hop
        self.numbers: list[int] = []
        self._wave = torch.zeros(0)
        self._heard = 0  # samples so far
        self._last, self._word = BLANK, ""

    def hear(self, wave: Tensor) -> list[str]:
        """The words that are whole with some more samples (S,) at the ear's rate."""
        self._heard += len(wave)
        self._wave = torch.cat((self._wave, wave.cpu()))
        overlap = self.ear.mel.length - self.ear.mel.hop
        words: list[str] = []
        self.numbers = []
        while len(self._wave) >= self.block + overlap:
            words += self._more(self._wave[: self.block + overlap])
            self._wave = self._wave[self.block :].clone()
        return words

    def end(self) -> list[str]:
        """The words that are left; what was too short to be heard at all is filled up with silence."""
        self.numbers = []
        missing = max(0, self.ear.least - self._heard)
        wave = torch.cat((self._wave, torch.zeros(missing)))
        words = self._more(wave) if self.ear.mel.frames(len(wave)) else []
        last, self._word = self._word.strip(), ""
        return [*words, *([last] if last else [])]

    @torch.no_grad()
    def _more(self, wave: Tensor) -> list[str]:
        features = self.ear.normalized(self.ear.mel(wave[None].to(self.device)))
        logits, self.stream = self.network.hear(features, self.stream)
        numbers = logits[0].argmax(dim=-1).tolist()
        self.numbers += numbers
        text = "".join(self.spelling.pieces[number - 1] for number in greedy(numbers, self._last))
        self._last = numbers[-1] if numbers else self._last
        *words, self._word = (self._word + text).replace(SPACE, " ").split(" ")
        return [word for word in words if word]


def words_of(listener: Listener, pieces: Iterable[Tensor]) -> Iterator[str]:
    """Words, each as soon as it is whole."""
    for piece in pieces:
        yield from listener.hear(piece)
    yield from listener.end()
