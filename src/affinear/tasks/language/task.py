"""`--task language`: the next token of a text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import nn

from ...lens.files import place as put
from ...models import making
from ...ops import find
from ...train.task import Answer, Job, Measure, Setup, Task, Trained
from . import network, spelling
from .generating import spoken
from .opening import Corpus, open_corpus
from .puzzles import Puzzles
from .questions import Questions
from .recipes import PUZZLE, RECIPES, USUAL
from .settings import LanguageSettings, Speaking
from .shapes import SHAPES, shape_of
from .spelling import BYTES, Spelling
from .tokens import TokenFiles, cache
from .work import LanguageWork, QuestionsWork

LONGEST, MOST_AT_ONCE = 2**22, 2**16  # that a file of weights may ask for
CONTEXT = 1_024
LEARN = "train"
MECHANISMS = ("softmax", "linear", "inline", "nala", "mala", "mala_released")


class Language(Task[Corpus, LanguageSettings]):
    """The next token of a text: models of ours, and those they are measured against."""

    name: ClassVar[str] = "language"
    about: ClassVar[str] = "the next token of a text"
    unit: ClassVar[str] = "tokens"
    samples: ClassVar[str] = "documents"
    parts: ClassVar[str] = "positions"
    prompted: ClassVar[bool] = True
    between: ClassVar[str] = ""
    metric: ClassVar[Measure] = Measure("perplexity", "perplexity", higher_is_better=False, form=".2f")
    measures: ClassVar[tuple[Measure, ...]] = (
        metric,
        Measure("accuracy", "accuracy"),
        Measure("loss", "test loss", higher_is_better=False, form=".3f"),
    )
    settings = LanguageSettings
    options = Speaking

    @property
    def recipes(self) -> Mapping[str, Setup]:
        """The recipes by name."""
        return MappingProxyType({name: Setup(self, *parts) for name, parts in RECIPES.items()})

    def preset(self, model: str, name: str | None) -> Setup:
        """The recipe of this name, or the one for few tokens."""
        return self.named(name or USUAL)

    def open(self, spec: str, settings: LanguageSettings) -> Corpus:
        """Text, token files, puzzles or questions."""
        return open_corpus(spec, settings)

    def settle(self, job: Job[LanguageSettings], data: Corpus) -> Job[LanguageSettings]:
        """The job with context and tokenizer decided."""
        if isinstance(data, Questions):
            raise ValueError(f"data: {data.name} is to be judged by alone; train on text and then use `affinear eval`")
        shape_of(job.model, job.model_args)
        context = job.settings.context or (data.context if isinstance(data, Puzzles) else CONTEXT)
        if isinstance(data, Puzzles) and context != data.context:
            raise ValueError(
                f"context: expected {data.context}, the length of {data.name}, got {context}; leave it out"
            )
        spelled = spelling_of(data, job.settings)
        facts = {"tokenizer": spelled.text, "vocabulary": spelled.size, "end": spelled.end}
        return dataclasses.replace(job, settings=job.settings.changed(context=context), facts=facts)

    def network(self, job: Job[LanguageSettings], *, room: int = making.MOST_NUMBERS) -> nn.Module:
        """The language model of a settled job."""
        return network.made(job.model, job.model_args, job.facts, room)

    def work(self, job: Job[LanguageSettings], data: Corpus, device: torch.device) -> LanguageWork:
        """A settled job at work."""
        return (QuestionsWork if isinstance(data, Questions) else LanguageWork)(job, data, device)

    def check_job(self, job: Job[LanguageSettings]) -> None:
        """Raise ValueError if a job that was read from a file lacks a fact, or asks for what no user would."""
        facts, context = job.facts, job.settings.context
        text: Any = facts.get("tokenizer")
        if not isinstance(text, str):
            raise ValueError(f"tokenizer: expected what the weights were trained with, got {making.short(text)}")
        spelled = Spelling(text)
        if (facts.get("vocabulary"), facts.get("end")) != (spelled.size, spelled.end):
            told = making.short(facts.get("vocabulary"))
            raise ValueError(f"vocabulary: expected {spelled.size}, as the tokenizer has, got {told}")
        if context is None or context > LONGEST:
            raise ValueError(f"settings: context: expected at most {LONGEST}, got {making.short(context)}")
        if max(job.recipe.batch_size, job.settings.test_batch) > MOST_AT_ONCE:
            raise ValueError(f"settings: expected batches of at most {MOST_AT_ONCE}")

    def check_data(self, trained: Trained[Corpus, LanguageSettings], data: Corpus) -> None:
        """Raise ValueError if tokens were made by another tokenizer than the network's."""
        own = trained.job.facts["tokenizer"]
        if isinstance(data, (TokenFiles, Puzzles)) and data.spelling.text != own:
            raise ValueError(
                f"data: {data.name} was spelled by another tokenizer, of {data.spelling.size} tokens, than the "
                f"network's, of {trained.job.facts['vocabulary']}; give the text itself"
            )

    def summary(self, job: Job[LanguageSettings], data: Corpus) -> str:
        """Documents, vocabulary and context."""
        train, test = data.sizes
        what = "rows" if isinstance(data, Puzzles) else self.samples
        return (
            f"{train:,} training and {test:,} test {what}, {job.facts['vocabulary']:,} tokens of vocabulary, rows of "
            f"{job.settings.context:,}"
        )

    def variants(self, model: str) -> Mapping[str, Mapping[str, Any]]:
        """Every mechanism of ours; a model of others, itself."""
        if not self._ours(model):
            return {"own": {}}
        return {name: self.variant(model, name) for name in MECHANISMS}

    def variant(self, model: str, name: str) -> Mapping[str, Any]:
        """The model with this mechanism; "own" for the model as it is."""
        if name == "own":
            return {}
        if not self._ours(model):
            raise ValueError(f"variant: expected 'own', as {model} has no mechanism to choose, got {name!r}")
        find(name)
        return {"mechanism": name}

    def _ours(self, model: str) -> bool:
        shape_of(model, {})
        return SHAPES[model].family == "affinear"

    def trial(self, model: str, data: Corpus) -> Setup:
        """The recipe for few tokens, or that of puzzles."""
        return self.preset(model, PUZZLE if isinstance(data, Puzzles) else USUAL)

    def follow(self, trained: Trained[Corpus, LanguageSettings], source: str, options: Any) -> Iterator[str]:
        """Pieces of the text that goes on from a prompt, as they come."""
        assert isinstance(options, Speaking)
        return spoken(trained.network, Spelling(trained.job.facts["tokenizer"]), prompt_of(source), options)

    def predict(
        self, trained: Trained[Corpus, LanguageSettings], sources: Sequence[str], options: Any
    ) -> Iterator[Answer]:
        """How texts go on."""
        for source in sources:
            try:
                said = "".join(self.follow(trained, source, options))
                yield Answer(source, text=said or "(it ends there)", content={"prompt": source, "text": said})
            except (ValueError, OSError) as error:
                yield Answer(source, error=(str(error).splitlines() or [type(error).__name__])[0])


def prompt_of(source: str) -> str:
    """A prompt: the text itself, or what is in the file that @ stands before.

    Raises:
        ValueError: If there is no such file, or no text in it.
    """
    if not source.startswith("@"):
        return source
    try:
        return Path(source[1:]).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{source[1:]}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{source[1:]}: expected text in UTF-8") from None


def spelling_of(data: Corpus, settings: LanguageSettings) -> Spelling:
    """The tokenizer of a corpus: what its token files have, what the user gave, or one that is learnt and kept."""
    if isinstance(data, (TokenFiles, Puzzles)):
        return data.spelling
    assert not isinstance(data, Questions)
    if settings.tokenizer == BYTES:
        return Spelling(BYTES)
    if settings.tokenizer != LEARN:
        return spelling.read(Path(settings.tokenizer).expanduser())
    place = cache() / "tokenizers" / f"{data.fingerprint}-{settings.vocabulary}.json"
    if place.is_file():
        return spelling.read(place)
    found = spelling.learnt(data.texts("train"), settings.vocabulary)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        put(found.text.encode(), place, force=True)
    except OSError as error:
        raise ValueError(f"tokenizer: it cannot be kept in {place} ({error.strerror or error})") from None
    return found


TASK = Language()
