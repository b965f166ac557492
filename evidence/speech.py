"""The evidence of speech: word errors by mechanism on speakers that were never heard, on one GPU, within a given time.

    PYTHONPATH=src python evidence/speech.py --data packed --out speech --minutes 9

trains every cell that is not there yet, several at a time on one GPU, the first seed of all before the second of any,
on what `evidence/packing/pack_voices.py` packed: lines of 22 characters of a game. Five others are held out. A cell
writes `cells/NAME.json` when it is done; when the time is over a cell keeps where it is in `state/`, nothing new is
begun, and the same command goes on. How many steps there are is found out in the beginning, from how fast the slowest
cell is among all of them, so that all end in time; the number is in `state/steps.json` and in every cell, and `--steps`
sets it for a later call on another machine. `--probe` times a few steps of each, `--part table` prints what came out,
`--part stream` trains nothing: it holds streams of networks with fresh weights to the whole, over held-out speakers.
It needs torch, timm, accelerate and numpy.

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
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from affinear.bench.timing import synchronize
from affinear.models.speech import Conformer
from affinear.models.speech.conformer import tokens_of
from affinear.tasks.speech.augment import Masks, mask
from affinear.tasks.speech.hearing import Ear
from affinear.tasks.speech.metric import Errors, compare
from affinear.tasks.speech.planning import ByDuration
from affinear.tasks.speech.settings import Hearing
from affinear.tasks.speech.text import Spelling, plain
from affinear.tasks.speech.work import ctc, heard_texts
from affinear.train.draws import NOTHING
from packing.pack_voices import BANDS, FLOOR, RATE, STEP, read_packed
from pages.words import percent
from running.cells import Cell, is_worker, serve, work_off
from running.files import keep
from running.machine import machine
from running.options import how_of
from running.pace import Pace, timed

HELD_OUT = ("syreen", "supox", "yehat", "yehatrebels", "shofixti")
SPELLING = Spelling.of_letters([], "abcdefghijklmnopqrstuvwxyz'0123456789")
ARMS: dict[str, dict[str, Any]] = {
    "softmax_relative": {"mechanism": "softmax", "positions": "relative"},
    "softmax": {"mechanism": "softmax"},
    "mala": {"mechanism": "mala"},
    "linear": {"mechanism": "linear"},
    "nala": {"mechanism": "nala"},
    "inline": {"mechanism": "inline"},
    "none": {"mechanism": "none"},
    "mala_causal": {"mechanism": "mala", "causal": True},
}
SHAPE: dict[str, Any] = {"dim": 192, "depth": 6, "num_heads": 6, "conv_norm": "layer", "dropout": 0.1}
STREAMED = ("mala", "linear", "nala", "inline")
SPEEDS = (0.9, 1.0, 1.1)
MASKS = Masks(bands=2, band_width=12, times=5, time_share=0.05)
LAST = 20.0  # seconds to judge
ROUND = 64  # frames that lengths of batches differ by, so that few shapes come


@dataclass(frozen=True)
class Plan:
    """How every cell is trained.

    Attributes:
        steps: In all, at most.
        seconds: Of a batch, padding included.
        places: Recordings of a batch at most.
        lr: Peak of the learning rate.
        warm: Steps until then.
        decay: Of the weights.
        average: Decay of the averaged weights, which are judged.
    """

    steps: int = 5000
    seconds: float = 320.0
    places: int = 128
    lr: float = 1.5e-3
    warm: int = 150
    decay: float = 0.01
    average: float = 0.995


@dataclass(frozen=True)
class Training:
    """One network to be trained."""

    arm: str
    seed: int

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{self.arm}-{self.seed}"


# ------------------------------------------------------------------------------------------------ data


class Corpus:
    """All recordings on the device, and which are learnt from.

    Args:
        folder: What was packed.
        cache: Where it is kept unpacked, for the other cells.
        device: Where the features are.
    """

    def __init__(self, folder: Path, cache: Path, device: torch.device) -> None:
        rows = unpack_once(folder, cache)
        self.flat = torch.from_numpy(np.load(cache)).to(device)
        self.frames = [row["frames"] for row in rows]
        self.starts = np.cumsum([0, *self.frames[:-1]]).tolist()
        self.texts = [plain(row["text"]) for row in rows]
        self.speakers = [row["speaker"] for row in rows]
        self.targets = [SPELLING.encode(text) for text in self.texts]
        spoken = [i for i, text in enumerate(self.texts) if text]
        self.test = [i for i in spoken if self.speakers[i] in HELD_OUT]
        learnt = [i for i in spoken if self.speakers[i] not in HELD_OUT]
        self.train = [i for i in learnt if tokens_of(int(self.frames[i] / max(SPEEDS))) >= _needed(self.targets[i])]
        chosen = torch.cat([self.features(i) for i in self.train[:: max(1, len(self.train) // 500)]]).double()
        self.facts = {"mean": chosen.mean(dim=0).tolist(), "std": chosen.std(dim=0).tolist()}
        self.device = device

    @property
    def hours(self) -> list[float]:
        """Of what is learnt from, and of what is held out."""
        return [sum(self.frames[i] for i in half) / 360_000 for half in (self.train, self.test)]

    def features(self, index: int) -> Tensor:
        """Features (T, F) of one recording, not normalised."""
        first = self.starts[index]
        return FLOOR + STEP * self.flat[first : first + self.frames[index]].float()

    def batch(self, indices: Sequence[int], ear: Ear, speeds: Sequence[float]) -> tuple[Tensor, Tensor]:
        """Normalised features (B, T, F) of recordings at their speeds, and the frames of each."""
        frames = [int(self.frames[i] / speed) for i, speed in zip(indices, speeds, strict=True)]
        length = -(-(max(frames) - 3) // ROUND) * ROUND + 3  # as many as 16, 32, 48 ... tokens are made of
        counts, starts = (torch.tensor(x, device=self.device) for x in (frames, [self.starts[i] for i in indices]))
        place = torch.arange(length, device=self.device)
        inside = place < counts[:, None]
        speed = torch.tensor(speeds, device=self.device, dtype=torch.float32)[:, None]
        last = torch.tensor([self.frames[i] - 1 for i in indices], device=self.device)[:, None]
        taken = torch.minimum((place * speed).long(), last) + starts[:, None]
        features = FLOOR + STEP * self.flat[taken].float()
        return ear.normalized(features, inside[..., None]).masked_fill(~inside[..., None], 0), counts


def unpack_once(folder: Path, cache: Path) -> list[dict[str, Any]]:
    """All rows; their features are in the cache, one after the other."""
    if not cache.is_file():
        features = np.concatenate(read_packed(folder)[1])
        part = cache.with_suffix(f".{os.getpid()}.npy")
        np.save(part, features)
        part.replace(cache)
    return json.loads((folder / "voices.json").read_text(encoding="utf-8"))


def _needed(pieces: Sequence[int]) -> int:
    return len(pieces) + sum(a == b for a, b in itertools.pairwise(pieces))


def ear_of(corpus: Corpus, arm: str) -> Ear:
    """How the features of an arm are normalised."""
    by = "corpus" if ARMS[arm].get("causal") else "recording"
    settings = Hearing(sample_rate=RATE, bands=BANDS, normalization=by)
    return Ear(settings, corpus.facts).to(corpus.device)


# ------------------------------------------------------------------------------------------------ one cell


class Trainer:
    """A network on its way, from anywhere it was left.

    Args:
        cell: Which one.
        plan: How.
        corpus: From what.
    """

    def __init__(self, cell: Training, plan: Plan, corpus: Corpus) -> None:
        torch.manual_seed(cell.seed)
        self.cell, self.plan, self.corpus, self.ear = cell, plan, corpus, ear_of(corpus, cell.arm)
        self.network = Conformer(SPELLING.size, BANDS, **{**SHAPE, **ARMS[cell.arm]}).to(corpus.device)
        flat = [p for p in self.network.parameters() if p.ndim < 2]
        deep = [p for p in self.network.parameters() if p.ndim >= 2]
        groups = [{"params": deep, "weight_decay": plan.decay}, {"params": flat, "weight_decay": 0.0}]
        fused = corpus.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(groups, lr=plan.lr, betas=(0.9, 0.98), fused=fused)
        self.average = [p.detach().clone() for p in self.network.parameters()]
        self.step, self.took, self.losses = 0, 0.0, list[float]()
        self.order = ByDuration(
            [frames / 100 / min(SPEEDS) for frames in corpus.frames],
            corpus.train,
            plan.places,
            plan.seconds,
            cell.seed,
        )
        self._drawn: tuple[int, list[list[int]]] = (-1, [])

    def indices(self, step: int) -> list[int]:
        """The recordings of a step."""
        epoch, number = divmod(step, self.order.batches)
        if self._drawn[0] != epoch:
            self.order.set_epoch(epoch)
            draws = [draw.index for draw in self.order]
            places = self.plan.places
            self._drawn = epoch, [draws[i : i + places] for i in range(0, len(draws), places)]
        return [index for index in self._drawn[1][number] if index != NOTHING]

    def advance(self) -> None:
        """One step."""
        plan, step = self.plan, self.step
        torch.manual_seed(step + 100_003 * self.cell.seed)
        random = np.random.default_rng((self.cell.seed, step))
        indices = self.indices(step)
        speeds = random.choice(SPEEDS, size=len(indices)).tolist()
        features, frames = self.corpus.batch(indices, self.ear, speeds)
        features = mask(features, frames, MASKS)
        pieces = [self.corpus.targets[i] for i in indices]
        lengths = torch.tensor([len(one) for one in pieces])
        targets = torch.zeros(len(pieces), int(lengths.max()), dtype=torch.int64)
        for row, one in zip(targets, pieces, strict=True):
            row[: len(one)] = torch.tensor(one)
        targets, lengths = targets.to(features.device), lengths.to(features.device)
        rest = max(step - plan.warm, 0) / max(plan.steps - plan.warm, 1)
        share = min((step + 1) / plan.warm, 0.5 * (1 + math.cos(math.pi * rest)))
        for group in self.optimizer.param_groups:
            group["lr"] = plan.lr * share
        with torch.autocast(features.device.type, torch.bfloat16, enabled=features.is_cuda):
            logits, counts = self.network(features, frames)
        loss = ctc(logits, counts, targets, lengths).mean()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0, foreach=True)
        self.optimizer.step()
        with torch.no_grad():
            old = min(plan.average, (step + 1) / (step + 10))
            torch._foreach_lerp_(self.average, list(self.network.parameters()), 1 - old)  # pyright: ignore[reportPrivateUsage]
        self.step += 1
        if step % 50 == 0 or self.step == plan.steps:
            self.losses.append(loss.item())
            if not math.isfinite(self.losses[-1]):
                raise RuntimeError(f"the loss is {self.losses[-1]} after {self.step} steps")

    def state(self) -> dict[str, Any]:
        """Where it is."""
        told = {"step": self.step, "took": self.took, "losses": self.losses, "average": self.average}
        return {**told, "network": self.network.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, told: dict[str, Any]) -> None:
        """Go on from where it was."""
        self.network.load_state_dict(told["network"])
        self.optimizer.load_state_dict(told["optimizer"])
        self.step, self.took, self.losses = told["step"], told["took"], told["losses"]
        for mine, other in zip(self.average, told["average"], strict=True):
            mine.copy_(other)

    def averaged(self) -> Conformer:
        """The averaged weights, in a network of their own, in evaluation mode."""
        network = Conformer(SPELLING.size, BANDS, **{**SHAPE, **ARMS[self.cell.arm]}).to(self.corpus.device)
        with torch.no_grad():
            for parameter, mean in zip(network.parameters(), self.average, strict=True):
                parameter.copy_(mean)
        return network.eval()


@torch.no_grad()
def judge(network: Conformer, corpus: Corpus, ear: Ear, limit: int | None) -> dict[str, Any]:
    """Errors on the held-out speakers, all together and each by itself, with some examples."""
    order = sorted(corpus.test, key=lambda i: -corpus.frames[i])[
        :: 1 if limit is None else -(-len(corpus.test) // limit)
    ]
    found: dict[str, Errors] = {}
    examples: list[tuple[str, str]] = []
    for first in range(0, len(order), 64):
        some = order[first : first + 64]
        features, frames = corpus.batch(some, ear, [1.0] * len(some))
        with torch.autocast(features.device.type, torch.bfloat16, enabled=features.is_cuda):
            texts = heard_texts(network, features, frames, SPELLING)
        for i, text in zip(some, texts, strict=True):
            found[corpus.speakers[i]] = found.get(corpus.speakers[i], Errors()) + compare(corpus.texts[i], text)
            if len(examples) < 12 and i % 40 == 0:
                examples.append((corpus.texts[i], text))
    total = sum(found.values(), Errors())
    speakers = {name: errors.numbers["wer"] for name, errors in sorted(found.items())}
    return {
        **total.numbers,
        "words": total.words,
        "recordings": total.recordings,
        "speakers": speakers,
        "said": examples,
    }


@torch.no_grad()
def streamed(network: Conformer, corpus: Corpus, ear: Ear, count: int) -> dict[str, int]:
    """In how many of some recordings and of their tokens the stream says what the whole says; of how many kinds."""
    same = tokens = equal = 0
    pieces: set[int] = set()
    chosen = corpus.test[:: max(1, len(corpus.test) // count)][:count]
    for index in chosen:
        features = ear.normalized(corpus.features(index)[None])
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


def fitted(cell: Training, plan: Plan, corpus: Corpus, given: argparse.Namespace) -> Plan:
    """The plan with as many steps as the slowest of all cells can do in the time that is left."""
    if given.steps is not None or given.until == math.inf:
        return plan
    pace = Pace(given.out / "state", given.crowd, given.rounds, given.until, judging=LAST)

    def seconds_of_a_step() -> float:
        return timed(Trainer(cell, plan, corpus).advance, lambda: synchronize(corpus.device))

    return replace(plan, steps=pace.steps(cell.name, plan.steps, seconds_of_a_step))


@functools.cache
def heard(folder: Path, cache: Path, device: torch.device) -> Corpus:
    """The corpus, once for all cells of a process."""
    return Corpus(folder, cache, device)


def run(given: argparse.Namespace) -> None:
    """Train a cell until it is done or the time is over, and write down which."""
    arm, _, seed = cast(str, given.cell).rpartition("-")
    cell = Training(arm, int(seed))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    corpus = heard(given.data, given.out / "state" / "features.npy", device)
    plan = fitted(cell, given.plan, corpus, given)
    trainer = Trainer(cell, plan, corpus)
    kept = given.out / "state" / f"{cell.name}.pt"
    if kept.is_file():
        trainer.load(torch.load(kept, map_location=device, weights_only=True))
    sizes = f"{len(corpus.train)} recordings, {len(corpus.test)} held out"
    print(f"{cell.name} at step {trainer.step} of {plan.steps}; {sizes}", flush=True)
    begun = time.monotonic()
    while trainer.step < plan.steps:
        trainer.advance()
        if trainer.step % 50 == 0:
            print(f"{trainer.step} {trainer.losses[-1]:.3f} {time.monotonic() - begun:.0f} s", flush=True)
            if time.time() > given.until:
                break
    trainer.took += time.monotonic() - begun
    if trainer.step < plan.steps:
        torch.save(trainer.state(), kept.with_suffix(".part"))
        kept.with_suffix(".part").replace(kept)
        return
    network = trainer.averaged()
    told: dict[str, Any] = {
        "cell": asdict(cell),
        "plan": asdict(plan),
        "shape": SHAPE,
        "parameters": sum(p.numel() for p in network.parameters()),
        "epochs": plan.steps / trainer.order.batches,
        "hours": corpus.hours,
        "train_s": trainer.took,
        "losses": trainer.losses,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0,
        **judge(network, corpus, trainer.ear, given.limit),
    }
    if network.streams:
        told["stream"] = streamed(network.float(), corpus, trainer.ear, given.limit or 60)
    keep(given.out / "cells" / f"{cell.name}.json", told)
    kept.unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------------ all cells


def trainings(arms: Sequence[str], seeds: int, repeated: Sequence[str]) -> list[Training]:
    """All of them, the first seed of every arm before the second of those that are repeated."""
    return [Training(arm, seed) for seed in range(seeds) for arm in arms if seed == 0 or arm in repeated]


def train_all(given: argparse.Namespace) -> None:
    """Let processes do all that is left; when the time is over each keeps where it is, by itself, and ends."""
    folder = given.out / "cells"
    unpack_once(given.data, given.out / "state" / "features.npy")
    names = [one.name for one in trainings(given.only, given.seeds, given.repeated)]
    waiting = sum(not (folder / f"{name}.json").is_file() for name in names)
    crowd = min(given.parallel, waiting)
    shared = ("--crowd", str(crowd), "--rounds", str(-(-waiting // max(1, crowd))))
    shared = (*sys.argv[1:], *shared, "--until", str(time.time() + 60 * given.minutes), "--cell")
    cells = [Cell.in_files(name, folder, shared) for name in names]
    how = how_of(given, given.out, stop=False, threads=2)
    left = work_off(__file__, cells, how, lambda one: line(one.read() or {}))
    if left:
        print(f"for another call: {', '.join(one.title for one in left)}", flush=True)


def stream_all(given: argparse.Namespace) -> None:
    """Streams of causal networks with fresh weights beside the whole recordings, every linear mechanism."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    corpus = Corpus(given.data, given.out / "state" / "features.npy", device)
    ear = ear_of(corpus, "mala_causal")
    rows: list[dict[str, Any]] = []
    for mechanism in STREAMED:
        torch.manual_seed(0)
        own: dict[str, Any] = {**SHAPE, "mechanism": mechanism, "causal": True}
        made = Conformer(SPELLING.size, BANDS, **own).to(device).eval()
        told = streamed(made, corpus, ear, given.limit or len(corpus.test))
        rows.append({"mechanism": mechanism, **told})
        print(f"{mechanism}: {told['same_tokens']:,} of {told['tokens']:,} tokens are the same", flush=True)
        keep(given.out / "stream.json", {"machine": machine(), "rows": rows})


