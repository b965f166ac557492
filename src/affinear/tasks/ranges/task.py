"""`--task ranges`: a class for a long sequence, the Long Range Arena."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Literal, cast

import numpy as np
import torch
from torch import nn

from ...models import making
from ...models.sequence import SequenceEncoder, numbers_of, size_of
from ...train.task import Answer, Job, Measure, Setup, Task, Trained
from ..images.reading import CorruptImage
from .asking import rows_of
from .opening import open_ranges
from .recipes import RECIPES, USUAL
from .samples import padded
from .sequences import KINDS, Ranges
from .settings import Guessing, RangesSettings
from .work import RangesWork

LONGEST, MOST_AT_ONCE, MOST_CLASSES = 2**18, 2**16, 1_000  # that a file of weights may ask for
VARIANTS = ("softmax", "linear", "inline", "nala", "mala", "mala_released", "none")


class LongRange(Task[Ranges, RangesSettings]):
    """A class for a long sequence of tokens: one encoder, any mechanism."""

    name: ClassVar[str] = "ranges"
    about: ClassVar[str] = "a class for a long sequence of tokens: the Long Range Arena"
    unit: ClassVar[str] = "sequences"
    samples: ClassVar[str] = "sequences"
    parts: ClassVar[str] = "classes"
    prompted: ClassVar[bool] = True  # expressions; files are named one by one
    pace: ClassVar[Literal["units", "steps"]] = "steps"
    metric: ClassVar[Measure] = Measure("accuracy", "accuracy", share=True)
    measures: ClassVar[tuple[Measure, ...]] = (metric, Measure("loss", "test loss", False, ".3f"))
    settings = RangesSettings
    options = Guessing

    @property
    def recipes(self) -> Mapping[str, Setup]:
        """The published recipes by name: one for each kind of data."""
        return MappingProxyType({name: Setup(self, *parts) for name, parts in RECIPES.items()})

    def preset(self, model: str, name: str | None) -> Setup:
        """The recipe of this name; without one, that of ListOps, since the data is not known here."""
        return self.named(name or USUAL)

    def open(self, spec: str, settings: RangesSettings) -> Ranges:
        """Sequences, made up or read."""
        return dataclasses.replace(open_ranges(spec), judged=settings.judged_by)

    def settle(self, job: Job[RangesSettings], data: Ranges) -> Job[RangesSettings]:
        """The job with the length decided, and what the encoder needs to know."""
        length = job.settings.length or data.length
        if data.kind in ("image", "pathfinder") and length < data.length:
            raise ValueError(f"length: expected {data.length}, every pixel of a picture, got {length}; leave it out")
        facts: dict[str, Any] = {
            "data_kind": data.kind,
            "symbols": data.symbols,
            "classes": list(data.classes),
            "pairs": data.pairs,
        }
        settled = dataclasses.replace(job, settings=job.settings.changed(length=length), facts=facts)
        size_of(job.model, job.model_args)
        return settled

    def network(self, job: Job[RangesSettings], *, room: int = making.MOST_NUMBERS) -> nn.Module:
        """The encoder of a settled job."""
        for name, value in job.model_args.items():
            making.check_plain(value, f"model_args: {name}")
        size = size_of(job.model, job.model_args)
        length, facts = job.settings.length, job.facts
        assert length is not None
        sizes: tuple[int, int, int] = (facts["symbols"], length, len(facts["classes"]))
        numbers = numbers_of(size, *sizes, pairs=facts["pairs"])
        if numbers > room:
            raise ValueError(f"model_args: {job.model} would have {numbers:,} numbers, and there is room for {room:,}")
        return SequenceEncoder(size, *sizes, pairs=facts["pairs"], dropout=job.settings.dropout)

    def work(self, job: Job[RangesSettings], data: Ranges, device: torch.device) -> RangesWork:
        """A settled job at work."""
        return RangesWork(job, data, device)

    def check_job(self, job: Job[RangesSettings]) -> None:
        """Raise ValueError if a job that was read from a file lacks a fact, or asks for what no user would."""
        facts, length = job.facts, job.settings.length
        classes: Any = facts.get("classes")
        listed = cast("list[Any]", classes) if isinstance(classes, list) else []
        if not 0 < len(listed) <= MOST_CLASSES or not all(isinstance(name, str) for name in listed):
            raise ValueError(f"classes: expected names in a list, got {making.short(classes)}")
        if facts.get("data_kind") not in KINDS or not isinstance(facts.get("pairs"), bool):
            raise ValueError("facts: expected data_kind and pairs, as training writes them")
        symbols: Any = facts.get("symbols")
        if type(symbols) is not int or not 1 <= symbols <= 256:
            raise ValueError(f"symbols: expected a number from 1 to 256, got {making.short(symbols)}")
        if length is None or not 1 <= length <= LONGEST:
            raise ValueError(f"settings: length: expected from 1 to {LONGEST}, got {making.short(length)}")
        if max(job.recipe.batch_size, job.settings.test_batch) > MOST_AT_ONCE:
            raise ValueError(f"settings: expected batches of at most {MOST_AT_ONCE}")

    def summary(self, job: Job[RangesSettings], data: Ranges) -> str:
        """Sequences, tokens and classes."""
        return f"{super().summary(job, data)} of up to {job.settings.length:,} tokens, {len(data.classes)} classes"

    def check_data(self, trained: Trained[Ranges, RangesSettings], data: Ranges) -> None:
        """Raise ValueError if the data is of another kind, or has other classes."""
        facts = trained.job.facts
        if facts["data_kind"] != data.kind or tuple(facts["classes"]) != data.classes or facts["pairs"] != data.pairs:
            raise ValueError(
                f"data: expected {facts['data_kind']} with {len(facts['classes'])} classes, which the network was "
                f"trained for, got {data.kind} with {len(data.classes)}"
            )

    def limited(self, data: Ranges, limit: int) -> Ranges:
        """At most so many sequences of each part, evenly among all."""
        parts = {
            name: split.some(np.linspace(0, len(split) - 1, min(limit, len(split))).astype(int).tolist())
            for name, split in (("train", data.train), ("validation", data.validation), ("test", data.test))
        }
        return dataclasses.replace(data, name=f"{data.name}, at most {limit} of each part", **parts)

    def variants(self, model: str) -> Mapping[str, Mapping[str, Any]]:
        """Every mechanism, and none at all."""
        return {name: self.variant(model, name) for name in VARIANTS}

    def variant(self, model: str, name: str) -> Mapping[str, Any]:
        """The encoder with this mechanism; "own" for the encoder as it is."""
        given = {} if name == "own" else {"mechanism": name}
        size_of(model, given)
        return given

    def variant_about(self, name: str) -> str:
        """What a variant is, in a few words."""
        told = {"own": "the encoder as it is", "none": "no attention: tokens meet in the pooling alone"}
        return told.get(name, f"{name} in every block")

    def trial(self, model: str, data: Ranges) -> Setup:
        """The recipe of the data's kind."""
        return self.preset(model, data.kind)

    @torch.no_grad()
    def predict(
        self, trained: Trained[Ranges, RangesSettings], sources: Sequence[str], options: Any
    ) -> Iterator[Answer]:
        """Which class an expression, a text, a pair of texts or a picture has."""
        assert isinstance(options, Guessing)
        job, network = trained.job, trained.network
        device = next(network.parameters()).device
        classes: list[str] = job.facts["classes"]
        assert job.settings.length is not None
        for source in sources:
            try:
                rows = rows_of(source, job.facts["data_kind"], job.settings.length)
            except (CorruptImage, ValueError, OSError) as error:
                said = f"{source}: {error.strerror or error}" if isinstance(error, OSError) else str(error)
                yield Answer(source, error=said.splitlines()[0])
                continue
            tokens, lengths = (part.to(device) for part in padded(rows, job.settings.length))
            pair = job.facts["pairs"]
            logits = network(tokens.long()[None] if pair else tokens.long(), lengths[None] if pair else lengths)
            shares = logits.float().softmax(-1)[0].tolist()
            best = sorted(range(len(classes)), key=lambda number: -shares[number])[: options.top]
            yield Answer(
                source,
                text=", ".join(f"{classes[number]} {shares[number]:.1%}" for number in best),
                content={"class": classes[best[0]], "shares": dict(zip(classes, shares, strict=True))},
            )


TASK = LongRange()
