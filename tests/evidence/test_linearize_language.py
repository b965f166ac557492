"""The evidence of a linearized language model: forms, and the layers that are left."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from affinear.linearizing import report_of
from affinear.tasks.language.opening import open_corpus
from affinear.tasks.language.reading import Texts
from affinear.tasks.language.settings import LanguageSettings
from affinear.tasks.language.spelling import learnt
from affinear.tasks.language.tokens import write


@pytest.fixture
def given(tmp_path: Path) -> argparse.Namespace:
    """What the command line would give for a Llama of four layers and some text."""
    (tmp_path / "texts").mkdir()
    text = "one two three four five six seven eight nine ten eleven twelve. " * 40
    for half in ("train", "test"):
        (tmp_path / "texts" / f"{half}.txt").write_text(text)
    corpus, spelling = open_corpus(str(tmp_path / "texts"), LanguageSettings()), learnt(iter([text]), 300)
    assert isinstance(corpus, Texts)
    (tmp_path / "tokens").mkdir()
    for name in ("mixed", "other"):
        write(corpus, spelling, tmp_path / "tokens" / name)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
    }
    LlamaForCausalLM(LlamaConfig(vocab_size=spelling.size, **sizes)).save_pretrained(tmp_path / "model")
    told: dict[str, Any] = {"model": tmp_path / "model", "tokens": tmp_path / "tokens", "output": tmp_path / "out"}
    rest: dict[str, Any] = {"cells": ["inline-window", "none-left1", "mala-left2"], "context": 80, "left_rows": 2}
    return argparse.Namespace(**told, **rest, batch=2, at_once=2, ahead=4, device=torch.device("cpu"))


def test_layers_are_left_in_the_order_of_their_worth(script: Any, given: argparse.Namespace):
    evidence = script("linearize_language")
    rows = evidence.Rows(given.output / "rows.json", {})
    evidence.choose_left(given, rows)
    [found] = rows.rows
    assert len(set(found["layers"])) == len(found["costs"]) == 2
    assert set(found["layers"]) <= set(range(4))
    again = evidence.Rows(rows.path, {})
    evidence.choose_left(given, again)  # which is not done twice
    assert again.rows == [found]
    assert evidence.form_of("left1", rows)["leave"] == str(found["layers"][0])
    student = evidence.swapped(evidence.loaded(given), evidence.told_of("inline", "left2", rows))
    left = [int(layer.name.split(".")[2]) for layer in report_of(student).left]
    assert left == sorted(found["layers"])
    assert report_of(student).choices.window == 64


def test_forms_are_what_they_say(script: Any, given: argparse.Namespace):
    evidence = script("linearize_language")
    kept = evidence.swapped(evidence.loaded(given), evidence.told_of("mala", "kept", None))
    assert [layer.name for layer in report_of(kept).left] == ["model.layers.3.self_attn"]
    assert report_of(kept).choices.feature_map == "hedgehog"
    assert not report_of(evidence.swapped(evidence.loaded(given), evidence.told_of("mala", "pure", None))).left


def test_every_text_is_learned_from_once_before_any_comes_again(script: Any, given: argparse.Namespace):
    lessons = script("linearize_language").Lessons.of(given)
    texts = len(lessons.rows)
    given.batch, steps = lessons.batch, -(-texts // lessons.batch)
    seen = torch.cat([lessons.drawn(step) for step in range(steps)])[:texts]
    assert lessons.rows.shape[1] == given.context + 1
    assert sorted(seen.tolist()) == sorted(lessons.rows.tolist())
    assert torch.equal(lessons.drawn(1), lessons.drawn(1))


def run(script: Any, monkeypatch: pytest.MonkeyPatch, given: argparse.Namespace, *more: str) -> tuple[int, Any]:
    """What the command gives, and its rows."""
    told = ["--model", str(given.model), "--tokens", str(given.tokens), "--output", str(given.output)]
    sizes = ["--context", "80", "--batch", "2", "--judged", "2", "--recalled", "2", "--cells", "mala-pure"]
    monkeypatch.setattr("sys.argv", ["linearize_language.py", *told, *sizes, "--steps", "2", "4", *more])
    evidence = script("linearize_language")
    monkeypatch.setattr(evidence, "DISTANCES", (4, 8, 16))  # the text is a short one
    monkeypatch.setattr(evidence, "table", lambda rows: str(len(rows.rows)))
    return evidence.main(), json.loads((given.output / "smollm2.json").read_text())["rows"]


def test_a_cell_goes_through_both_stages_and_is_not_taught_twice(
    script: Any, monkeypatch: pytest.MonkeyPatch, given: argparse.Namespace
):
    left, rows = run(script, monkeypatch, given, "--part", "quality")
    assert not left
    assert [row["row"] for row in rows] == ["teacher", "swapped", "layers", "whole"]
    assert [row["tokens"] for row in rows[2:]] == [2 * 2 * 80, 6 * 2 * 80]
    assert [step for step, _ in rows[-1]["seen"]] == [1, 2, 3, 4]
    assert run(script, monkeypatch, given, "--part", "quality")[1] == rows


def test_cells_fill_the_time_and_say_when_it_was_too_short(
    script: Any, monkeypatch: pytest.MonkeyPatch, given: argparse.Namespace
):
    fill = ("--part", "quality", "--fill", "--minutes", "0.3")
    left, rows = run(script, monkeypatch, given, *fill, "--reserve", "99")
    assert left
    assert rows[-1]["row"] == "swapped"
    left, rows = run(script, monkeypatch, given, *fill, "--reserve", "9")
    assert not left
    assert rows[-1]["row"] == "whole"
    assert rows[-1]["seconds"] > rows[-2]["seconds"]


def test_time_needs_no_weights(script: Any, monkeypatch: pytest.MonkeyPatch, given: argparse.Namespace):
    (given.model / "model.safetensors").unlink()
    left, rows = run(script, monkeypatch, given, "--part", "speed", "--lengths", "16", "32", "--crossing", "0.1")
    assert not left
    found = [(row["form"], row["tokens"]) for row in rows if row["kind"] == "speed"]
    assert found == [(form, tokens) for form in ("softmax", "pure", "window") for tokens in (16, 32)]
    assert {row["form"] for row in rows if row["kind"] == "crossover"} == {"pure", "window"}


def test_a_cache_that_was_filled_is_as_large_as_one_that_was_read(script: Any, given: argparse.Namespace):
    evidence = script("linearize_language")
    teacher = evidence.loaded(given)
    read, filled = evidence.speed(given, teacher, 33), evidence.filled(given, teacher, 33)
    assert filled["kept_megabytes"] == read["kept_megabytes"] == 4 * 2 * 4 * 33 * 16 / 1e6
    assert filled["not_read"]
