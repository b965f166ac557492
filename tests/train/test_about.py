"""What a file of weights says about itself is read in one place, and every field of it is checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from affinear.tasks.classify import TASK, ClassifySettings
from affinear.train.about import about, parse
from affinear.train.recipe import Recipe
from affinear.train.task import Job

TOLD: dict[str, Any] = {
    "task": "classify",
    "model": "mavit_tiny",
    "model_args": {"depths": [1, 1, 1, 1]},
    "recipe": {"epochs": 3},
    "settings": {"mixup": 0.5},
    "facts": {"class_names": ["猫", "dog"], "channels": 3},
    "epoch": 2,
}
OLD: dict[str, Any] = {
    "model": "mavit_tiny",
    "model_args": {"depths": [1, 1, 1, 1]},
    "class_names": ["猫", "dog"],
    "channels": 3,
    "recipe": {"epochs": 3, "mixup": 0.5},
    "epoch": 2,
}


def test_what_is_told_comes_back(tmp_path: Path):
    save_file({"a": torch.zeros(1)}, tmp_path / "a.safetensors", {"about": json.dumps(TOLD)})
    found = about(tmp_path / "a.safetensors")
    assert found is not None
    assert (found.task, found.model, found.others) == ("classify", "mavit_tiny", {"epoch": 2})
    for name in ("model_args", "recipe", "settings", "facts"):
        assert getattr(found, name) == TOLD[name]


def test_weights_from_before_there_were_tasks_are_classifiers():
    found = parse(json.dumps(OLD), "file")
    assert (found.task, found.model, found.settings, found.facts) == (
        "classify",
        "mavit_tiny",
        TOLD["settings"],
        TOLD["facts"],
    )
    assert Recipe().changed(**found.recipe) == Recipe(epochs=3)


def test_bare_weights_tell_nothing(tmp_path: Path):
    save_file({"a": torch.zeros(1)}, tmp_path / "a.safetensors")
    assert about(tmp_path / "a.safetensors") is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "expected weights, got an empty file"),
        (b"no weights", "expected weights, got a text file"),
        (bytes(100), "expected a file of safetensors"),
        (b"\xff" * 64, "expected a file of safetensors"),
    ],
)
def test_other_files_are_named(tmp_path: Path, content: bytes, said: str):
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=said):
        about(tmp_path / "a.safetensors")


@pytest.mark.parametrize("text", ["", "[", "[]", "3", "null", '"a"', "[" * 10**6, '{"a": ' * 10**5, "1" * 10**5])
def test_what_is_no_object_is_named(text: str):
    with pytest.raises(ValueError, match=r"^file: expected (JSON|an object of fields)"):
        parse(text, "file")


HOSTILE = (None, True, -1, 3, 2**80, 1e300, "", "a/b", "x" * 10**4, [], [1], [[]], {}, {"a": {"b": 1}}, {"../a": 1})


@pytest.mark.parametrize("field", ["task", "model", "model_args", "recipe", "settings", "facts"])
def test_a_field_of_another_type_or_none_is_named(field: str):
    refused = 0
    for value in (*HOSTILE, KeyError):
        told = {name: given for name, given in TOLD.items() if name != field}
        text = json.dumps(told if value is KeyError else {**told, field: value})
        try:
            parse(text, "file")
        except ValueError as error:
            assert str(error).startswith(f"file: {field}: ")  # noqa: PT017
            assert len(str(error)) < 400  # noqa: PT017
            refused += 1
    assert refused >= 10


@pytest.mark.parametrize("fact", ["class_names", "channels"])
def test_facts_of_another_type_are_named(fact: str):
    shown = ClassifySettings(image_size=(8, 8), mean=(0.5,), std=(0.5,), interpolation="bicubic", crop_pct=1.0)
    facts: dict[str, Any] = {"class_names": ["a"], "channels": 3}
    TASK.check_job(Job("mavit_tiny", {}, Recipe(), shown, facts))
    wrong = [value for value in HOSTILE if not (fact == "channels" and value == 3)]
    for value in wrong:
        with pytest.raises(ValueError, match=f"{fact}: expected"):
            TASK.check_job(Job("mavit_tiny", {}, Recipe(), shown, {**facts, fact: value}))
