"""The evidence of speech: word errors by mechanism on speakers that were never heard, on one GPU, within a given time.

    PYTHONPATH=src python evidence/speech.py --data packed --out speech --minutes 9

trains every cell that is not there yet, one after the other, the first seed of all before the second of any, on what
`evidence/packing/pack_voices.py` packed: lines of 22 characters of a game. Five others are held out, and so are some of
the lines of the 22. Lines of a character that follow each other are put together, as many as fit into four seconds, and
later into ten, so that all batches of a stage have one shape, and a step is one CUDA graph over recordings that lie on
the device. A cell writes `cells/NAME.json` when it is done, with losses and errors on what is held out and on some of
what was learnt; when the time is over nothing new is begun, and the same command goes on. How many steps there are is
found out in the beginning, so that the first seed of all ends in time; the number is in `state/plan.json` and in every
cell, and `--steps` sets it. Arms at the end are left out where there would be fewer than `--least`. `--part probe`
times a few steps of each, `--part table` prints what came out, `--part stream` trains nothing: it holds streams of
networks with fresh weights to the whole, over held-out speakers. `--part words` needs no GPU: it searches for words in
the scores that every cell has kept (`cells/NAME.npz`), with n-grams of the texts that were learnt and the same settings
for all arms, and writes `words/NAME.json`. It needs torch, timm, accelerate and numpy.

2,361 steps were too few for any arm to hear. In 8,000 all that there is to learn from comes about a hundred times:

    PYTHONPATH=src python evidence/speech.py --data packed --out speech --only mala,softmax_relative,none \
        --steps 8000 --minutes 9
    PYTHONPATH=src python evidence/speech.py --data packed --out speech --part words

The first is called until it leaves nothing, on a GPU that nothing else uses: a step is a graph, so the host has nothing
to do with it. One of MALA took 24 ms on an H200 alone, and 50 beside two other trainings.

All arms have the same convolutions, norms, feed-forwards and recipe; rotary positions but for `softmax_relative`, which
is as published, and no gates. `none` has no attention. `mala_causal` hears recordings as they come: its features are
normalised by the corpus, and its stream is held to the whole, token for token.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from affinear.models.speech import Conformer
from affinear.models.speech.conformer import FACTOR, REACH
from affinear.tasks.speech.augment import Masks, mask
from affinear.tasks.speech.decoding import Beam, beam_search, greedy
from affinear.tasks.speech.hearing import Ear
from affinear.tasks.speech.metric import Errors, compare
from affinear.tasks.speech.ngram import NGrams
from affinear.tasks.speech.settings import Hearing
from affinear.tasks.speech.text import SPACE, Spelling, plain
from affinear.train import Recipe
from packing.pack_voices import BANDS, FLOOR, RATE, STEP, read_packed
from pages.words import percent
from running.cells import Cell
from running.ctc import ctc
from running.files import keep
from running.in_order import Doing, do_in_order
from running.learning import PART, Learner, Pace, half, learn, step_seconds_of
from running.machine import machine
from running.pacing import Room, planned
from running.spoken import keep_scores, kept_scores

HELD_OUT = ("syreen", "supox", "yehat", "yehatrebels", "shofixti")
SPELLING = Spelling.of_letters([], "abcdefghijklmnopqrstuvwxyz'0123456789")
ARMS: dict[str, dict[str, Any]] = {
    "mala": {"mechanism": "mala"},
    "softmax_relative": {"mechanism": "softmax", "positions": "relative"},
    "none": {"mechanism": "none"},
    "linear": {"mechanism": "linear"},
    "softmax": {"mechanism": "softmax"},
    "nala": {"mechanism": "nala"},
    "inline": {"mechanism": "inline"},
    "mala_causal": {"mechanism": "mala", "causal": True},
}
SHAPE: dict[str, Any] = {"dim": 256, "depth": 6, "num_heads": 4, "conv_norm": "layer", "dropout": 0.1}
STREAMED = ("mala", "linear", "nala", "inline")
STRETCH, KNOWN = 25, 20  # lines that follow each other, and one in how many such is held out of speakers that are heard
SPEEDS = (0.9, 1.1)  # between which a recording is as fast
MASKS = Masks(bands=2, band_width=10, times=4, time_share=0.05)
BESIDE = 10.0  # seconds of a cell beside its steps: a network, a graph, and being judged
BUILDING, TIMED = 14, 16  # steps that build kernels and a graph, and steps that are timed
EXAMPLES = 12  # of a cell
ORDER, BEAM = 2, 8  # words of an n-gram, with which held-out lines are likeliest, and texts that are kept in a search


@dataclass(frozen=True)
class Stage:
    """Batches of one shape.

    Attributes:
        tokens: Of a recording, padding included, 25 in a second.
        places: Recordings of a batch.
        share: Of all steps.
        masked: Whether SpecAugment leaves some of it out.
        limit: Steps at most, whatever the share; None for as many as there are.
    """

    tokens: int
    places: int
    share: float
    masked: bool
    limit: int | None = None

    @property
    def frames(self) -> int:
        """Of a recording, padding included."""
        return FACTOR * (self.tokens - 1) + REACH

    @property
    def most(self) -> int:
        """Frames of a passage that fits at the lowest speed."""
        return int(self.frames * min(SPEEDS))


# Short and whole ones first: where few letters are said, it is soon found out which of them is where. Not for long:
# they are a sixth of all, and what more steps learn is these by heart.
STAGES = (Stage(100, 96, 0.35, masked=False, limit=400), Stage(250, 64, 0.65, masked=True))
RECIPE = Recipe(
    batch_size=STAGES[-1].places,
    lr=1.5e-3,
    betas=(0.9, 0.98),
    weight_decay=0.01,
    warmup_lr=1e-6,
    min_lr=1e-6,
    clip_grad=1.0,
)


@dataclass(frozen=True)
class Training:
    """One network to be trained."""

    arm: str
    seed: int

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{self.arm}-{self.seed}"

    @classmethod
    def of(cls, name: str) -> Training:
        """The one of a file."""
        arm, _, seed = name.rpartition("-")
        return cls(arm, int(seed))


def recipe_of(steps: int, seed: int) -> Recipe:
    """How a network is trained in so many steps."""
    average = min(0.998, 1 - 10 / max(steps, 20))  # or a short run's average is of its first weights
    return RECIPE.changed(steps=steps, warmup_steps=min(400, steps // 8), seed=seed, ema_decay=average)


# ------------------------------------------------------------------------------------------------ data


@dataclass(frozen=True)
class Lines:
    """All lines, in the order of their features and pieces, that stand one behind the other.

    Attributes:
        speakers: Of each.
        texts: In plain words.
        frames: Of each.
        starts: Its first frame among all.
        pieces: How many it has.
        begins: Its first piece among all; between the pieces of two lines is a gap.
        runs: Lines of one speaker with nothing between them, which are not empty, at most `STRETCH` of them.
    """

    speakers: list[str]
    texts: list[str]
    frames: list[int]
    starts: list[int]
    pieces: list[int]
    begins: list[int]
    runs: list[range]

    def row(self, some: range) -> tuple[int, int, int, int]:
        """Of lines put together: first frame, frames, first piece, pieces."""
        frames, pieces = (sum(one[i] for i in some) for one in (self.frames, self.pieces))
        return self.starts[some.start], frames, self.begins[some.start], pieces + len(some) - 1

    def passages(self, runs: Sequence[range], most: int, random: np.random.Generator | None = None) -> list[range]:
        """Lines put together to at most so many frames; where the first passage of a run ends may be drawn."""
        found: list[range] = []
        for run in runs:
            room, first, taken = most if random is None else int(random.integers(most + 1)), run.start, 0
            for line in run:
                if line > first and taken + self.frames[line] > room:
                    found.append(range(first, line))
                    room, first, taken = most, line, 0
                taken += self.frames[line]
            found.append(range(first, run.stop))
        return [one for one in found if self.row(one)[1] <= most]


def lines_of(rows: Sequence[dict[str, Any]]) -> Lines:
    """What was packed, as lines."""
    texts = [plain(row["text"]) for row in rows]
    pieces = [len(SPELLING.encode(text)) for text in texts]
    frames = [row["frames"] for row in rows]
    starts, begins = (np.cumsum([0, *sizes[:-1]]).tolist() for sizes in (frames, [count + 1 for count in pieces]))
    runs: list[range] = []
    for _, some in itertools.groupby(range(len(rows)), key=lambda i: (rows[i]["speaker"], bool(pieces[i]))):
        numbers = list(some)
        if pieces[numbers[0]]:
            ends = range(numbers[0], numbers[-1] + 1, STRETCH)
            runs += [range(first, min(first + STRETCH, numbers[-1] + 1)) for first in ends]
    return Lines([row["speaker"] for row in rows], texts, frames, starts, pieces, begins, runs)


class Corpus:
    """All recordings on the device, and which are learnt from.

    Args:
        folder: What was packed.
        device: Where the features are.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        rows, features = read_packed(folder)
        self.device, self.lines = device, lines_of(rows)
        self.flat = torch.from_numpy(np.concatenate(features)).to(device)
        gap = 1 + SPELLING.pieces.index(SPACE)
        spelled = [piece for text in self.lines.texts for piece in (*SPELLING.encode(text), gap)]
        self.pieces = torch.tensor(spelled, device=device)
        held = [run for run in self.lines.runs if self.lines.speakers[run.start] in HELD_OUT]
        others = [run for run in self.lines.runs if self.lines.speakers[run.start] not in HELD_OUT]
        known = others[KNOWN // 2 :: KNOWN]
        self.learnt = [run for run in others if run not in known]
        self.test, self.known = (self.lines.passages(runs, STAGES[-1].frames) for runs in (held, known))
        every = self.lines.passages(self.learnt, STAGES[-1].frames)
        self.again = every[:: max(1, len(every) // max(1, len(self.known)))]
        some = self.flat[:: max(1, len(self.flat) // 200_000)].float() * STEP + FLOOR
        self.facts = {"mean": some.mean(dim=0).tolist(), "std": some.std(dim=0).tolist()}

    @property
    def hours(self) -> list[float]:
        """Of what is learnt from, of speakers held out, and of lines held out."""
        learnt = sum(self.lines.frames[i] for run in self.learnt for i in run)
        held = [sum(self.lines.row(one)[1] for one in some) for some in (self.test, self.known)]
        return [frames / 360_000 for frames in (learnt, *held)]

    def fitting(self, stage: Stage) -> float:
        """Hours of what is learnt from and fits into a stage."""
        mine = (self.lines.frames[i] for run in self.learnt for i in run)
        return sum(frames for frames in mine if frames <= stage.most) / 360_000

    def text(self, passage: range) -> str:
        """What is said in lines put together."""
        return " ".join(self.lines.texts[i] for i in passage)

    def features(self, rows: Tensor, speeds: Tensor, ear: Ear, room: int) -> tuple[Tensor, Tensor]:
        """Normalised features (B, room, F) of passages (B, 4) at their speeds (B,), and the frames of each."""
        starts, frames = rows[:, :1], rows[:, 1:2]
        counts = (frames / speeds[:, None]).long().clamp(max=room)
        place = torch.arange(room, device=self.device)
        inside = (place < counts)[..., None]
        taken = torch.minimum((place * speeds[:, None]).long(), frames - 1) + starts
        features = FLOOR + STEP * self.flat[taken].float()
        return ear.normalized(features, inside).masked_fill(~inside, 0), counts[:, 0]

    def said(self, rows: Tensor, longest: int) -> Tensor:
        """Pieces (B, longest) of passages (B, 4), with something behind the end of each."""
        place = torch.arange(longest, device=self.device)
        return self.pieces[(rows[:, 2:3] + place).clamp(max=len(self.pieces) - 1)]


def ear_of(corpus: Corpus, arm: str) -> Ear:
    """How the features of an arm are normalised."""
    by = "corpus" if ARMS[arm].get("causal") else "recording"
    settings = Hearing(sample_rate=RATE, bands=BANDS, normalization=by)
    return Ear(settings, corpus.facts).to(corpus.device)


@dataclass(frozen=True, eq=False)
class Draws:
    """What comes in the steps of a stage.

    Attributes:
        rows: Passages (steps, places, 4).
        speeds: (steps, places).
        longest: Pieces of the passage that has most.
    """

    rows: Tensor
    speeds: Tensor
    longest: int

    @classmethod
    def of(cls, corpus: Corpus, stage: Stage, steps: int, seed: int) -> Draws:
        """The same in all arms: every line that fits as often as any other."""
        random, wanted = np.random.default_rng([seed, stage.tokens]), steps * stage.places
        rows: list[tuple[int, int, int, int]] = []
        while len(rows) < wanted:
            epoch = corpus.lines.passages(corpus.learnt, stage.most, random)
            chosen = random.permutation(len(epoch))[: wanted - len(rows)]
            rows += [corpus.lines.row(epoch[i]) for i in chosen]
        speeds = random.uniform(*SPEEDS, size=(steps, stage.places)).astype(np.float32)
        found = torch.tensor(rows).view(steps, stage.places, 4), torch.from_numpy(speeds)
        return cls(found[0].to(corpus.device), found[1].to(corpus.device), max(row[3] for row in rows))

    @property
    def hours(self) -> float:
        """Of all that comes."""
        return self.rows[..., 1].sum().item() / 360_000


def steps_of(steps: int) -> list[int]:
    """How many of all steps each stage has: whole parts, so that a loss is of one stage."""
    wanted = [min(steps * stage.share, stage.limit or steps) for stage in STAGES[:-1]]
    found = [round(count / PART) * PART for count in wanted]
    return [*found, steps - sum(found)]


# ------------------------------------------------------------------------------------------------ one cell


class Lesson:
    """A network that learns to hear, stage by stage.

    Attributes:
        learner: Of all steps.
        parts: Each stage that has steps, how many, and its draws.

    Args:
        cell: Which.
        counts: Steps of each stage.
        corpus: What is heard.
    """

    def __init__(self, cell: Training, counts: Sequence[int], corpus: Corpus) -> None:
        torch.manual_seed(cell.seed)
        network = network_of(cell.arm).to(corpus.device)
        self.corpus, self.ear = corpus, ear_of(corpus, cell.arm)
        found = zip(STAGES, counts, strict=True)
        self.parts = [(stage, n, Draws.of(corpus, stage, n, cell.seed)) for stage, n in found if n]
        self.learner = Learner(network, recipe_of(sum(counts), cell.seed), Tensor.sum, corpus.device)

    @property
    def epochs(self) -> float:
        """How often all that there is comes."""
        return sum(draws.hours for *_, draws in self.parts) / self.corpus.hours[0]

    @property
    def stages(self) -> list[dict[str, Any]]:
        """Steps of each stage, the hours that fit into it, and how often these come."""
        return [
            {**asdict(stage), "steps": count, "hours": (fit := self.corpus.fitting(stage)), "times": draws.hours / fit}
            for stage, count, draws in self.parts
        ]

    def ready(self, number: int) -> Learner:
        """The learner, whose steps from now on are those of a stage."""
        first, (stage, _, draws) = sum(count for _, count, _ in self.parts[:number]), self.parts[number]

        def loss(at: Tensor) -> Tensor:
            return self.loss(at - first, draws, stage)

        self.learner.loss_of = loss
        return self.learner

    def loss(self, at: Tensor, draws: Draws, stage: Stage) -> Tensor:
        """Of a step of a stage: of a letter, so that long passages count as much as short ones."""
        rows, speed = (one.index_select(0, at)[0] for one in (draws.rows, draws.speeds))
        features, frames = self.corpus.features(rows, speed, self.ear, stage.frames)
        if stage.masked:
            features = mask(features, frames, MASKS)
        with half(self.corpus.device):
            logits, counts = self.learner.network(features, frames)
        lengths = rows[:, 3]
        said = self.corpus.said(rows, draws.longest)
        return (ctc(logits.float().log_softmax(dim=-1), counts, said, lengths) / lengths).mean()

    def learn(self, until: float) -> Pace:
        """All steps, or as many as there is time for."""
        paces: list[Pace] = []
        for number, (_, count, _) in enumerate(self.parts):
            done = paces[-1].steps if paces else 0
            told = functools.partial(print, flush=True)
            paces.append(learn(self.ready(number), told, until=until, last=done + count))
        return Pace(
            paces[-1].steps,
            sum(pace.seconds for pace in paces),
            paces[-1].step_seconds,
            max(pace.peak for pace in paces),
            [loss for pace in paces for loss in pace.losses],
            paces[-1].why,
        )


def network_of(arm: str) -> Conformer:
    """An arm's network, with fresh weights."""
    return Conformer(SPELLING.size, BANDS, **{**SHAPE, **ARMS[arm]})


@dataclass(frozen=True, eq=False)
class Judged:
    """What a network heard in some passages.

    Attributes:
        scores: Of every token of each, logarithms (N, pieces).
        texts: By the likeliest piece of every token.
        loss: Of a letter, as in training, but for masks, speeds and dropout.
    """

    scores: list[Tensor]
    texts: list[str]
    loss: float


@torch.no_grad()
def judged(network: Conformer, corpus: Corpus, ear: Ear, passages: Sequence[range]) -> Judged:
    """All passages, as many at a time as the last stage has."""
    scores, losses = list[Tensor](), list[Tensor]()
    for first in range(0, len(passages), STAGES[-1].places):
        some = [corpus.lines.row(one) for one in passages[first : first + STAGES[-1].places]]
        rows, speeds = torch.tensor(some, device=corpus.device), torch.ones(len(some), device=corpus.device)
        features, frames = corpus.features(rows, speeds, ear, STAGES[-1].frames)
        with half(corpus.device):
            logits, counts = network(features, frames)
        logs, lengths = logits.float().log_softmax(dim=-1), rows[:, 3]
        said = corpus.said(rows, max(row[3] for row in some))
        losses.append(ctc(logs, counts, said, lengths) / lengths)
        scores += [one[:count].cpu() for one, count in zip(logs, counts.tolist(), strict=True)]
    texts = [SPELLING.decode(greedy(one.argmax(dim=-1).tolist())) for one in scores]
    return Judged(scores, texts, torch.cat(losses).mean().item())


def errors(corpus: Corpus, passages: Sequence[range], texts: Sequence[str]) -> dict[str, Any]:
    """Errors on passages, all together and each speaker's, with some examples."""
    found: dict[str, Errors] = {}
    pairs = [(corpus.text(one), text) for one, text in zip(passages, texts, strict=True)]
    for one, pair in zip(passages, pairs, strict=True):
        speaker = corpus.lines.speakers[one.start]
        found[speaker] = found.get(speaker, Errors()) + compare(*pair)
    total = sum(found.values(), Errors())
    speakers = {name: some.numbers["wer"] for name, some in sorted(found.items())}
    counts = {"words": total.words, "recordings": total.recordings}
    return {**total.numbers, **counts, "speakers": speakers, "said": pairs[:EXAMPLES]}


def limited(passages: Sequence[range], limit: int | None) -> Sequence[range]:
    """As many of them as are judged, evenly among them."""
    return passages[:: 1 if limit is None else -(-len(passages) // limit)]


@torch.no_grad()
def streamed(network: Conformer, corpus: Corpus, ear: Ear, count: int) -> dict[str, int]:
    """In how many of some recordings and of their tokens the stream says what the whole says; of how many kinds."""
    same = tokens = equal = 0
    pieces: set[int] = set()
    chosen = corpus.test[:: max(1, len(corpus.test) // count)][:count]
    for one in chosen:
        start, frames = corpus.lines.row(one)[:2]
        features = ear.normalized((FLOOR + STEP * corpus.flat[start : start + frames].float())[None])
        whole = network(features)[0].argmax(dim=-1)
        stream, heard = network.begin(), list[Tensor]()
        for piece in features.split(64, dim=1):
            logits, stream = network.hear(piece, stream)
            heard.append(logits.argmax(dim=-1))
        found = torch.cat(heard, dim=1)
        tokens += whole.numel()
        equal += int((found == whole).sum())
        pieces.update(whole.unique().tolist())
        same += int(torch.equal(found, whole))
    return {
        "recordings": len(chosen),
        "same": same,
        "tokens": tokens,
        "same_tokens": equal,
        "pieces": len(pieces),
    }


@functools.cache
def heard(folder: Path) -> Corpus:
    """The corpus, once for all cells of a process."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    return Corpus(folder, torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def seconds_of(arm: str, corpus: Corpus) -> float:
    """Of a step of an arm, in the mean over its stages but those of few steps."""
    lesson = Lesson(Training(arm, 0), [BUILDING + TIMED] * len(STAGES), corpus)
    timed = [number for number, stage in enumerate(STAGES) if stage.limit is None]
    found = 0.0
    for number in timed:
        learner = lesson.ready(number)
        learner.at.fill_(number * (BUILDING + TIMED))
        found += STAGES[number].share * step_seconds_of(learner, BUILDING, TIMED)
    return found / sum(STAGES[number].share for number in timed)


def run(given: argparse.Namespace) -> None:
    """Train a cell and write down what it hears; nothing is written if the time was over before."""
    cell, corpus = Training.of(cast(str, given.cell)), heard(given.data)
    steps: int = given.steps
    lesson = Lesson(cell, steps_of(steps), corpus)
    learner, ear = lesson.learner, lesson.ear
    print(f"{cell.name}: {steps} steps, {lesson.epochs:.1f} epochs; {len(corpus.test)} passages held out", flush=True)
    pace = lesson.learn(given.until)
    if pace.steps < steps:
        print(f"the time was over after {pace.steps} of {steps} steps", flush=True)
        return
    network = cast(Conformer, learner.network).eval()
    told: dict[str, Any] = {
        "cell": asdict(cell),
        "plan": learner.recipe.as_dict(),
        "shape": SHAPE,
        "stages": lesson.stages,
        "machine": machine(),
        "parameters": sum(p.numel() for p in network.parameters()),
        "epochs": lesson.epochs,
        "hours": corpus.hours,
        "train_s": pace.seconds,
        "step_ms": 1e3 * pace.step_seconds,
        "graph": not pace.why,
        "losses": pace.losses,
        "peak_gib": pace.peak / 2**30,
    }
    scores: list[Tensor] = []
    for name, passages in (("test", corpus.test), ("known", corpus.known), ("again", corpus.again)):
        some = limited(passages, given.limit)
        found = judged(network, corpus, ear, some)
        what = {"loss": found.loss, **errors(corpus, some, found.texts)}
        told |= what if name == "test" else {name: what}
        scores += [] if name == "again" else found.scores
    keep_scores(given.out / "cells" / f"{cell.name}.npz", scores)
    if network.streams:
        told["stream"] = streamed(network.float(), corpus, ear, given.limit or 60)
    keep(given.out / "cells" / f"{cell.name}.json", told)


# ------------------------------------------------------------------------------------------------ all cells


def trainings(arms: Sequence[str], seeds: int, repeated: Sequence[str]) -> list[Training]:
    """All of them, the first seed of every arm before the second of those that are repeated."""
    return [Training(arm, seed) for seed in range(seeds) for arm in arms if seed == 0 or arm in repeated]


def train_all(given: argparse.Namespace) -> None:
    """Do all that is left in this process, one after the other."""
    until, arms, steps = time.time() + 60 * given.minutes, given.only, given.steps
    corpus = heard(given.data)

    def told(one: Cell) -> str:
        found = one.read()
        return line(found) if found else "not done in time"

    if steps is None:
        room = Room(until, BESIDE, given.least)
        plan = planned(given.out / "state", arms, room, lambda arm: seconds_of(arm, corpus))
        arms, steps = plan.arms, plan.steps
    words = (*sys.argv[1:], "--steps", str(steps), "--until", str(until), "--cell")
    wanted = trainings(arms, given.seeds, given.repeated)
    cells = [Cell.in_files(one.name, given.out / "cells", words) for one in wanted]
    if left := do_in_order(cells, Doing(lambda words: run(parsed(words)), told), until):
        print(f"for another call: {', '.join(one.title for one in left)}", flush=True)


def stream_all(given: argparse.Namespace) -> None:
    """Streams of causal networks with fresh weights beside the whole recordings, every linear mechanism."""
    corpus = heard(given.data)
    ear, rows = ear_of(corpus, "mala_causal"), list[dict[str, Any]]()
    for mechanism in STREAMED:
        torch.manual_seed(0)
        own: dict[str, Any] = {**SHAPE, "mechanism": mechanism, "causal": True}
        made = Conformer(SPELLING.size, BANDS, **own).to(corpus.device).eval()
        told = streamed(made, corpus, ear, given.limit or len(corpus.test))
        rows.append({"mechanism": mechanism, **told})
        print(f"{mechanism}: {told['same_tokens']:,} of {told['tokens']:,} tokens are the same", flush=True)
        keep(given.out / "stream.json", {"machine": machine(), "rows": rows})


def words_all(given: argparse.Namespace) -> None:
    """Search for words in what every cell has kept, and write down the errors that are left."""
    corpus = heard(given.data)
    learnt = [corpus.text(one) for one in corpus.lines.passages(corpus.learnt, STAGES[-1].frames)]
    beam = Beam(BEAM, NGrams.count(learnt, ORDER))
    for file in sorted((given.out / "cells").glob("*.npz")):
        result = given.out / "words" / f"{file.stem}.json"
        if Training.of(file.stem).arm not in given.only or result.is_file():
            continue
        told = worded(corpus, kept_scores(file), beam, given.limit)
        keep(result, {"cell": asdict(Training.of(file.stem)), "order": ORDER, "beam": BEAM, **told})
        print(f"{file.stem}: with n-grams WER {100 * told['wer']:.1f}, {100 * told['known']['wer']:.1f}", flush=True)


def worded(corpus: Corpus, scores: Sequence[Tensor], beam: Beam, limit: int | None) -> dict[str, Any]:
    """Errors on what is held out, of speakers that were never heard and of others, and words that no n-gram has."""
    test, known = (limited(passages, limit) for passages in (corpus.test, corpus.known))
    if len(scores) != len(test) + len(known):
        said = f"{len(test) + len(known)} recordings, as --data and --limit say"
        raise ValueError(f"cells: expected scores of {said}, got {len(scores)}: give what the cells were trained with")
    texts = [SPELLING.decode(beam_search(one, SPELLING, beam)) for one in scores]
    found = errors(corpus, test, texts[: len(test)]), errors(corpus, known, texts[len(test) :])
    for some, passages in zip(found, (test, known), strict=True):
        words = [word for one in passages for word in corpus.text(one).split()]
        some["unknown"] = sum((word,) not in beam.grams.logs for word in words) / len(words) if beam.grams else 0.0
    return {**found[0], "known": found[1]}


def probe(given: argparse.Namespace) -> None:
    """Time some steps of each arm."""
    begun = time.monotonic()
    corpus = heard(given.data)
    learnt, held, known = corpus.hours
    print(f"data read in {time.monotonic() - begun:.0f} s: {learnt:.2f} h, {held + known:.2f} h held out", flush=True)
    for arm in given.only:
        begun = time.monotonic()
        took = seconds_of(arm, corpus)
        print(f"{arm}: {1e3 * took:.1f} ms a step; all of it took {time.monotonic() - begun:.0f} s", flush=True)


def line(told: dict[str, Any]) -> str:
    """A cell in a line."""
    stream = f", stream {told['stream']['same_tokens']}/{told['stream']['tokens']} tokens" if "stream" in told else ""
    known, again = told["known"], told["again"]
    return (
        f"WER {100 * told['wer']:.1f} CER {100 * told['cer']:.1f}, of speakers that were heard "
        f"{100 * known['wer']:.1f} {100 * known['cer']:.1f}, losses {told['loss']:.2f} and {known['loss']:.2f}, of "
        f"what was learnt {again['loss']:.2f}, {told['parameters'] / 1e6:.2f} M, {told['plan']['steps']} steps of "
        f"{told['step_ms']:.1f} ms, {told['peak_gib']:.1f} GiB{stream}"
    )


def table(out: Path) -> None:
    """All cells that are done, by arm: mean and spread over seeds."""
    found: dict[str, list[dict[str, Any]]] = {}
    for file in sorted((out / "cells").glob("*.json")):
        told = json.loads(file.read_text())
        found.setdefault(told["cell"]["arm"], []).append(told)
    print("| attention | seeds | WER | CER | wrong | missed | extra | M params | epochs | train s |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for arm in [name for name in ARMS if name in found]:
        rows = found[arm]
        cols = [percent([row[name] for row in rows]) for name in ("wer", "cer", "wrong", "missed", "extra")]
        size, took = rows[0]["parameters"] / 1e6, statistics.mean(row["train_s"] for row in rows)
        print(f"| {arm} | {len(rows)} | {' | '.join(cols)} | {size:.2f} | {rows[0]['epochs']:.0f} | {took:.0f} |")


def main() -> int:
    """Train, time, or print what came out."""
    given = parsed(sys.argv[1:])
    given.out.mkdir(parents=True, exist_ok=True)
    if given.part == "probe":
        probe(given)
    elif given.part == "stream":
        stream_all(given)
    elif given.part == "words":
        words_all(given)
    elif given.cell is not None:
        run(given)
    else:
        if given.part == "train":
            train_all(given)
        table(given.out)
    return 0


def parsed(told: Sequence[str]) -> argparse.Namespace:
    """What the command line says."""
    given = arguments().parse_args(told)
    given.only = given.only.split(",")
    given.repeated = given.only if given.repeated is None else given.repeated.split(",")
    return given


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="what evidence/packing/pack_voices.py wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", choices=("train", "probe", "table", "stream", "words"), default="train")
    parser.add_argument("--only", default=",".join(ARMS), help="arms, with commas")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--repeated", help="arms that have more seeds than the first, with commas; all unless told")
    parser.add_argument("--minutes", type=float, default=9, help="in which all that is left is done")
    parser.add_argument("--steps", type=int, help="instead of what the time allows")
    parser.add_argument("--least", type=int, default=2, help="steps that all arms should have: the last are left out")
    parser.add_argument("--limit", type=int, help="recordings that are judged at most, for a trial")
    parser.add_argument("--cell", help="one cell, in this process")
    parser.add_argument("--until", type=float, default=math.inf, help="of --cell: when to stop, in seconds since 1970")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
