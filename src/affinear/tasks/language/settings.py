"""What can be set about language, beside what the engine's recipe says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ...train import settings
from ...train.settings import Check, Settings
from .reading import DOCUMENTS


@dataclass(frozen=True)
class LanguageSettings(Settings):
    """How text becomes rows of tokens.

    Attributes:
        context: Tokens of a row, which the network sees at once; None for 1,024, or what a made-up puzzle has.
        tokenizer: "train" for a byte-level BPE learnt from the corpus, "bytes", or the file of one (tokenizer.json).
        vocabulary: Tokens of a BPE that is learnt.
        documents: What of a text file is one document: "file", "line" or "paragraph".
        text_field: The field of JSON lines, parquet or a data set that holds the text.
        held_out: Where files do not say what is to be judged by: one document in so many.
        test_rows: The most rows that are judged; None for all.
        test_batch: Rows that are judged at once, over all processes.
    """

    kind: ClassVar[str] = "settings of language"
    free: ClassVar[tuple[str, ...]] = ("test_batch",)
    bound: ClassVar[tuple[str, ...]] = ("tokenizer", "vocabulary")

    context: int | None = None
    tokenizer: str = "train"
    vocabulary: int = 16_384
    documents: str = "file"
    text_field: str = "text"
    held_out: int = 100
    test_rows: int | None = None
    test_batch: int = 16

    checks: ClassVar[Mapping[str, Check]] = {
        "context": settings.whole(2, optional=True),
        "tokenizer": settings.text(),
        "vocabulary": settings.whole(257),
        "documents": settings.one_of(DOCUMENTS),
        "text_field": settings.text(),
        "held_out": settings.whole(2),
        "test_rows": settings.whole(1, optional=True),
        "test_batch": settings.whole(1),
    }


@dataclass(frozen=True)
class Speaking(Settings):
    """What `affinear predict` can be told.

    Attributes:
        tokens: How many tokens a text goes on for at most.
        temperature: 0 for the likeliest token each time, higher for more surprising ones.
        top_k: Of how many of the likeliest tokens to choose; None for all.
        seed: Of what is chosen.
    """

    kind: ClassVar[str] = "options of language"
    tokens: int = 128
    temperature: float = 0.8
    top_k: int | None = 50
    seed: int = 0

    checks: ClassVar[Mapping[str, Check]] = {
        "tokens": settings.whole(1),
        "temperature": settings.at_least_0(),
        "top_k": settings.whole(1, optional=True),
        "seed": settings.whole(0),
    }
