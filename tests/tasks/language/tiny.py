"""Language, as small as it goes, for the contract of tasks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

MODEL = "affinear_tiny"
MODEL_ARGS: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
CHANGES: dict[str, Any] = {
    "batch_size": 4,
    "context": 16,
    "tokenizer": "bytes",
    "held_out": 3,
    "ema_decay": 0.9,
    "test_batch": 4,
    "warmup_steps": 1,
}


def data(folder: Path) -> str:
    """Write a corpus, and say what `--data` takes."""
    corpus(folder)
    return str(folder)


def corpus(folder: Path) -> list[str]:
    """Write one, and give its texts."""
    os.environ["AFFINEAR_CACHE"] = str(folder.parent / "cache")
    random = np.random.default_rng()
    texts = ["".join(map(chr, random.integers(97, 123, random.integers(5, 60)))) for _ in range(24)]
    lines = "\n".join(json.dumps({"text": text}) for text in texts)
    (folder / "corpus.jsonl").write_text(lines, encoding="utf-8")
    return texts


def wrong(folder: Path) -> str:
    """Write what is no text, and say what `--data` would take."""
    (folder / "corpus.txt").write_bytes(b"caf\xe9")
    return str(folder)


def sources(folder: Path) -> tuple[list[str], list[str]]:
    """What predictions are asked about: what can be answered, and what cannot."""
    (folder / "prompt.txt").write_text("once upon", encoding="utf-8")
    return ["abc", f"@{folder / 'prompt.txt'}"], ["", f"@{folder / 'absent.txt'}"]
