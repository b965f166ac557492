"""What can be set about speech, beside what the engine's recipe says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ...train import settings
from ...train.settings import Check, Settings

TOKENS = ("letters", "bpe")
NORMALIZATIONS = ("recording", "corpus")


@dataclass(frozen=True)
class Hearing(Settings):
    """How recordings become batches, what texts are spelled with, and how recordings are varied.

    The recipe's `batch_size` is how many recordings a batch has at most; `batch_seconds` is how long they are together.

    Attributes:
        tokens: What texts are spelled with: "letters", or "bpe" for pieces of several letters.
        vocabulary: How many pieces "bpe" has.
        alphabet: The letters of texts; None for all that the training half has.
        sample_rate: Samples of a second that recordings are brought to.
        bands: Bands of the features.
        normalization: What features are brought to mean 0 and spread 1 by: "recording", each by itself, or "corpus", by
            numbers of the training half, as a network needs that hears recordings as they come; None for what suits the
            network.
        batch_seconds: Seconds of a batch at most, padding included, over all processes.
        longest: Recordings of more seconds are not learnt from.
        speeds: How fast recordings are played, each as likely as the others.
        band_masks: Stripes of bands that are left out of every training recording.
        band_width: Bands that a stripe has at most.
        time_masks: Stripes of time that are left out of every training recording.
        time_share: Share of a recording that such a stripe has at most.
        test_batch: Recordings that are judged at once, over all processes.
        test_split: The half to be judged by, such as "test-clean"; None for the first that is there of dev-clean,
            validation, test and the like.
        memory: Whether all recordings are decoded once and kept.
    """

    kind: ClassVar[str] = "settings of speech"
    free: ClassVar[tuple[str, ...]] = ("memory", "test_batch")
    bound: ClassVar[tuple[str, ...]] = ("tokens", "vocabulary", "alphabet", "sample_rate", "bands", "normalization")

    tokens: str = "letters"
    vocabulary: int = 256
    alphabet: str | None = None
    sample_rate: int = 16_000
    bands: int = 80
    normalization: str | None = None
    batch_seconds: float = 320.0
    longest: float = 35.0
    speeds: tuple[float, ...] = (0.9, 1.0, 1.1)
    band_masks: int = 2
    band_width: int = 27
    time_masks: int = 10
    time_share: float = 0.05
    test_batch: int = 16
    test_split: str | None = None
    memory: bool = False

    checks: ClassVar[Mapping[str, Check]] = {
        "tokens": settings.one_of(TOKENS),
        "vocabulary": settings.whole(2),
        "alphabet": settings.text(optional=True),
        "sample_rate": Check("a whole number from 1000 to 384000", lambda n: _between(n, 1000, 384_000)),
        "bands": Check("a whole number from 7 to 512", lambda n: _between(n, 7, 512)),
        "normalization": settings.one_of(NORMALIZATIONS, optional=True),
        "batch_seconds": settings.more_than_0(),
        "longest": settings.more_than_0(),
        "speeds": Check(
            "numbers from 0.5 to 2",
            lambda value: settings.numbers(None, False).good(value) and all(0.5 <= x <= 2 for x in value),
            lambda text: tuple(float(part) for part in text.split(",")),
        ),
        "band_masks": settings.whole(0),
        "band_width": settings.whole(0),
        "time_masks": settings.whole(0),
        "time_share": settings.share(),
        "test_batch": settings.whole(1),
        "test_split": settings.text(optional=True),
        "memory": settings.truth(),
    }


@dataclass(frozen=True)
class Writing(Settings):
    """What `affinear predict` can be told.

    Attributes:
        beam: Texts that are kept on the way; 0 takes the likeliest piece of every token.
        lm: A language model: an ARPA file, or a text whose words are counted; needs a beam.
        lm_weight: Weight of its logarithms.
        word_bonus: Added for every word, since a language model likes short texts.
    """

    kind: ClassVar[str] = "options of speech"

    beam: int = 0
    lm: str | None = None
    lm_weight: float = 0.5
    word_bonus: float = 0.5

    checks: ClassVar[Mapping[str, Check]] = {
        "beam": settings.whole(0),
        "lm": settings.text(optional=True),
        "lm_weight": settings.at_least_0(),
        "word_bonus": Check("a number", settings.is_number),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lm is not None and self.beam == 0:
            raise ValueError("lm: expected a beam to choose from, such as beam=16, got none")


def _between(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
