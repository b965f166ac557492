"""Distilling speech at work on one job: loaders, loss, score and report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ....models import making
from ....models.speech.whisper import HOP, SAMPLE_RATE
from ....train.draws import NOTHING
from ....train.loading import in_order, shuffled_by
from ....train.page import Section
from ....train.task import Job, Score, Work
from ...fewer import places
from ...language.spelling import Spelling
from ...speech.audio import CorruptAudio
from ...speech.metric import Errors, score_of
from ...speech.recordings import Voices
from ...speech.report import best_to_worst, shown
from ...speech.samples import TestSamples, TrainSamples, Waves, as_it_is
from ...speech.work import judged
from ..lesson import Lesson, let_learn, student_of
from . import whisper
from .settings import DistilSpeechSettings
from .transcripts import Transcripts
from .windows import Windows, windows_of

LOOKED_AT = 16  # test recordings, evenly among all, that the report listens to
MEASURED = 4  # those that it measures layers on

SpeechJob = Job[DistilSpeechSettings]


class Sounds(NamedTuple):
    """A batch as the network wants it.

    Attributes:
        features: (B, bands, frames), float32.
        ids: (B, T), int64, prompt and text.
        wanted: (B, T), int64, the next tokens; -100 where it does not matter.
        indices: (B,), int64, which recording each is.
    """

    features: Tensor
    ids: Tensor
    wanted: Tensor
    indices: Tensor


class DistilSpeechWork(Work[Voices, DistilSpeechSettings]):
    """Windows of sound to learn from, and others to be judged by.

    Args:
        job: With nothing left open.
        data: Open.
        device: Where batches will be.
    """

    def __init__(self, job: SpeechJob, data: Voices, device: torch.device) -> None:
        super().__init__(job, data, device)
        self.ear = whisper.ear_of(job.facts["config"]).to(device)
        self.transcripts = transcripts_of(job)
        self.train, self.test = halves(job, data)
        path = Path(str(job.facts["teacher"]))
        dtype = torch.bfloat16 if job.recipe.precision == "bf16" and device.type == "cuda" else torch.float32
        self.lesson = Lesson(job.settings, lambda: whisper.teacher_of(path, dtype), device)

    def train_loader(self) -> DataLoader[Any]:
        """Batches of windows, each of all processes together."""
        half, noun = self.train, "recordings that fit into a window"
        tally = self.skipped.tally("train", half, "recordings")
        samples = TrainSamples(half, self.transcripts, self.job.settings.speeds, tally)
        return shuffled_by(self.job.recipe, samples, len(half), name=self.data.name, noun=noun, collate=as_it_is)

    def test_loader(self) -> DataLoader[Any]:
        """Batches of windows, the longest recordings first."""
        samples = TestSamples(self.test, self.skipped.tally("test", self.test, "recordings"))
        size, workers = self.job.settings.test_batch, self.job.recipe.workers
        return in_order(samples, len(self.test), size, workers=workers, collate=as_it_is)

    def ready(self, batch: Any) -> Sounds:
        """Waves as features, and texts as a decoder is given them."""
        waves = cast(Waves, batch)
        features = self.ear(waves.waves[:, : self.ear.samples])  # slower ones may be longer by a sample
        return Sounds(features, *self.transcripts.asked(waves.targets, waves.lengths), waves.indices)

    def loss(self, network: nn.Module, batch: Any) -> Tensor:
        """How far the student is from its teacher: its layers, or its features and the decoder's words."""
        sounds, lesson = cast(Sounds, batch), self.lesson
        if lesson.chosen.stage == "layers":
            return lesson.layers(network, lambda model: model(sounds.features))
        weights, teacher = lesson.chosen.weights(), cast(whisper.Recogniser, lesson.teacher)
        with torch.no_grad():
            if weights.logits or weights.labels:
                said: whisper.Said = teacher(sounds.features, sounds.ids)
            else:
                said = whisper.Said(teacher(sounds.features), None)
        like = whisper.Taught(said, teacher.head, weights)
        return network(sounds.features, sounds.ids, sounds.wanted, like=like)

    def score(self, network: nn.Module, batches: Iterable[Any], accelerator: Accelerator) -> Score:
        """Transcribe the whole test set, count the errors, and then divide."""
        found: list[tuple[str, Errors]] = []
        with torch.no_grad(), accelerator.autocast():
            for batch in batches:
                sounds = cast(Sounds, batch)
                tokens: list[list[int]] = network(sounds.features, asked=self.transcripts)
                found += judged(self.test.rows, sounds.indices, [self.transcripts.decode(one) for one in tokens])
        return score_of(gather_object(found), self.skipped.names)

    def names(self, indices: Sequence[int]) -> list[str]:
        """The files of training recordings."""
        return [self.train.path(index) for index in indices if index != NOTHING]

    def report(self, network: nn.Module) -> list[Section]:
        """Each swapped layer's error before and after, and some transcripts beside the truth."""
        heard = list(self._heard())
        if not heard:
            return []
        features = torch.cat([features for _, _, features in heard[:MEASURED]])
        fresh = network_of(self.job)
        left = f"{self.train.left:,} training and {self.test.left:,} test recordings that no window holds were left out"
        about = f"{len(features)} test recordings" + (f" ({left})" if self.train.left or self.test.left else "")
        layers = self.lesson.section(fresh, network, lambda model: model(features), about)
        return [layers, *self._transcribed(network, heard)]

    def _heard(self) -> Iterable[tuple[int, int, Tensor]]:
        """Some test recordings that can be read: number, frames, and features (1, bands, frames of a window)."""
        for index in places(len(self.test), LOOKED_AT):
            try:
                wave = self.test[index]
            except CorruptAudio:
                continue
            yield index, max(1, len(wave) // HOP), self.ear(wave[None].to(self.device))

    @torch.no_grad()
    def _transcribed(self, network: nn.Module, heard: Sequence[tuple[int, int, Tensor]]) -> list[Section]:
        seen: list[Any] = []
        for index, frames, features in heard:
            text = self.transcripts.decode(network(features, asked=self.transcripts)[0])
            seen.append(shown(self.test.path(index), features[0, :, :frames].T, self.test.rows[index].text, text))
        return best_to_worst(seen)


def network_of(job: SpeechJob, room: int = making.MOST_NUMBERS) -> whisper.Recogniser:
    """The network of a settled job, with fresh weights; what its stage does not teach cannot learn."""
    network = whisper.made(job.facts["config"], room)
    student_of(network.model, job.settings)
    let_learn(network, job.settings)
    whisper.freeze_but_encoder(network)
    return network


def transcripts_of(job: SpeechJob) -> Transcripts:
    """How the network of a settled job is asked, and how it writes; a transcript has half of the decoder's room."""
    facts = job.facts
    config = facts["config"]
    most = max(1, config["max_target_positions"] // 2)
    return Transcripts(Spelling(facts["tokenizer"]), facts["prompt"], config["vocab_size"], most)


def halves(job: SpeechJob, data: Voices) -> tuple[Windows, Windows]:
    """The recordings that fit into a window: those to learn from, however slowly they are played, and the others."""
    most = seconds_of(job.facts["config"]) * SAMPLE_RATE
    return windows_of(data.train, round(most), min(1.0, *job.settings.speeds)), windows_of(data.test, round(most))


def seconds_of(config: Any) -> float:
    """How long a window of a network of checked fields is."""
    return 2 * config["max_source_positions"] * HOP / SAMPLE_RATE
