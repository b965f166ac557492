"""Language at work on one job: loaders, loss, score and report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from ...train.draws import NOTHING, Draw
from ...train.loading import in_order, shuffled_by
from ...train.page import Section
from ...train.task import Job, Score, Work
from .likelihood import likelihoods
from .opening import Corpus
from .puzzles import Puzzles
from .questions import Questions
from .reading import Half, Texts
from .report import sections
from .samples import PuzzleRows, Rows, TextRows, as_it_is
from .scoring import Sums, perplexity
from .settings import LanguageSettings
from .spelling import Spelling
from .tokens import TokenFiles, kept


class LanguageWork(Work[Corpus, LanguageSettings]):
    """Rows of packed documents, or of puzzles, to learn from and to be judged by.

    Args:
        job: With nothing left open.
        data: Open. Text is spelled here, as the network's own tokenizer does it.
        device: Where batches will be.
    """

    def __init__(self, job: Job[LanguageSettings], data: Corpus, device: torch.device) -> None:
        super().__init__(job, data, device)
        assert job.settings.context is not None
        self.context, self.spelling = job.settings.context, Spelling(job.facts["tokenizer"])
        self.files: TokenFiles | None = None
        if isinstance(data, Texts):
            self.files = kept(data, self.spelling)
        elif isinstance(data, TokenFiles):
            self.files = data

    @property
    def per_step(self) -> float:
        """Tokens of one optimizer step."""
        return float(self.job.recipe.batch_size * self.context)

    def _rows(self, half: Half) -> Any:
        if self.files is None:
            return PuzzleRows(cast(Puzzles, self.data), half)
        return TextRows(self.files.half(half), self.context, self.spelling.end, whole=half == "test")

    def train_loader(self) -> DataLoader[Any]:
        """Batches of rows, each of all processes together."""
        recipe, rows = self.job.recipe, self._rows("train")
        if not len(rows):
            raise ValueError(
                f"data: {self.data.name} does not fill one row of {self.context} tokens; set context to less"
            )
        return shuffled_by(
            recipe,
            cast("Dataset[Any]", rows),
            len(rows),
            name=self.data.name,
            noun=f"rows of {self.context} tokens",
            collate=as_it_is,
        )

    def test_loader(self) -> DataLoader[Any]:
        """Batches of rows to be judged by; the last may not be full."""
        settings, rows = self.job.settings, self._rows("test")
        count = min(len(rows), settings.test_rows or len(rows))
        return in_order(rows, count, settings.test_batch, workers=self.job.recipe.workers, collate=as_it_is)

    def _given(self, batch: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        rows = cast(Rows, batch)
        return rows.tokens, rows.targets, None if self.files is None else rows.fresh

    def loss(self, network: nn.Module, batch: Any) -> Tensor:
        """The mean surprise of the next token, in nats."""
        return network(*self._given(batch))

    def score(self, network: nn.Module, batches: Iterable[Any], accelerator: Accelerator) -> Score:
        """Perplexity and accuracy, altogether and by position."""
        sums = Sums(self.context, accelerator.device)
        with torch.no_grad(), accelerator.autocast():
            for batch in batches:
                rows = cast(Rows, batch)
                losses, right = network(*self._given(batch), each=True)
                sums.add(losses, right, rows.targets, rows.fresh)
        rows = self._rows("test")
        return sums.score(accelerator, min(len(rows), self.job.settings.test_rows or len(rows)))

    def names(self, indices: Sequence[int]) -> list[str]:
        """What rows are called."""
        return [f"row {index} of {self.data.name}" for index in indices]

    def report(self, network: nn.Module) -> list[Section]:
        """Perplexity by position, and texts that go on from the beginnings of test documents."""
        rows = self._rows("test")
        batch = rows.__getitems__([Draw(index, 0) for index in range(min(4, len(rows)))])
        given = [None if part is None else part.to(self.device) for part in self._given(batch)]
        sums = Sums(self.context, self.device)
        with torch.no_grad():
            losses, right = network(*given, each=True)
        sums.add(losses, right, batch.targets.to(self.device), batch.fresh.to(self.device))
        return sections(network, self.spelling, batch, sums)


class QuestionsWork(LanguageWork):
    """A test of common sense: nothing to learn, and questions in place of rows."""

    def train_loader(self) -> DataLoader[Any]:
        """There is nothing to learn from."""
        raise ValueError(f"data: {self.data.name} is to be judged by alone; train on text and then use `affinear eval`")

    def test_loader(self) -> DataLoader[Any]:
        """The numbers of questions."""
        count = self.data.sizes[1]
        return in_order(_Numbers(count), count, self.job.settings.test_batch, workers=0, collate=torch.stack)

    def score(self, network: nn.Module, batches: Iterable[Any], accelerator: Accelerator) -> Score:
        """How often the right answer is the likeliest, by its sum and by its sum over its length in letters."""
        asked = cast(Questions, self.data).asked
        found: list[tuple[bool, bool, float]] = []
        with accelerator.autocast():
            for batch in batches:
                for number in cast(Tensor, batch).tolist():
                    if number != NOTHING:
                        found.append(self._answered(network, asked[number]))
        every = cast("list[tuple[bool, bool, float]]", gather_object(found))
        total = len(every)
        numbers = {"accuracy": sum(one for one, _, _ in every) / total}
        test = cast(Questions, self.data).test
        if test == "lambada":
            numbers["perplexity"] = perplexity(-math.fsum(loss for _, _, loss in every) / total)
        elif test != "winogrande":  # whose answers are the same text
            numbers["accuracy_normed"] = sum(normed for _, normed, _ in every) / total
        return Score(numbers, total, counted="questions")

    def _answered(self, network: nn.Module, question: Any) -> tuple[bool, bool, float]:
        pairs = list(zip(question.contexts, question.answers, strict=True))
        found = likelihoods(network, self.spelling, pairs, self.device)
        right = found[question.right]
        if len(found) == 1:
            return right.greedy, right.greedy, right.total
        by_sum = max(range(len(found)), key=lambda i: found[i].total)
        # Letters of the answer without the space before it, as lm-eval counts them.
        by_length = max(range(len(found)), key=lambda i: found[i].total / max(1, len(question.answers[i]) - 1))
        return by_sum == question.right, by_length == question.right, right.total


class _Numbers(Dataset[Tensor]):
    """The numbers of questions, as tensors."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, draw: Draw) -> Tensor:
        return torch.tensor(draw.index)
