"""Teachers of language: causal models of transformers, out of a folder or out of a run of `--task language`."""

from __future__ import annotations

import hashlib
import json
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

CONFIG = "config.json"
LONGEST = 2**20  # characters of a configuration
DEEPEST = 5
# What a configuration may say that is of no use for making a network, or is nobody's to say.
DROPPED = ("auto_map", "architectures", "dtype", "torch_dtype", "transformers_version", "quantization_config")
STREAM = "stream"


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
    if is_hugging(path):
        config = checked_config(json.loads(_read(path / CONFIG)), str(path))
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise ValueError(f"teacher: {path} has no weights as safetensors; convert what it has")
        own = spelling.read(path) if (path / "tokenizer.json").is_file() else None
        return Source(path, config, own, _digest(files))
    file = weights_in(path)
    trained = load_trained(file)
    if trained.task.name != "language":
        raise ValueError(f"teacher: expected a language model, got weights of --task {trained.task.name}: {file}")
    language: Any = cast(LanguageNetwork, trained.network).model
    config = checked_config(language.config.to_dict(), str(file))
    return Source(file, config, Spelling(trained.job.facts["tokenizer"]), _digest([file]))


def is_hugging(path: Path) -> bool:
    """Whether a folder is one that transformers wrote."""
    return (path / CONFIG).is_file()


def teacher_of(source: Path, dtype: torch.dtype) -> Student:
    """The teacher itself, with one text in each row.

    Raises:
        ValueError: If its weights cannot be read, or its logits are more than a matrix of its features.
    """
    if source.is_dir():
        from transformers import AutoModelForCausalLM

        try:
            language: Any = AutoModelForCausalLM.from_pretrained(
                source, local_files_only=True, use_safetensors=True, trust_remote_code=False,
                attn_implementation="sdpa", dtype=dtype,
            )  # fmt: skip
        except Exception as error:  # transformers raises whatever comes up
            said = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            raise ValueError(f"teacher: {source}: {said}") from None
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
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = checked_config(dict(config), "config")
    kind = fields.pop("model_type")
    try:
        whole = AutoConfig.for_model(kind, **fields)
        with torch.random.fork_rng(devices=[]), torch.device("meta"), making.patience():
            outline: Any = AutoModelForCausalLM.from_config(whole)
        numbers = sum(weight.numel() for weight in outline.parameters())
        if numbers > room:
            raise ValueError(f"{kind} would have {numbers:,} numbers, and there is room for {room:,}")
        return Student(AutoModelForCausalLM.from_config(whole, attn_implementation="sdpa"))
    except Exception as error:  # constructors of others raise whatever comes up
        said = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise ValueError(f"config: {said}") from None


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
    """Raise ValueError unless a model's logits are its final features times one matrix, as losses here take them."""
    language: Any = network.model
    place = next(network.parameters()).device
    tokens = torch.zeros(1, 2, dtype=torch.long, device=place)
    said = language(tokens, use_cache=False).logits.float()
    found = (network.hidden(tokens, None) @ language.get_output_embeddings().weight.mT).float()
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

    fields = cast("dict[str, Any]", told) if isinstance(told, dict) else {}
    kind = fields.get("model_type")
    if not isinstance(kind, str) or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError(f"{source}: expected a causal language model of transformers, got {making.short(kind)}")
    if fields.get("quantization_config"):
        raise ValueError(
            f"{source}: expected a network with its own weights, got one that is quantized or linear already"
        )
    kept = {n: value for n, value in fields.items() if n not in DROPPED and not n.startswith("_")}
    _check_plain(kept, source, 0)
    return kept


def _check_plain(value: Any, source: str, depth: int) -> None:
    """Raise ValueError for what no configuration would say: lists without end, numbers beyond any network."""
    if isinstance(value, (dict, list)):
        items = cast("list[Any]", list(value.values() if isinstance(value, dict) else value))  # pyright: ignore
        if depth == DEEPEST or len(items) > 4096:
            raise ValueError(f"{source}: expected a configuration of plain fields, got {making.short(items)}")
        for item in items:
            _check_plain(item, source, depth + 1)
    elif isinstance(value, (int, float)) and abs(value) > 2**40:
        raise ValueError(f"{source}: expected numbers that a network can have, got {making.short(value)}")


def _read(path: Path) -> str:
    if path.stat().st_size > LONGEST:
        raise ValueError(f"{path}: expected at most {LONGEST:,} bytes of JSON")
    return path.read_text(encoding="utf-8")


def _digest(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            while part := opened.read(2**24):
                digest.update(part)
    return digest.hexdigest()
