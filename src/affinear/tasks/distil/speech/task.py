"""Distilling recognisers of speech: speech's data and scores, what Whisper's encoder and decoder say as the target."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import nn

from ....models import making
from ....models.speech.whisper import SAMPLE_RATE
from ....train.task import Answer, Measure, Task, Trained
from ...fewer import fewer
from ...language.spelling import Spelling
from ...speech.audio import CorruptAudio, read_audio
from ...speech.opening import open_voices
from ...speech.recordings import Voices
from ...speech.task import MOST_AT_ONCE, NOTHING_HEARD, Speech
from .. import hugging
from ..lesson import begin
from ..two_stages import OF_TRANSFORMERS, TwoStages
from . import whisper
from .settings import DistilSpeechSettings
from .transcripts import prompt_of
from .windows import BEYOND, as_spoken
from .work import DistilSpeechWork, SpeechJob, halves, network_of, seconds_of, transcripts_of

LONGEST_PROMPT = 8  # tokens
AT_ONCE = 1024  # texts that are spelled together
_BOTH: Mapping[str, Any] = {**OF_TRANSFORMERS, "batch_size": 16, "feature_map": "learned"}
RECIPES: Mapping[str, Mapping[str, Any]] = {
    "layers": {**_BOTH, "stage": "layers", "steps": 500, "lr": 5e-4, "min_lr": 5e-6, "warmup_steps": 25,
               "added_rate": 6.0},
    "whole": {**_BOTH, "stage": "whole", "steps": 2_000, "lr": 1e-4, "min_lr": 1e-6, "warmup_steps": 100,
              "added_rate": 3.0},
}  # fmt: skip


class DistilSpeech(TwoStages, Task[Voices, DistilSpeechSettings]):
    """Making a recogniser's encoder linear: it learns from the network it was made of, whose decoder stays."""

    name: ClassVar[str] = "distil_speech"
    about: ClassVar[str] = "a recogniser with a linear encoder learns from its softmax teacher"
    unit: ClassVar[str] = "recordings"
    samples: ClassVar[str] = "recordings"
    parts: ClassVar[str] = Speech.parts
    metric: ClassVar[Measure] = Speech.metric
    measures: ClassVar[tuple[Measure, ...]] = Speech.measures
    settings = DistilSpeechSettings
    stages: ClassVar[Mapping[str, Mapping[str, Any]]] = RECIPES

    def open(self, spec: str, settings: DistilSpeechSettings) -> Voices:
        """Manifests or LibriSpeech's folders, open."""
        split, memory = settings.test_split, settings.memory
        return as_spoken(open_voices(spec, sample_rate=SAMPLE_RATE, test_split=split, memory=memory))

    def settle(self, job: SpeechJob, data: Voices) -> SpeechJob:
        """What the teacher is, and how it is asked."""
        source = whisper.source_of(job.settings.teacher)
        hugging.check_asked(job.model, job.model_args, whisper.KIND)
        facts = {
            "config": dict(source.config),
            "generation": dict(source.generation),
            "tokenizer": source.spelling.text,
            "prompt": prompt_of(source.spelling, job.settings.language, source.many),
            "teacher": str(source.path.resolve()),
            "teacher_sha256": source.digest,
        }
        # Hooks hand the teacher's inputs to the student's layers, which a compiled graph has no place for.
        recipe = dataclasses.replace(job.recipe, compile=False)
        settled = dataclasses.replace(job, facts=facts, recipe=recipe)
        _check_windows(settled, data)
        _check_texts(settled, data)
        return settled

    def network(self, job: SpeechJob, *, room: int = making.MOST_NUMBERS) -> nn.Module:
        """The teacher's network with its encoder's attention swapped; what its stage does not teach cannot learn."""
        return network_of(job, room)

    def begin(self, network: nn.Module, job: SpeechJob) -> None:
        """The teacher's weights."""
        teacher = whisper.teacher_of(Path(str(job.facts["teacher"])), torch.float32)
        begin(network, teacher.state_dict(), str(job.settings.teacher))

    def work(self, job: SpeechJob, data: Voices, device: torch.device) -> DistilSpeechWork:
        """A settled job at work."""
        return DistilSpeechWork(job, data, device)

    def check_job(self, job: SpeechJob) -> None:
        """Raise ValueError if a job that was read from a file lacks a fact, or asks for what no user would."""
        facts, settings = job.facts, job.settings
        config = whisper.checked_config(facts.get("config"), "config")
        if any(facts["config"].get(name) != config[name] for name in whisper.SIZES):
            raise ValueError(f"config: expected {', '.join(whisper.SIZES)}, got a configuration without one of them")
        generation: Any = facts.get("generation")
        if not isinstance(generation, Mapping):
            raise ValueError(f"generation: expected fields, got {making.short(generation)}")
        hugging.check_plain(dict(cast("Mapping[str, Any]", generation)), "generation")
        text: Any = facts.get("tokenizer")
        if not isinstance(text, str):
            raise ValueError(f"tokenizer: expected what the weights were trained with, got {making.short(text)}")
        if Spelling(text).size > config["vocab_size"]:
            raise ValueError(f"tokenizer: expected at most {config['vocab_size']} tokens, got more")
        _check_prompt(facts.get("prompt"), config["vocab_size"])
        if max(job.recipe.batch_size, settings.test_batch) > MOST_AT_ONCE:
            raise ValueError(f"settings: expected batches of at most {MOST_AT_ONCE}")

    def summary(self, job: SpeechJob, data: Voices) -> str:
        """Recordings, hours, and how many do not fit into a window."""
        train, test = halves(job, data)
        hours = [half.seconds / 3600 for half in (train, test)]
        told = f"; {train.left:,} and {test.left:,} left out" if train.left or test.left else ""
        return (
            f"{len(train):,} training recordings of {hours[0]:.2f} hours and {len(test):,} test recordings of "
            f"{hours[1]:.2f} hours that fit into a window of {seconds_of(job.facts['config']):g} s{told}"
        )

    def limited(self, data: Voices, limit: int) -> Voices:
        """At most so many recordings of each half, evenly among all."""
        return fewer(data, limit)

    @torch.no_grad()
    def predict(
        self, trained: Trained[Voices, DistilSpeechSettings], sources: Sequence[str], options: Any
    ) -> Iterator[Answer]:
        """What is said in each recording, if it is no longer than a window."""
        job, network = trained.job, trained.network
        device = next(network.parameters()).device
        ear, transcripts = whisper.ear_of(job.facts["config"]).to(device), transcripts_of(job)
        longest = seconds_of(job.facts["config"])
        for source in sources:
            try:
                wave = read_audio(source, SAMPLE_RATE, end=longest + 1)
            except (CorruptAudio, OSError) as error:
                yield Answer(source, error=str(error))
                continue
            if len(wave) > (longest + BEYOND) * SAMPLE_RATE:
                yield Answer(source, error=f"{source}: expected at most {longest:g} s of sound, got more; cut it")
                continue
            tokens = network(ear(wave[None, : ear.samples].to(device)), asked=transcripts)[0]
            yield _answer(source, transcripts.written(tokens), len(wave) / SAMPLE_RATE)


