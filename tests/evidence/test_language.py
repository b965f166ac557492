"""Language: a cell is trained and told, on rows as they are, for as many steps as are given."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from affinear.tasks.language.opening import open_corpus
from affinear.tasks.language.reading import Texts
from affinear.tasks.language.settings import LanguageSettings
from affinear.tasks.language.spelling import learnt
from affinear.tasks.language.tokens import write
from affinear.tasks.language.work import LanguageWork
from affinear.train.engine import settled

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
    asked = given(language, tmp_path, tokens, "--shared")
    (one,) = language.cells_of(asked, "text", arm, 5, 2)
    language.cell(language.arguments().parse_args(one.arguments))
    table = language.tell(asked)
    assert json.loads((tmp_path / "language.json").read_text())["shared"]
    (cell,) = json.loads((tmp_path / "language.json").read_text())["cells"]
    assert (cell["arm"], cell["seed"], cell["recipe"]["steps"], cell["settings"]["context"]) == (arm, 5, 2, 16)
    assert cell["score"]["perplexity"] > 1
    assert cell["ms_per_step"] > 0
    assert cell["positions"]
    assert cell["data"]["train_tokens"] > 100
    assert f"| {arm} | 1 |" in table
    assert "Recall" not in table


def test_documents_of_a_row_see_those_before_them(language: Any, tmp_path: Path, tokens: Path):
    run, data = language.run_of(given(language, tmp_path, tokens), "text", "mala", 0, 0, 2)
    work, apart = (kind(settled(run, data), data, torch.device("cpu")) for kind in (language.WholeRows, LanguageWork))
    batch = next(iter(work.train_loader()))
    network = run.setup.task.network(work.job)
    many = batch._replace(fresh=torch.rand(batch.fresh.shape) < 0.3)
    whole = network(batch.tokens, batch.targets, None)
    torch.testing.assert_close(work.loss(network, many), whole)
    assert not torch.allclose(apart.loss(network, many), whole)


def test_text_has_one_size_and_recall_has_widths(language: Any, tmp_path: Path, tokens: Path):
    asked = given(language, tmp_path, tokens)
    assert [one.title for one in language.cells_of(asked, "text", "nala", 1, 9)] == ["text, nala, seed 1"]
    widths = [one.title for one in language.cells_of(asked, "recall", "nala", 1, 9)]
    assert widths == [f"recall, nala, head width {width}, seed 1" for width in (16, 32, 64)]
    assert language.cells_of(asked, "recall", "mala_released", 1, 9) == []


def test_all_trainings_have_the_steps_that_fit(
    language: Any, tmp_path: Path, tokens: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(language, "PACED", (1, 2))
    sets = ["--seeds", "0,1", "--arms", "mala,softmax", "--steps", "text=3", "--fit", "2"]
    told = ["--output", str(tmp_path), "--tokens", str(tokens), "--kinds", "text", *SETS, *sets]
    monkeypatch.setattr(sys, "argv", ["language.py", *told])
    assert language.main() == 0
    cells = json.loads((tmp_path / "language.json").read_text())["cells"]
    assert [(cell["arm"], cell["seed"], cell["recipe"]["steps"]) for cell in cells] == [
        (arm, seed, 3) for arm in ("softmax", "mala") for seed in (0, 1)
    ]


def test_a_probe_times_every_arm(
    language: Any,
    tmp_path: Path,
    tokens: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(language, "PROBED", 30)
    asked = given(language, tmp_path, tokens, "--steps", "text=1000")
    language.probe(
        language.trials(asked, ["text"], ["mala", "softmax"], 3), tmp_path / "alone.json", language.WholeRows
    )
    rows = json.loads((tmp_path / "alone.json").read_text())["rows"]
    assert [row["arm"] for row in rows] == ["mala", "softmax"]
    assert all(row["ms"] > 0 for row in rows)
    said = capsys.readouterr().out
    assert "text, mala: " in said
    assert "no graph (no GPU), loss " in said
    told = float(said.split("one after the other: ")[1].split(" s")[0])
    assert told == pytest.approx(sum(3 * row["ms"] for row in rows), abs=0.5)
