"""From a teacher to the task that distils it, and from what was distilled to a folder that others can read."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ...linearizing.low_rank import merge
from ...train.about import about
from ...train.task import Task
from ..registry import find
from ..using import load_trained

CONFIG = "config.json"
# By the task of a teacher's run, and by the `model_type` of a folder of transformers'; all others are language models.
OF_RUNS: Mapping[str, str] = MappingProxyType({"classify": "distil", "language": "distil_language"})
OF_FOLDERS: Mapping[str, str] = MappingProxyType({})
LANGUAGE = "distil_language"


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
    if (teacher / CONFIG).is_file():
        try:
            told: Any = json.loads((teacher / CONFIG).read_text(encoding="utf-8"))
            kind = str(told["model_type"])
        except (ValueError, TypeError, KeyError, RecursionError):
            raise ValueError(f"teacher: {teacher / CONFIG} does not tell a model_type, as transformers' do") from None
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


def is_language(weights: Path) -> bool:
    """Whether a file of weights is of a distilled language model."""
    told = about(weights)
    return told is not None and told.task == LANGUAGE


def write_hugging(weights: Path, folder: Path) -> Path:
    """Write a distilled language model as transformers does, low-rank updates merged, with its tokenizer.

    Args:
        weights: Of a run of `distil_language`.
        folder: A new one. It appears whole or not at all.

    Raises:
        ValueError: If the folder is there already.
    """
    if folder.exists():
        raise ValueError(f"{folder}: expected a new folder, got one that exists; remove it or choose another")
    trained = load_trained(weights, task=LANGUAGE)
    network: Any = trained.network
    merge(network)
    beside = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    try:
        network.model.save_pretrained(beside)
        text = str(trained.job.facts["tokenizer"])
        if text.startswith("{"):  # neither bytes nor numbers, which no file of transformers' can say
            (beside / "tokenizer.json").write_text(text, encoding="utf-8")
        beside.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return folder
