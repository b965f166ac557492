"""`--task speech`: what is said in a recording."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from ...models import making
from ...models.speech import Conformer, LogMel
from ...train.task import Answer, Job, Measure, Setup, Task, Trained
from ..fewer import fewer
from .audio import SUFFIXES, CorruptAudio, follow_audio, read_audio
from .decoding import Beam, beam_search
from .hearing import LEAST, Ear
from .listening import Listener, words_of
from .ngram import NGrams
from .opening import open_voices
from .recipes import CTC_100H, RECIPES, SMALL
from .recordings import Voices
from .settings import Hearing, Writing
from .text import BLANK, LONGEST_PIECE, MOST_PIECES, SPACE, Spelling
from .work import SpeechWork, learnable, spelling_of

LOOKED_AT = 200  # training recordings, evenly among all, whose features tell mean and spread
TOKEN = 0.04  # seconds
MOST_AT_ONCE, LONGEST = 2**16, 1e6  # recordings and seconds of a batch that a file of weights may ask for
NOTHING_HEARD = "(nothing)"
TOO_LONG = "it does not fit into memory in one piece; cut it, or take a network with a linear mechanism"


class Speech(Task[Voices, Hearing]):
    """What is said in a recording: a Conformer with CTC, whole recordings or as they come."""

    name: ClassVar[str] = "speech"
    about: ClassVar[str] = "what is said in a recording"
    unit: ClassVar[str] = "seconds of audio"
    samples: ClassVar[str] = "recordings"
    endings: ClassVar[tuple[str, ...]] = SUFFIXES
    fits_few: ClassVar[bool] = True
    parts: ClassVar[str] = "speakers"
    metric: ClassVar[Measure] = Measure("wer", "WER", higher_is_better=False)
    measures: ClassVar[tuple[Measure, ...]] = (
        metric,
        Measure("cer", "CER", higher_is_better=False),
        Measure("wrong", "wrong words", higher_is_better=False),
        Measure("missed", "missed words", higher_is_better=False),
        Measure("extra", "extra words", higher_is_better=False),
    )
    settings = Hearing
    options = Writing

    @property
    def recipes(self) -> Mapping[str, Setup]:
        """The published recipes by name, and one for few hours."""
        return MappingProxyType({name: Setup(self, *parts) for name, parts in RECIPES.items()})

    def preset(self, model: str, name: str | None) -> Setup:
        """The recipe of this name, or the one for a hundred hours."""
        return self.named(name or CTC_100H)

    def open(self, spec: str, settings: Hearing) -> Voices:
        """Manifests or LibriSpeech's folders, open."""
        return open_voices(
            spec, sample_rate=settings.sample_rate, test_split=settings.test_split, memory=settings.memory
        )

    def settle(self, job: Job[Hearing], data: Voices) -> Job[Hearing]:
        """The job with pieces of text and normalisation decided."""
        settings, causal = job.settings, bool(job.model_args.get("causal", False))
        normalization = settings.normalization or ("corpus" if causal else "recording")
        if causal and normalization == "recording":
            raise ValueError(
                "normalization: expected 'corpus', as a causal network does not know the recording to come, got "
                "'recording'"
            )
        texts = [row.text for row in data.train.rows]
        spelling = _spelling(settings, texts)
        _check_letters(spelling, data)
        facts: dict[str, Any] = {"pieces": list(spelling.pieces), "merges": [list(pair) for pair in spelling.merges]}
        if normalization == "corpus":
            facts |= statistics(data, settings)
        settings = dataclasses.replace(settings, normalization=normalization)
        return dataclasses.replace(job, settings=settings, facts=facts)

    def network(self, job: Job[Hearing], *, room: int = making.MOST_NUMBERS) -> nn.Module:
        """The Conformer of a settled job."""
        for name in ("num_tokens", "in_features"):
            if name in job.model_args:
                raise ValueError(
                    f"model_args: {name}: expected what texts and settings say, got a number; leave it out"
                )
        making.check_name(job.model)
        if "num_tokens" not in making.takes(job.model):
            raise ValueError(f"model: expected a network that hears, such as conformer_small, got {job.model!r}")
        own = {"num_tokens": len(job.facts["pieces"]) + 1, "in_features": job.settings.bands}
        network = making.make(job.model, {**job.model_args, **own}, room=room)
        if not isinstance(network, Conformer):
            raise ValueError(f"model: expected a network that hears, such as conformer_small, got {job.model!r}")
        return network

    def work(self, job: Job[Hearing], data: Voices, device: torch.device) -> SpeechWork:
        """A settled job at work."""
        return SpeechWork(job, data, device)

    def check_job(self, job: Job[Hearing]) -> None:
        """Raise ValueError if a job that was read from a file lacks a fact, or asks for what no user would."""
        settings, facts = job.settings, job.facts
        pieces, merges = _listed(facts.get("pieces")), _listed(facts.get("merges"))
        if not 0 < len(pieces) <= MOST_PIECES or not all(_is_piece(piece) for piece in pieces):
            raise ValueError(f"pieces: expected pieces of text in a list, got {making.short(facts.get('pieces'))}")
        pairs = [_listed(pair) for pair in merges]
        if len(merges) > MOST_PIECES or not all(len(pair) == 2 and all(map(_is_piece, pair)) for pair in pairs):
            raise ValueError(f"merges: expected pairs of pieces in a list, got {making.short(facts.get('merges'))}")
        if settings.normalization is None:
            raise ValueError("settings: normalization: expected what the weights were trained with, got none")
        if settings.normalization == "corpus":
            for name, least in (("mean", -math.inf), ("std", 0.0)):
                told = _listed(facts.get(name))
                good = all(isinstance(x, (int, float)) and math.isfinite(x) and x > least for x in told)
                if len(told) != settings.bands or not good:
                    raise ValueError(f"{name}: expected a number for each band, got {making.short(facts.get(name))}")
        if max(job.recipe.batch_size, settings.test_batch) > MOST_AT_ONCE or settings.batch_seconds > LONGEST:
            raise ValueError(
                f"settings: expected batches of at most {MOST_AT_ONCE} recordings and {LONGEST:.0f} seconds, got "
                f"{max(job.recipe.batch_size, settings.test_batch)} and {settings.batch_seconds:g}"
            )

    def summary(self, job: Job[Hearing], data: Voices) -> str:
        """Recordings, hours, pieces, and what is not learnt from."""
        hours = [half.seconds / 3600 for half in (data.train, data.test)]
        ear, spelling = Ear(job.settings, job.facts), spelling_of(job)
        unread = sum(not row.seconds for row in data.train.rows)
        left = len(data.train) - len(learnable(data, spelling, ear, job.settings)) - unread
        told = f", {unread:,} that cannot be read" if unread else ""
        told += f", {left:,} too long or too short for their text" if left else ""
        return (
            f"{len(data.train):,} training recordings of {hours[0]:.2f} hours{told}, {len(data.test):,} test "
            f"recordings of {hours[1]:.2f} hours, {spelling.size - 1} {'pieces' if spelling.merges else 'letters'}"
        )

    def limited(self, data: Voices, limit: int) -> Voices:
        """At most so many recordings of each half, evenly among all."""
        return fewer(data, limit)

    def variants(self, model: str) -> Mapping[str, Mapping[str, Any]]:
        """Every mechanism with rotary positions, softmax with relative ones as published, and no attention."""
        names = ("softmax_relative", "softmax", "linear", "inline", "nala", "mala", "none")
        return {name: self.variant(model, name) for name in names}

    def variant(self, model: str, name: str) -> Mapping[str, Any]:
        """The network with this mechanism in all of its blocks; "own" for the network as it is."""
        if name == "own":
            return {}
        if name == "softmax_relative":
            return {"mechanism": "softmax", "positions": "relative"}
        return {"mechanism": name}

    def variant_about(self, name: str) -> str:
        """What a variant is, in a few words."""
        told = {
            "own": "the network as it is",
            "none": "no attention: the convolutions alone",
            "softmax_relative": "softmax with relative positions, as published",
        }
        return told.get(name, f"{name} with rotary positions")

    def trial(self, model: str, data: Voices) -> Setup:
        """The recipe for few hours."""
        return self.preset(model, SMALL)

    @torch.no_grad()
    def predict(self, trained: Trained[Voices, Hearing], sources: Sequence[str], options: Any) -> Iterator[Answer]:
        """What is said in each recording, in one piece, however long it is."""
        assert isinstance(options, Writing)
        job, network = trained.job, cast(Conformer, trained.network)
        device = network.head.weight.device
        ear, spelling = Ear(job.settings, job.facts).to(device), spelling_of(job)
        beam = None if not options.beam else _beam(options)
        for source in sources:
            try:
                wave = read_audio(source, job.settings.sample_rate)
                logits = network(ear(wave[None].to(device))[0])[0][0]
            except (CorruptAudio, OSError) as error:
                yield Answer(source, error=str(error))
                continue
            except (MemoryError, RuntimeError) as error:
                if isinstance(error, RuntimeError) and "memory" not in str(error):  # torch's word for it
                    raise
                yield Answer(source, error=f"{source}: {TOO_LONG}")
                continue
            yield _answer(source, logits, len(wave) / job.settings.sample_rate, spelling, beam)

    def follow(self, trained: Trained[Voices, Hearing], source: str, options: Any) -> Iterator[str]:
        """Words of a recording as they come, in memory of one size: those that `predict` hears in all of it."""
        assert isinstance(options, Writing)
        if options.beam:
            raise ValueError(
                "beam: expected 0, as a word that was said is not taken back, got a beam; leave out --stream"
            )
        job, network = trained.job, cast(Conformer, trained.network)
        ear = Ear(job.settings, job.facts).to(network.head.weight.device)
        listener = Listener(network, ear, spelling_of(job))
        return words_of(listener, follow_audio(source, job.settings.sample_rate))


