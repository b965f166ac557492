"""Distilling language models: language's data and scores, the teacher's distributions as the target."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from ...models import making
from ...train.draws import Draw
from ...train.page import Section
from ...train.settings import Check
from ...train.task import Job, Setup
from ..language.opening import Corpus
from ..language.puzzles import Puzzles
from ..language.questions import Questions
from ..language.reading import Half
from ..language.samples import PuzzleRows, Rows, TextRows
from ..language.settings import LanguageSettings
from ..language.task import CONTEXT, Language
from ..language.tokens import TokenFiles
from ..language.work import LanguageWork, QuestionsWork
from . import causal, hugging
from .lesson import Lesson, begin, let_learn, student_of
from .settings import SwapSettings, told_of
from .two_stages import OF_TRANSFORMERS, TwoStages

TEACHER = "teacher"
LOOKED_AT = 2  # test rows that the report measures layers on
_BOTH: Mapping[str, Any] = {**OF_TRANSFORMERS, "batch_size": 32, "feature_map": "hedgehog", "added_rate": 10.0}
RECIPES: Mapping[str, Mapping[str, Any]] = {
    "layers": {**_BOTH, "stage": "layers", "steps": 300, "lr": 1e-3, "min_lr": 1e-4, "warmup_steps": 20},
    "whole": {**_BOTH, "stage": "whole", "steps": 1_000, "lr": 3e-4, "min_lr": 3e-5, "warmup_steps": 50,
              "hidden_weight": 0.0},
}  # fmt: skip


@dataclass(frozen=True)
class DistilLanguageSettings(LanguageSettings, SwapSettings):
    """Replaced below, by what all its fields are."""

    tokenizer: str = TEACHER
    bound: ClassVar[tuple[str, ...]] = (*SwapSettings.bound, *LanguageSettings.bound)
    checks: ClassVar[Mapping[str, Check]] = {**SwapSettings.checks, **LanguageSettings.checks}


DistilLanguageSettings.__doc__ = told_of(
    """How a linearized language model is made and taught; rows of tokens are those of `--task language`, each one text.

    `tokenizer` is "teacher" here for the one in the teacher's folder, or a file.

    Attributes:
""",
    LanguageSettings,
)


class DistilLanguageWork(LanguageWork):
    """Distilling at work on one job."""

    def __init__(self, job: Job[LanguageSettings], data: Corpus, device: torch.device) -> None:
        super().__init__(job, data, device)
        chosen, half = _chosen(job), job.recipe.precision == "bf16"
        path = Path(str(job.facts["teacher"]))
        dtype = torch.bfloat16 if half and device.type == "cuda" else torch.float32
        self.lesson = Lesson(chosen, lambda: causal.teacher_of(path, dtype), device)

    def _rows(self, half: Half) -> Any:
        if self.files is None:
            return PuzzleRows(cast(Puzzles, self.data), half)
        return StreamRows(self.files.half(half), self.context, self.spelling.end, whole=half == "test")

    def loss(self, network: nn.Module, batch: Any) -> Tensor:
        """How far the student is from its teacher."""
        rows = cast(Rows, batch)
        if self.lesson.chosen.stage == "layers":
            return self.lesson.layers(network, lambda model: model(rows.tokens))
        with torch.no_grad():
            hidden: Tensor = self.lesson.teacher(rows.tokens)
        head: Any = cast(causal.Student, self.lesson.teacher).model.get_output_embeddings()
        weights = self.lesson.chosen.weights()
        like = causal.Taught(hidden, head.weight, weights.logits, weights.hidden, weights.labels, weights.temperature)
        return network(rows.tokens, rows.targets, None, like=like)

    def report(self, network: nn.Module) -> list[Section]:
        """Each swapped layer's error before and after, and what language shows."""
        rows = self._rows("test")
        count = min(LOOKED_AT, len(rows))
        tokens = rows.__getitems__([Draw(index, 0) for index in range(count)]).tokens.to(self.device)
        fresh = TASK.network(self.job)
        about = f"{count} test rows of {self.context} tokens"
        layers = self.lesson.section(fresh, network, lambda model: model(tokens), about)
        return [layers, *super().report(network)]