def _answer(source: str, text: str, seconds: float) -> Answer:
    file = {f"{Path(source).stem}.txt": f"{text}\n".encode()}
    content = {"text": text, "seconds": round(seconds, 3)}
    return Answer(source, text=" ".join(text.split()) or NOTHING_HEARD, content=content, files=file)


def _check_windows(job: SpeechJob, data: Voices) -> None:
    """Raise ValueError if no recording of a half fits into a window."""
    for half, noun in zip(halves(job, data), ("to learn from", "to be judged by"), strict=True):
        if not len(half):
            longest = half.most / half.sample_rate
            raise ValueError(
                f"data: expected recordings {noun} of at most {longest:g} s in {data.name}, got {half.left:,} that "
                "are all longer; cut them, with their texts"
            )


def _check_texts(job: SpeechJob, data: Voices) -> None:
    """Raise ValueError for the first training text that is too long for the decoder."""
    transcripts, rows = transcripts_of(job), halves(job, data)[0].rows
    room = job.facts["config"]["max_target_positions"] - len(transcripts.prompt)
    for first in range(0, len(rows), AT_ONCE):
        some = rows[first : first + AT_ONCE]
        spelled = transcripts.spelling.encode([f" {row.text}" for row in some])
        for row, tokens in zip(some, spelled, strict=True):
            if len(tokens) > room:
                raise ValueError(
                    f"data: expected texts of at most {room} tokens, as the teacher's decoder has room for, got "
                    f"{len(tokens)} of {row.name}; cut it into parts"
                )


def _check_prompt(told: Any, vocabulary: int) -> None:
    """Raise ValueError unless it is a few tokens."""
    tokens = list(cast("Sequence[Any]", told)) if isinstance(told, (list, tuple)) else []
    good = all(isinstance(one, int) and not isinstance(one, bool) and 0 <= one < vocabulary for one in tokens)
    if not 0 < len(tokens) <= LONGEST_PROMPT or not good:
        raise ValueError(f"prompt: expected a few tokens of {vocabulary}, got {making.short(told)}")


TASK = DistilSpeech()