def probe(given: argparse.Namespace) -> None:
    """Time some steps of each arm, alone on the machine."""
    plan = given.plan
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    begun = time.monotonic()
    corpus = Corpus(given.data, given.out / "state" / "features.npy", device)
    learnt, held_out = corpus.hours
    print(f"data read in {time.monotonic() - begun:.0f} s: {learnt:.2f} h, {held_out:.2f} h held out", flush=True)
    for arm in given.only:
        trainer = Trainer(Training(arm, 0), plan, corpus)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        took = timed(trainer.advance, lambda: synchronize(device))
        peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
        epochs = plan.steps / trainer.order.batches
        print(
            f"{arm}: {1e3 * took:.0f} ms a step, {took * plan.steps / 60:.1f} min for {plan.steps} steps, {epochs:.0f} "
            f"epochs, alone; {peak:.1f} GiB",
            flush=True,
        )


def line(told: dict[str, Any]) -> str:
    """A cell in a line."""
    steps = told["plan"]["steps"]
    stream = f", stream {told['stream']['same_tokens']}/{told['stream']['tokens']} tokens" if "stream" in told else ""
    return (
        f"WER {100 * told['wer']:.1f} CER {100 * told['cer']:.1f}, {told['parameters'] / 1e6:.2f} M, "
        f"{steps} steps, {told['train_s']:.0f} s, {told['peak_gib']:.1f} GiB{stream}"
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
    if is_worker():
        return serve(lambda told: run(parsed(told)))
    given = parsed(sys.argv[1:])
    for name in ("cells", "state"):
        (given.out / name).mkdir(parents=True, exist_ok=True)
    if given.probe:
        probe(given)
    elif given.part == "stream":
        stream_all(given)
    elif given.cell is not None:
        run(given)
    else:
        if given.part == "train":
            train_all(given)
        table(given.out)
    return 0


def parsed(told: Sequence[str]) -> argparse.Namespace:
    """What the command line says, with the plan."""
    given = arguments().parse_args(told)
    given.only = given.only.split(",")
    given.repeated = given.only if given.repeated is None else given.repeated.split(",")
    changes = {name: getattr(given, name) for name in ("steps", "seconds") if getattr(given, name) is not None}
    given.plan = Plan(**{**asdict(Plan()), **changes})
    return given


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="what evidence/packing/pack_voices.py wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", choices=("train", "table", "stream"), default="train")
    parser.add_argument("--only", default=",".join(ARMS), help="arms, with commas")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--repeated", help="arms that have more seeds than the first, with commas; all unless told")
    parser.add_argument("--parallel", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=9, help="after which cells keep where they are and end")
    parser.add_argument("--mps", action="store_true", help="let processes share the GPU through NVIDIA's MPS")
    parser.add_argument("--probe", action="store_true", help="time some steps of each arm, and stop")
    parser.add_argument("--steps", type=int, help="instead of what the time allows")
    parser.add_argument("--seconds", type=float, help="of a batch, instead of the plan's own")
    parser.add_argument("--limit", type=int, help="recordings that are judged at most, for a trial")
    parser.add_argument("--cell", help="one cell, in this process")
    parser.add_argument("--crowd", type=int, default=1, help="of --cell: how many run at a time")
    parser.add_argument("--rounds", type=int, default=1, help="of --cell: how many come one after the other")
    parser.add_argument("--until", type=float, default=math.inf, help="of --cell: when to stop, in seconds since 1970")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