class StreamRows(TextRows):
    """Rows of a stream of documents in which none begins anew: each row is one text."""

    def __getitems__(self, draws: Any) -> Rows:
        """A batch of draws."""
        rows = super().__getitems__(draws)
        return rows._replace(fresh=torch.zeros_like(rows.fresh))


class DistilLanguage(TwoStages, Language):
    """Making a language model linear: swapped layers learn from the network they were made of."""

    name: ClassVar[str] = "distil_language"
    about: ClassVar[str] = "a linearized language model learns from its softmax teacher"
    settings = DistilLanguageSettings
    stages: ClassVar[Mapping[str, Mapping[str, Any]]] = RECIPES

    def settle(self, job: Job[LanguageSettings], data: Corpus) -> Job[LanguageSettings]:
        """What the teacher is, and the context."""
        if isinstance(data, Questions):
            raise ValueError(f"data: {data.name} is to be judged by alone; distil on text and then use `affinear eval`")
        source = causal.source_of(_chosen(job).teacher)
        hugging.check_asked(job.model, job.model_args, source.config["model_type"])
        spelled = _spelling(job.settings.tokenizer, source, data)
        if spelled.size > int(source.config.get("vocab_size", 0)):
            raise ValueError(
                f"tokenizer: expected at most {source.config.get('vocab_size')} tokens, as the teacher knows, got "
                f"{spelled.size}"
            )
        context = job.settings.context or (data.context if isinstance(data, Puzzles) else CONTEXT)
        facts = {
            "tokenizer": spelled.text,
            "vocabulary": spelled.size,
            "end": spelled.end,
            "config": dict(source.config),
            "teacher": str(source.path.resolve()),
            "teacher_sha256": source.digest,
        }
        # Hooks hand the teacher's inputs to the student's layers, which a compiled graph has no place for.
        recipe = dataclasses.replace(job.recipe, compile=False)
        return dataclasses.replace(job, settings=job.settings.changed(context=context), facts=facts, recipe=recipe)

    def network(self, job: Job[LanguageSettings], *, room: int = making.MOST_NUMBERS) -> nn.Module:
        """The teacher's network with its attention swapped; what its stage does not teach cannot learn."""
        network = causal.made(job.facts["config"], room)
        student_of(cast(nn.Module, network.model), _chosen(job))
        let_learn(network, _chosen(job))
        return network

    def begin(self, network: nn.Module, job: Job[LanguageSettings]) -> None:
        """The teacher's weights."""
        teacher = causal.teacher_of(Path(str(job.facts["teacher"])), torch.float32)
        begin(network, teacher.state_dict(), str(_chosen(job).teacher))

    def work(self, job: Job[LanguageSettings], data: Corpus, device: torch.device) -> LanguageWork:
        """A settled job at work."""
        return (QuestionsWork if isinstance(data, Questions) else DistilLanguageWork)(job, data, device)

    def check_job(self, job: Job[LanguageSettings]) -> None:
        """What language checks, and the configuration."""
        super().check_job(job)
        causal.checked_config(job.facts.get("config"), "config")

    def trial(self, model: str, data: Corpus) -> Setup:
        """The second stage."""
        return self.preset(model, None)


def _spelling(asked: str, source: causal.Source, data: Corpus) -> Any:
    """The tokenizer: the teacher's, and that of token files must be the same."""
    from ..language import spelling

    own = source.spelling if asked == TEACHER else spelling.read(Path(asked).expanduser())
    if isinstance(data, (TokenFiles, Puzzles)):
        if own is not None and own.text != data.spelling.text:
            raise ValueError(
                f"data: {data.name} was spelled by another tokenizer, of {data.spelling.size} tokens, than the "
                f"teacher's, of {own.size}; give the text itself"
            )
        return data.spelling
    if own is None:
        raise ValueError(
            f"tokenizer: {source.path} has no tokenizer.json; --set tokenizer=FILE names one, or give token files"
        )
    return own


def _chosen(job: Job[LanguageSettings]) -> DistilLanguageSettings:
    return cast(DistilLanguageSettings, job.settings)


TASK = DistilLanguage()
