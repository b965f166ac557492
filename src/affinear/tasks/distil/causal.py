"""Teachers of language: causal models of transformers, out of a folder or out of a run of `--task language`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ...models import making
from ...train.folder import weights_in
from ..language import spelling
from ..language.network import LanguageNetwork
from ..language.spelling import Spelling
from ..using import load_trained
from . import hugging

STREAM = "stream"
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class Source:
    """Where a teacher is, and what it is.

    Attributes:
        path: A folder of transformers', or a file of weights of a run.
        config: All fields of its configuration, `model_type` among them.
        spelling: Its tokens; None if the folder has no tokenizer.
        digest: Of its weights.
    """

    path: Path
    config: Mapping[str, Any]
    spelling: Spelling | None
    digest: str


def source_of(teacher: str | None) -> Source:
    """Look at a teacher without reading its weights into memory.

    Raises:
        ValueError: If there is none, or it is no causal language model of softmax attention.
    """
    if not teacher:
        raise ValueError("teacher: expected a folder of transformers', or that of a run, got none; --set teacher=PATH")
    path = Path(teacher).expanduser()
    if not path.exists():
        raise ValueError(f"teacher: expected a folder of transformers', or that of a run, got no such: {teacher}")
    if hugging.is_hugging(path):
        config = checked_config(hugging.fields_in(path / hugging.CONFIG), str(path))
        digest = hugging.digest_in(path)
        own = spelling.read(hugging.file_in(path, TOKENIZER)) if (path / TOKENIZER).is_file() else None
        return Source(path, config, own, digest)
    file = weights_in(path)
    trained = load_trained(file)
    if trained.task.name != "language":
        raise ValueError(f"teacher: expected a language model, got weights of --task {trained.task.name}: {file}")
    language: Any = cast(LanguageNetwork, trained.network).model
    config = checked_config(language.config.to_dict(), str(file))
    return Source(file, config, Spelling(trained.job.facts["tokenizer"]), hugging.digest_of([file]))


def teacher_of(source: Path, dtype: torch.dtype) -> Student:
    """The teacher itself, with one text in each row.

    Raises:
        ValueError: If its weights cannot be read, or its logits are more than a matrix of its features.
    """
    if source.is_dir():
        from transformers import AutoModelForCausalLM

        fields = checked_config(hugging.fields_in(source / hugging.CONFIG), str(source))
        language: Any = hugging.loaded(source, fields, AutoModelForCausalLM, dtype)
    else:
        language = cast(LanguageNetwork, load_trained(source).network).model.to(dtype)
        language.set_attn_implementation("sdpa")
    network = Student(language).eval()
    check_head(network)
    return network


def made(config: Mapping[str, Any], room: int) -> Student:
    """A softmax network of a configuration, with fresh weights.

    Raises:
        ValueError: If it cannot be made, or would be too large.
    """
    from transformers import AutoModelForCausalLM

    return Student(hugging.made(checked_config(dict(config), "config"), AutoModelForCausalLM, room))


class Student(LanguageNetwork):
    """A causal language model that sees each row as one text, from end to end: a state has no place for borders.

    Args:
        model: Of transformers.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model, STREAM)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        fresh: Tensor | None = None,
        each: bool = False,
        like: Taught | None = None,
    ) -> Any:
        """Final features (B, N, C) where there are no targets; how far it is from a teacher where there is one.

        Args:
            tokens: (B, N), int64.
            targets: (B, N), int64, the next tokens.
            fresh: Not looked at.
            each: Whether to tell the loss of every target, and whether it was the likeliest token.
            like: What the teacher said to the same tokens.
        """
        if targets is None:
            return self.hidden(tokens, None)
        if like is None:
            return super().forward(tokens, targets, None, each)
        return like.loss(self.hidden(tokens, None), self.model.get_output_embeddings().weight, targets)

    def hidden(self, tokens: Tensor, fresh: Tensor | None) -> Tensor:
        """What the model makes of tokens, (B, N, C)."""
        return super().hidden(tokens, None)


@dataclass(frozen=True)
class Taught:
    """What a teacher said, and what each part of the loss counts.

    Attributes:
        hidden: (B, N, C), its final features.
        weight: (V, C), of its head.
        logits: What divergence counts.
        features: What the relative error of the features counts.
        labels: What cross entropy counts.
        temperature: Of both distributions.
    """

    hidden: Tensor
    weight: Tensor
    logits: float
    features: float
    labels: float
    temperature: float

    def loss(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """How far a student's features and distributions are from these."""
        from ...linearizing.distil import relative_error
        from ...linearizing.divergence import chunked_divergence

        loss = hidden.new_zeros((), dtype=torch.float32)
        if self.logits or self.labels:
            loss = loss + chunked_divergence(
                hidden, weight, self.hidden, self.weight, targets,
                logits=self.logits, label=self.labels, temperature=self.temperature,
            )  # fmt: skip
        if self.features:
            loss = loss + self.features * relative_error(hidden, self.hidden)
        return loss


@torch.no_grad()
def check_head(network: Student) -> None:
    """Raise ValueError unless a model's logits are its final features times one matrix, as losses here take them.

    Its configuration may be one that it can be made with and not used.
    """
    language: Any = network.model
    place = next(network.parameters()).device
    tokens = torch.zeros(1, 2, dtype=torch.long, device=place)
    try:
        said = language(tokens, use_cache=False).logits.float()
        found = (network.hidden(tokens, None) @ language.get_output_embeddings().weight.mT).float()
    except Exception as error:  # networks of others raise whatever comes up
        told = hugging.said(error)
        raise ValueError(f"teacher: {type(language).__name__} cannot read two tokens ({told})") from None
    if not bool(said.isfinite().all()):
        raise ValueError(f"teacher: {type(language).__name__} answers with numbers that are not finite; is it damaged?")
    if not torch.allclose(said, found, rtol=2e-2, atol=2e-2 * float(said.abs().max().clamp(min=1e-3))):
        raise ValueError(
            f"teacher: the logits of {type(language).__name__} are more than a matrix of its features (a bias, a scale "
            "or a cap), which is not distilled"
        )


def checked_config(told: Any, source: str) -> dict[str, Any]:
    """The fields of a configuration that a network is made with.

    Raises:
        ValueError: If it is none, names no causal language model of transformers, or says what it may not.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    fields = hugging.checked_fields(told, source, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "a causal language model")
    tokens = fields.get("vocab_size", 1)
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise ValueError(f"{source}: vocab_size: expected a whole number of at least 1, got {making.short(tokens)}")
    return fields
