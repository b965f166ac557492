"""Speech at work on one job: loaders, loss, score and report."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from ...models.speech.conformer import tokens_of
from ...train.draws import NOTHING
from ...train.loading import arranged, in_order
from ...train.page import Section
from ...train.task import Job, Score, Work
from .augment import Masks, mask
from .decoding import greedy
from .hearing import Ear
from .metric import Errors, compare, score_of
from .planning import ByDuration
from .recordings import Recording, Voices
from .report import sections
from .samples import TestSamples, TrainSamples, Waves, as_it_is, real_speed
from .settings import Hearing
from .text import BLANK, Spelling


class Heard(NamedTuple):
    """A batch as the network wants it.

    Attributes:
        features: (B, T, F), float32, zeros after the end of each.
        frames: (B,), frames of each.
        waves: What it was made of, the waves themselves left out.
    """

    features: Tensor
    frames: Tensor
    waves: Waves


class SpeechWork(Work[Voices, Hearing]):
    """Recordings by duration to learn from, and all of the others to be judged by.

    Args:
        job: With nothing left open.
        data: Open.
        device: Where batches will be.
    """

    def __init__(self, job: Job[Hearing], data: Voices, device: torch.device) -> None:
        super().__init__(job, data, device)
        settings, recipe = job.settings, job.recipe
        self.spelling = spelling_of(job)
        self.ear = Ear(settings, job.facts).to(device)
        self.masks = Masks(settings.band_masks, settings.band_width, settings.time_masks, settings.time_share)
        parts = recipe.accumulate
        seconds = [row.seconds / real_speed(min(settings.speeds)) for row in data.train.rows]
        chosen = learnable(data, self.spelling, self.ear, settings)
        most = settings.batch_seconds / parts
        self.plan = ByDuration(seconds, chosen, recipe.batch_size // parts, most, recipe.seed)

    @property
    def per_step(self) -> float:
        """Seconds of audio of one step, over all processes, on average."""
        rows = self.data.train.rows
        total = sum(rows[index].seconds for members, _ in self.plan.buckets for index in members)
        return total / max(1, self.plan.batches) * self.job.recipe.accumulate

    def train_loader(self) -> DataLoader[Any]:
        """Batches of recordings of about one length, each of all processes together."""
        recipe, half = self.job.recipe, self.data.train
        tally = self.skipped.tally("train", half, "recordings")
        # What cannot be read is never drawn, so nobody would come across it.
        tally.corrupt[[not row.seconds for row in half.rows]] = 1
        tally.check()
        if not self.plan.batches:
            raise ValueError(
                f"data: expected recordings to learn from in {self.data.name}, but none of {len(half)} is at most "
                f"{self.job.settings.longest:g} s long and has a token, 40 ms, for every piece of its text"
            )
        samples = TrainSamples(half, self.spelling, self.job.settings.speeds, tally)
        return arranged(samples, self.plan, self.plan.places, workers=recipe.workers, collate=as_it_is)

    def test_loader(self) -> DataLoader[Any]:
        """Batches of recordings, the longest first."""
        half = self.data.test
        samples = TestSamples(half, self.skipped.tally("test", half, "recordings"))
        workers = self.job.recipe.workers
        return in_order(samples, len(half), self.job.settings.test_batch, workers=workers, collate=as_it_is)

    def ready(self, batch: Any) -> Heard:
        """Waves as features."""
        waves = cast(Waves, batch)
        features, frames = self.ear(waves.waves, waves.samples)
        return Heard(features, frames, waves._replace(waves=waves.waves[:, :0]))

    def vary(self, batch: Any) -> Heard:
        """SpecAugment."""
        heard = cast(Heard, batch)
        return heard._replace(features=mask(heard.features, heard.frames, self.masks))

    def loss(self, network: nn.Module, batch: Any) -> Tensor:
        """CTC's loss of every recording over its pieces, and their mean over all processes."""
        heard = cast(Heard, batch)
        logits, lengths = network(heard.features, heard.frames)
        losses = ctc(logits, lengths, heard.waves.targets, heard.waves.lengths)
        return (losses * heard.waves.shares).sum() / heard.waves.places[0]

    def score(self, network: nn.Module, batches: Iterable[Any], accelerator: Accelerator) -> Score:
        """Count the errors of the whole test set, and then divide."""
        found: list[tuple[str, Errors]] = []
        rows = self.data.test.rows
        with torch.no_grad(), accelerator.autocast():
            for batch in batches:
                heard = cast(Heard, batch)
                texts = heard_texts(network, heard.features, heard.frames, self.spelling)
                found += judged(rows, heard.waves.indices, texts)
        return score_of(gather_object(found), self.skipped.names)

    def names(self, indices: Sequence[int]) -> list[str]:
        """The files of training recordings."""
        return [self.data.train.path(index) for index in indices if index != NOTHING]

    def report(self, network: nn.Module) -> list[Section]:
        """Test recordings, from those that were heard best to those that were heard worst."""
        return sections(network, self.data.test, self.ear, self.spelling, self.device)


def ctc(logits: Tensor, lengths: Tensor, targets: Tensor, pieces: Tensor) -> Tensor:
    """CTC's loss (B,) of each recording over the number of its pieces, in float32; nothing where no path exists."""
    logs = logits.float().log_softmax(dim=-1).transpose(0, 1)
    losses = F.ctc_loss(logs, targets, lengths, pieces, blank=BLANK, reduction="none", zero_infinity=True)
    return losses / pieces.clamp(min=1)


def heard_texts(network: nn.Module, features: Tensor, frames: Tensor, spelling: Spelling) -> list[str]:
    """What is heard in each recording, by the likeliest piece of every token."""
    logits, lengths = network(features, frames)
    best = logits.argmax(dim=-1).tolist()
    return [spelling.decode(greedy(row[:count])) for row, count in zip(best, lengths.tolist(), strict=True)]


def judged(rows: Sequence[Recording], indices: Tensor, texts: Sequence[str]) -> list[tuple[str, Errors]]:
    """Speaker and errors of each recording of a batch, by what was heard in plain words; fillers are left out."""
    both = zip(indices.tolist(), texts, strict=True)
    return [(rows[index].speaker, compare(rows[index].text, text)) for index, text in both if index != NOTHING]


def learnable(data: Voices, spelling: Spelling, ear: Ear, settings: Hearing) -> list[int]:
    """Training recordings that are not too long, and long enough for their text at any speed."""
    found: list[int] = []
    for index, row in enumerate(data.train.rows):
        pieces = spelling.encode(row.text)
        needed = len(pieces) + sum(a == b for a, b in itertools.pairwise(pieces))
        samples = int(row.seconds * settings.sample_rate / real_speed(max(settings.speeds)))
        if row.seconds <= settings.longest and pieces and tokens_of(ear.mel.frames(samples)) >= needed:
            found.append(index)
    return found


def spelling_of(job: Job[Hearing]) -> Spelling:
    """The spelling of a settled job."""
    return Spelling(tuple(job.facts["pieces"]), tuple((a, b) for a, b in job.facts["merges"]))
