"""The evidence of a linearized language model: forms, and the layers that are left."""

from __future__ import annotations

import argparse
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
    write(corpus, spelling, tmp_path / "tokens" / "mixed")
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
    }
    LlamaForCausalLM(LlamaConfig(vocab_size=spelling.size, **sizes)).save_pretrained(tmp_path / "model")
    told: dict[str, Any] = {"model": tmp_path / "model", "tokens": tmp_path / "tokens", "output": tmp_path}
    rest: dict[str, Any] = {"forms": "window,left1,left2", "context": 80, "left_rows": 2}
    return argparse.Namespace(**told, **rest, device=torch.device("cpu"))


def test_layers_are_left_in_the_order_of_their_worth(script: Any, given: argparse.Namespace):
    evidence = script("linearize_language")
    rows = evidence.Rows(given.output)
    evidence.choose_left(given, rows)
    [found] = rows.rows
    assert len(set(found["layers"])) == len(found["costs"]) == 2
    assert set(found["layers"]) <= set(range(4))
    again = evidence.Rows(given.output)
    evidence.choose_left(given, again)  # which is not done twice
    assert again.rows == [found]
    assert evidence.form_of("left1", rows)["leave"] == str(found["layers"][0])
    student = evidence.swapped(evidence.loaded(given), {"mechanism": "inline", **evidence.form_of("left2", rows)})
    left = [int(layer.name.split(".")[2]) for layer in report_of(student).left]
    assert left == sorted(found["layers"])
    assert report_of(student).choices.window == 64


def test_forms_are_what_they_say(script: Any, given: argparse.Namespace):
    evidence = script("linearize_language")
    rows, teacher = evidence.Rows(given.output), evidence.loaded(given)
    kept = evidence.swapped(teacher, {"mechanism": "mala", **evidence.form_of("kept", rows)})
    assert [layer.name for layer in report_of(kept).left] == ["model.layers.3.self_attn"]
    assert not report_of(evidence.swapped(teacher, {"mechanism": "mala", **evidence.form_of("pure", rows)})).left


def test_a_cache_that_was_filled_is_as_large_as_one_that_was_read(script: Any, given: argparse.Namespace):
    evidence = script("linearize_language")
    teacher = evidence.loaded(given)
    read, filled = evidence.speed(given, teacher, 33), evidence.filled(given, teacher, 33)
    assert filled["kept_megabytes"] == read["kept_megabytes"] == 4 * 2 * 4 * 33 * 16 / 1e6
    assert filled["not_read"]