def _answer(source: str, logits: Tensor, seconds: float, spelling: Spelling, beam: Beam | None) -> Answer:
    """The text of logits (N, pieces)."""
    content: dict[str, Any] = {"seconds": round(seconds, 3)}
    if beam is None:
        words = timed_words(logits.argmax(dim=-1).tolist(), spelling)
        text = " ".join(word for word, _ in words)
        content["words"] = [{"word": word, "at": at} for word, at in words]
    else:
        text = spelling.decode(beam_search(logits.float().log_softmax(dim=-1), spelling, beam))
    file = {f"{Path(source).stem}.txt": f"{text}\n".encode()}
    return Answer(source, text=text or NOTHING_HEARD, content={"text": text, **content}, files=file)


def timed_words(numbers: Sequence[int], spelling: Spelling) -> list[tuple[str, float]]:
    """Words of the likeliest pieces of tokens, each with the second at which its first piece was heard."""
    found: list[tuple[str, float]] = []
    last, ended = BLANK, True
    for place, number in enumerate(numbers):
        if number not in (last, BLANK):
            piece = spelling.pieces[number - 1]
            ended |= piece.startswith(SPACE)
            letters = piece.removeprefix(SPACE)
            if letters and ended:
                found.append((letters, round(TOKEN * place, 2)))
                ended = False
            elif letters:
                found[-1] = (found[-1][0] + letters, found[-1][1])
        last = number
    return found


