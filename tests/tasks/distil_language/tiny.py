"""Distilling a language model, as small as it goes, for the contract of tasks: with the texts of language."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM

from affinear.tasks.language.spelling import learnt


def _of_language() -> Any:
    """What language has for the contract; this file is in no package, and nor is that one for it."""
    place = Path(__file__).parents[1] / "language" / "tiny.py"
    spec = importlib.util.spec_from_file_location("tiny_language", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LANGUAGE = _of_language()
wrong, sources = LANGUAGE.wrong, LANGUAGE.sources
MODEL = "llama"
MODEL_ARGS: dict[str, Any] = {}
CHANGES: dict[str, Any] = {**LANGUAGE.CHANGES, "window": 4, "sinks": 1}
del CHANGES["tokenizer"]  # it is the teacher's
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.4,  # a teacher that tells tokens apart has something to teach
    "tie_word_embeddings": True,
}


def data(folder: Path) -> str:
    """Write a corpus and a teacher, and say what `--data` takes."""
    CHANGES["teacher"] = teacher(folder.parent / "teacher", LANGUAGE.corpus(folder))
    return str(folder)


def teacher(folder: Path, texts: list[str]) -> str:
    """Write a fresh Llama with a tokenizer, as transformers would."""
    spelling = learnt(iter(texts), 300)
    LlamaForCausalLM(LlamaConfig(vocab_size=spelling.size, **SIZES)).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(spelling.text, encoding="utf-8")
    return str(folder)
