"""Transcripts in a recogniser's own tokens: those it is asked with, those of a text, and the one that ends it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ....linearizing.divergence import IGNORED
from ...language.spelling import Spelling
from ...speech.text import plain

BEGIN, TRANSCRIBE, TIMELESS = "<|startoftranscript|>", "<|transcribe|>", "<|notimestamps|>"


class Transcripts:
    """How a recogniser is asked for a transcript, and how it writes one.

    Args:
        spelling: Its tokens.
        prompt: What it is asked with.
        vocabulary: Tokens that it knows.
        most: Tokens of a transcript at most.

    Attributes:
        silent: (S,), int64, tokens that are no text and are never said.
    """

    def __init__(self, spelling: Spelling, prompt: Sequence[int], vocabulary: int, most: int) -> None:
        self.spelling, self.prompt, self.end, self.most = spelling, list(prompt), spelling.end, most
        unheard = (spelling.added | set(range(spelling.size, vocabulary))) - {self.end}
        self.silent = torch.tensor(sorted(unheard), dtype=torch.int64)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without prompt and end."""
        return self.spelling.encode([f" {text}"])[0]

    def decode(self, tokens: Sequence[int]) -> str:
        """The plain words of tokens."""
        return plain(self.written(tokens))

    def written(self, tokens: Sequence[int]) -> str:
        """The text of tokens, with signs and capitals."""
        return self.spelling.decode(tokens).strip()

    def asked(self, texts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """What a decoder is given (B, T), and what it is to say next (B, T): the text and the end; -100 elsewhere.

        Args:
            texts: (B, L), int64, tokens of texts.
            lengths: (B,), int64, how many each has.
        """
        prompt = torch.tensor(self.prompt, device=texts.device).expand(len(texts), -1)
        place = torch.arange(texts.shape[1] + 1, device=texts.device)
        told = F.pad(texts, (0, 1)).masked_fill(place == lengths[:, None], self.end)
        told = told.masked_fill(place > lengths[:, None], IGNORED)
        return torch.cat((prompt, texts), dim=1), F.pad(told, (len(self.prompt) - 1, 0), value=IGNORED)


def prompt_of(spelling: Spelling, language: str | None, many: bool) -> list[int]:
    """The tokens that ask for a transcript without times.

    Args:
        spelling: Of a recogniser.
        language: Of the recordings, such as "en".
        many: Whether it knows several, and has to be told.

    Raises:
        ValueError: If the language is missing, or one too many, or the tokenizer is not Whisper's.
    """
    if many and language is None:
        raise ValueError("language: expected that of the recordings, as the teacher knows several; --set language=en")
    if language is not None and not many:
        raise ValueError(f"language: expected none, as the teacher knows one alone, got {language!r}; leave it out")
    names = [BEGIN, *([f"<|{language}|>", TRANSCRIBE] if many else []), TIMELESS]
    found: list[int] = []
    for name in names:
        number = spelling.number_of(name)
        if number is None and name == f"<|{language}|>":
            raise ValueError(f"language: expected one that the teacher knows, such as en, got {language!r}")
        if number is None:
            raise ValueError(f"tokenizer: expected the token {name}, as Whisper's has, got none of that name")
        found.append(number)
    return found