def statistics(data: Voices, settings: Hearing) -> dict[str, list[float]]:
    """Mean and spread of every band, of some training recordings.

    Raises:
        ValueError: If none of them can be read.
    """
    half, mel = data.train, LogMel(settings.sample_rate, settings.bands)
    total = torch.zeros(2, settings.bands, dtype=torch.float64)
    count = 0
    for index in np.linspace(0, len(half) - 1, min(len(half), LOOKED_AT)).astype(int).tolist():
        try:
            features = mel(half[index][None])[0].double()
        except CorruptAudio:
            continue
        total += torch.stack((features.sum(dim=0), features.square().sum(dim=0)))
        count += len(features)
    if not count:
        raise ValueError(f"data: expected recordings that can be read in {data.name}, found none among {LOOKED_AT}")
    mean = total[0] / count
    std = (total[1] / count - mean.square()).clamp_min(LEAST**2).sqrt()
    return {"mean": [round(x, 5) for x in mean.tolist()], "std": [round(x, 5) for x in std.tolist()]}


def _spelling(settings: Hearing, texts: Sequence[str]) -> Spelling:
    if settings.tokens == "letters":
        return Spelling.of_letters(texts, settings.alphabet)
    return Spelling.of_pairs(texts, settings.vocabulary, settings.alphabet)


def _check_letters(spelling: Spelling, data: Voices) -> None:
    """Raise ValueError for the first training text with a letter that is not in the alphabet."""
    for row in data.train.rows:
        missing = spelling.missing(row.text)
        if missing:
            raise ValueError(
                f"alphabet: expected letters of {''.join(p for p in spelling.pieces if len(p) == 1 and p != SPACE)!r}, "
                f"got {missing!r} in the text of {row.name}; add them to the alphabet, or mend the text"
            )


def _beam(options: Writing) -> Beam:
    grams = None if options.lm is None else NGrams.read(Path(options.lm))
    return Beam(options.beam, grams, options.lm_weight, options.word_bonus)


def _listed(value: Any) -> list[Any]:
    return list(cast("Sequence[Any]", value)) if isinstance(value, (list, tuple)) else []


def _is_piece(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= LONGEST_PIECE


TASK = Speech()
