"""From a teacher to the task that distils it, and from what was distilled to a folder that others can read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ...linearizing.low_rank import merge
from ...models.speech.whisper import HOP, POINTS, SAMPLE_RATE
from ...train.about import about
from ...train.task import Task
from ..appearing import appearing
from ..language.spelling import Spelling
from ..registry import find
from ..using import load_trained
from .hugging import CONFIG, fields_in, is_hugging

# By the task of a teacher's run, and by the `model_type` of a folder of transformers'; all others are language models.
OF_RUNS: Mapping[str, str] = MappingProxyType({"classify": "distil", "language": "distil_language"})
OF_FOLDERS: Mapping[str, str] = MappingProxyType({"whisper": "distil_speech"})
LANGUAGE = "distil_language"
HUGGING = (LANGUAGE, *OF_FOLDERS.values())  # tasks whose networks are transformers'


@dataclass(frozen=True)
class Plan:
    """What distils a teacher.

    Attributes:
        task: One whose recipes are "layers" and "whole".
        model: Name of the network, as the task knows it.
        model_args: What it is made with.
    """

    task: Task[Any, Any]
    model: str
    model_args: Mapping[str, Any] = field(default_factory=dict[str, Any])


def plan_for(teacher: Path, model: str | None = None) -> Plan:
    """What distils a teacher: the folder of a run, a file of weights, or a folder of transformers'.

    Args:
        teacher: The folder or file.
        model: Name of the network, for weights that do not tell.

    Raises:
        ValueError: If nothing does.
    """
    if is_hugging(teacher):
        kind = fields_in(teacher / CONFIG).get("model_type")
        if not isinstance(kind, str):
            raise ValueError(f"teacher: {teacher / CONFIG} does not tell a model_type, as transformers' do")
        if model is not None and model != kind:
            raise ValueError(f"model: expected {kind}, as the teacher is, got {model!r}; leave it out")
        return Plan(find(OF_FOLDERS.get(kind, LANGUAGE)), kind)
    trained = load_trained(teacher, model)
    task = OF_RUNS.get(trained.task.name)
    if task is None:
        raise ValueError(f"teacher: expected weights of {' or '.join(OF_RUNS)}, got those of {trained.task.name}")
    if task == LANGUAGE:
        network: Any = trained.network
        return Plan(find(task), str(network.model.config.model_type))
    return Plan(find(task), trained.job.model, trained.job.model_args)


def is_transformers(weights: Path) -> bool:
    """Whether a file of weights is of a distilled network of transformers."""
    told = about(weights)
    return told is not None and told.task in HUGGING


def write_hugging(weights: Path, folder: Path) -> Path:
    """Write a distilled network as transformers does, low-rank updates merged, with what is needed beside it.

    Args:
        weights: Of a run of `distil_language` or `distil_speech`.
        folder: A new one. It appears whole or not at all.

    Raises:
        ValueError: If the folder is there already, or the weights are of another task.
    """
    with appearing(folder) as beside:
        trained = load_trained(weights)
        if trained.task.name not in HUGGING:
            raise ValueError(f"{weights}: expected weights of {' or '.join(HUGGING)}, got those of {trained.task.name}")
        network: Any = trained.network
        merge(network)
        network.model.save_pretrained(beside)
        for name, text in _beside(trained.job.facts).items():
            (beside / name).write_text(text, encoding="utf-8")
    return folder


def _beside(facts: Mapping[str, Any]) -> dict[str, str]:
    """What a folder of transformers' has beside configuration and weights: content by name."""
    found: dict[str, str] = {}
    text = str(facts["tokenizer"])
    if text.startswith("{"):  # neither bytes nor numbers, which no file of transformers' can say
        found["tokenizer.json"] = text
        if facts["config"]["model_type"] not in OF_FOLDERS:  # Whisper's is known by its kind
            found["tokenizer_config.json"] = json.dumps(_named(text, facts["config"]), indent=2)
    if facts.get("generation"):
        found["generation_config.json"] = json.dumps(dict(facts["generation"]), indent=2)
    if facts["config"]["model_type"] in OF_FOLDERS:
        found["preprocessor_config.json"] = json.dumps(_heard(facts["config"]), indent=2)
    return found


def _named(tokenizer: str, config: Mapping[str, Any]) -> dict[str, str]:
    """Which tokens begin, end and fill up a text, by name; none that is a piece of text."""
    names: dict[int, str] = {token["id"]: token["content"] for token in json.loads(tokenizer).get("added_tokens", ())}
    found = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": names.get(Spelling(tokenizer).end)}
    for role in ("bos_token", "eos_token", "pad_token"):
        numbers = config.get(f"{role}_id")
        number = numbers[0] if isinstance(numbers, list) and numbers else numbers
        found[role] = names.get(number, found.get(role)) if isinstance(number, int) else found.get(role)
    return {role: name for role, name in found.items() if name is not None}


def _heard(config: Mapping[str, Any]) -> dict[str, Any]:
    """How sounds become features, as transformers has it for Whisper."""
    frames = 2 * config["max_source_positions"]
    seconds = frames * HOP / SAMPLE_RATE
    return {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": config["num_mel_bins"],
        "sampling_rate": SAMPLE_RATE,
        "hop_length": HOP,
        "n_fft": POINTS,
        "chunk_length": int(seconds) if seconds == int(seconds) else seconds,
    }
