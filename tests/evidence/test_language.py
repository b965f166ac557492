"""Language: a cell is trained and told, with a number of steps that is given or agreed on."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from affinear.tasks.language.opening import open_corpus
from affinear.tasks.language.reading import Texts
from affinear.tasks.language.settings import LanguageSettings
from affinear.tasks.language.spelling import learnt
from affinear.tasks.language.tokens import write

TINY = ("batch_size=2", "context=16")
SETS = [word for one in TINY for word in ("--set", one)]


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """Token files of a few documents."""
    lines = [json.dumps({"text": f"Patient {number} was well. " * (2 + number % 3)}) for number in range(30)]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    corpus = open_corpus(str(tmp_path / "texts.jsonl"), LanguageSettings(held_out=5))
    assert isinstance(corpus, Texts)
    return write(corpus, learnt(corpus.texts("train"), 300), tmp_path / "tokens")


@pytest.fixture
def language(script: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, with networks that are quick to make."""
    found = script("language")
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    monkeypatch.setattr(found, "TEXT", small)
    state = {"hidden_size": 32, "num_hidden_layers": 1, "state_size": 8, "num_heads": 1, "chunk_size": 8}
    monkeypatch.setattr(found, "MAMBA2", state)
    return found


def given(language: Any, tmp_path: Path, tokens: Path, *words: str) -> Any:
    told = ["--output", str(tmp_path), "--tokens", str(tokens), "--kinds", "text", *SETS, *words]
    return language.arguments().parse_args(told)


@pytest.mark.parametrize("arm", ["softmax", "mala", "mamba2"])
def test_a_cell_is_trained_and_told_by_position(language: Any, tmp_path: Path, tokens: Path, arm: str):
    asked = given(language, tmp_path, tokens, "--share", "0.002")
    (one,) = language.cells_of(asked, "text", arm, 5)
    language.cell(language.arguments().parse_args(one.arguments))
    table = language.tell([one], asked)
    (cell,) = json.loads((tmp_path / "language.json").read_text())["cells"]
    assert (cell["arm"], cell["seed"], cell["recipe"]["steps"], cell["settings"]["context"]) == (arm, 5, 2, 16)
    assert cell["score"]["perplexity"] > 1
    assert cell["positions"]
    assert cell["data"]["train_tokens"] > 100
    assert f"| {arm} | 1 |" in table


def test_all_cells_agree_on_how_many_steps_there_are(language: Any, tmp_path: Path, tokens: Path):
    asked = given(language, tmp_path, tokens, "--fit", "--minutes", "0.5", "--parallel", "1")
    pacing = language.pacing_of(asked, ["text"], ["mala", "mamba2"], [0, 1])
    assert dict(pacing.trainings) == {"text mamba2": 2, "text mala": 2}
    assert time.time() < pacing.until <= time.time() + 30
    language.begin(language.pace_folder(asked), pacing)
    cells = [one for seed in (0, 1) for one in language.cells_of(asked, "text", "mala", seed)]
    for one in cells:
        language.cell(language.arguments().parse_args(one.arguments))
    decided = json.loads((language.pace_folder(asked) / "steps.json").read_text())["text"]
    assert {one.read()["recipe"]["steps"] for one in cells} == {decided}
    assert decided >= 2
