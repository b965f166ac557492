"""Distilling a language model, as small as it goes, for the contract of tasks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from transformers import LlamaConfig, LlamaForCausalLM

from affinear.tasks.language.spelling import learnt

MODEL = "llama"
MODEL_ARGS: dict[str, Any] = {}
CHANGES: dict[str, Any] = {
    "batch_size": 4,
    "context": 16,
    "window": 4,
    "sinks": 1,
    "held_out": 3,
    "ema_decay": 0.9,
    "test_batch": 4,
    "warmup_steps": 1,
}
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
    os.environ["AFFINEAR_CACHE"] = str(folder.parent / "cache")
    random = np.random.default_rng()
    texts = ["".join(map(chr, random.integers(97, 123, random.integers(5, 60)))) for _ in range(24)]
    lines = "\n".join(json.dumps({"text": text}) for text in texts)
    (folder / "corpus.jsonl").write_text(lines, encoding="utf-8")
    CHANGES["teacher"] = teacher(folder.parent / "teacher", texts)
    return str(folder)


def teacher(folder: Path, texts: list[str]) -> str:
    """Write a fresh Llama with a tokenizer, as transformers would."""
    spelling = learnt(iter(texts), 300)
    LlamaForCausalLM(LlamaConfig(vocab_size=spelling.size, **SIZES)).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(spelling.text, encoding="utf-8")
    return str(folder)


def wrong(folder: Path) -> str:
    """Write what is no text, and say what `--data` would take."""
    (folder / "corpus.txt").write_bytes(b"caf\xe9")
    return str(folder)


def sources(folder: Path) -> tuple[list[str], list[str]]:
    """What predictions are asked about: what can be answered, and what cannot."""
    (folder / "prompt.txt").write_text("once upon", encoding="utf-8")
    return ["abc", f"@{folder / 'prompt.txt'}"], ["", f"@{folder / 'absent.txt'}"]
