"""Published files as tasks of lm-eval: its own definitions, asked of what lies on the disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .harness import need
from .questions import TESTS, Question, asked_in


@dataclass(frozen=True)
class Known:
    """A test as lm-eval has it.

    Attributes:
        name: Of the task.
        file: Of its definition, within the package.
        half: Which it takes for the questions.
        line: What it reads of a question.
    """

    name: str
    file: str
    half: str
    line: Callable[[Question, Mapping[str, Any]], dict[str, Any]]


def _with(*names: str) -> Callable[[Question, Mapping[str, Any]], dict[str, Any]]:
    """These fields, and the number of the right answer."""
    return lambda question, fields: {**{name: fields[name] for name in names}, "label": question.right}


KNOWN: Mapping[str, Known] = {
    "lambada": Known("lambada_openai", "lambada/lambada_openai.yaml", "test", lambda _, told: {"text": told["text"]}),
    "piqa": Known("piqa", "piqa/piqa.yaml", "validation", _with("goal", "sol1", "sol2")),
    "hellaswag": Known(
        "hellaswag", "hellaswag/hellaswag.yaml", "validation", _with("activity_label", "ctx_a", "ctx_b", "endings")
    ),
    "winogrande": Known(
        "winogrande",
        "winogrande/default.yaml",
        "validation",
        lambda question, told: {
            **{name: told[name] for name in ("sentence", "option1", "option2")},
            "answer": str(question.right + 1),
        },
    ),
}


def harness_tasks(files: Mapping[str, str | Path], folder: str | Path) -> list[str]:
    """Write tasks of lm-eval that ask published files, so that it judges any model by them and fetches nothing.

    Args:
        files: Published files by test: "lambada", "piqa" (with valid-labels.lst beside valid.jsonl), "hellaswag" and
            "winogrande".
        folder: Where to write two files for each test: its questions, and the task, which takes everything else from
            lm-eval's own.

    Returns:
        What `lm_eval.simple_evaluate(tasks=...)` and `lm_eval --tasks` take. Results have lm-eval's own names.

    Raises:
        ValueError: If lm-eval is not installed or lacks the task, or a file is not as published.
    """
    need()
    unknown = next((test for test in files if test not in KNOWN), None)
    if unknown is not None:
        raise ValueError(f"files: expected tests out of {', '.join(TESTS)}, got {unknown!r}")
    folder = Path(folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return [str(_written(KNOWN[test], test, Path(path), folder)) for test, path in files.items()]


def _written(known: Known, test: str, path: Path, folder: Path) -> Path:
    lines = [json.dumps(known.line(question, fields)) for question, fields in asked_in(test, path)]
    questions, task = folder / f"{known.name}.jsonl", folder / f"{known.name}.yaml"
    told = {
        "include": str(_definition(known)),
        "task": known.name,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {known.half: str(questions)}},
        "training_split": None,
    }
    questions.write_text("\n".join(lines) + "\n", encoding="utf-8")
    task.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")  # JSON is YAML
    return task


def _definition(known: Known) -> Path:
    """Where lm-eval has the task."""
    spec = find_spec("lm_eval")
    assert spec is not None
    for place in spec.submodule_search_locations or ():
        path = Path(place, "tasks", known.file)
        if path.is_file():
            return path
    raise ValueError(f"lm-eval: expected tasks/{known.file} in the package, got none; its version 0.4.13 has it")
