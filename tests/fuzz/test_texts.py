"""Corpora, tokens, tokenizers and sequences, damaged and hostile: text, or a sentence."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from fuzzing import Tally, changed, damaged, for_a_while, hostile
from pyarrow import parquet

from affinear.tasks.language import questions, tokens
from affinear.tasks.language.opening import open_corpus
from affinear.tasks.language.reading import Reading, Texts, open_texts
from affinear.tasks.language.settings import LanguageSettings
from affinear.tasks.language.spelling import Spelling, learnt, read
from affinear.tasks.ranges import keeping
from affinear.tasks.ranges.opening import open_ranges

ARROW: Any = pa
PARQUET: Any = parquet


ASKED: dict[str, Any] = {
    **{"text": "a b", "goal": "g", "sol1": "x", "sol2": "y", "label": 1, "sentence": "a _ b", "answer": "1"},
    **{"ctx_a": "a", "ctx_b": "b", "activity_label": "c", "endings": ["a", "b"], "option1": "x", "option2": "y"},
}


def table() -> bytes:
    file = io.BytesIO()
    columns = {"text": ["once upon", "a time", None, "x" * 300], "other": [1, 2, 3, 4]}
    PARQUET.write_table(ARROW.table(columns), file)
    return file.getvalue()


def corpus(draw: random.Random) -> tuple[str, bytes]:
    """A name and what is in the file."""
    kind = draw.randrange(3)
    if kind == 0:
        lines = [json.dumps({"text": "once upon"} if draw.random() < 0.7 else hostile(draw)) for _ in range(5)]
        lines += draw.choice(([], ["[" * 100_000], ["9" * 10_000], ['{"text": "\\ud800"}']))
        content = "\n".join(lines).encode()
        return "a.jsonl", damaged(draw, content) if draw.random() < 0.5 else content
    if kind == 1:
        return "a.txt", damaged(draw, "once upon a time\n\n猫 and 犬\n".encode() * 5)
    return "a.parquet", damaged(draw, table())


def test_hostile_corpora(tally: Tally, draw: random.Random, tmp_path: Path):
    def read_all(path: Path, reading: Reading) -> None:
        data = open_texts(path, reading)
        for half in ("train", "test"):
            for text in data.texts(half):
                Spelling("bytes").encode([text])

    (tmp_path / "a.parquet").write_bytes(table())
    with pytest.raises(ValueError, match="expected a text in the field"):
        read_all(tmp_path / "a.parquet", Reading())  # None is no text; all that is imported on the way is by now
    for _ in for_a_while():
        name, content = corpus(draw)
        (tmp_path / name).write_bytes(content)
        reading = Reading(draw.choice(("file", "line", "paragraph")), "text", draw.choice((2, 3, 100)))
        what = f"{name} {content[:200]!r}"
        tally.attempt(what, lambda n=name, r=reading: read_all(tmp_path / n, r), ValueError)
        test = draw.choice(tuple(questions.TESTS))
        row = changed(draw, ASKED)
        (tmp_path / "q.jsonl").write_text(json.dumps(row))
        (tmp_path / "q-labels.lst").write_bytes(damaged(draw, b"0\n1\n"))
        tally.attempt(f"{test} {row}"[:500], lambda t=test: questions.read(t, tmp_path / "q.jsonl"), ValueError)
    tally.check()


def test_hostile_tokens(tally: Tally, draw: random.Random, tmp_path: Path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("once upon a time\n" * 30)
    texts = open_texts(tmp_path / "text", Reading("line", "text", 3))
    assert isinstance(texts, Texts)
    folder = tokens.write(texts, learnt(texts.texts("train"), 300), tmp_path / "tokens")
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    settings = LanguageSettings()
    for _ in for_a_while():
        name = draw.choice(sorted(whole))
        if name.endswith(".json") and draw.random() < 0.6:
            told = json.loads(whole[name])
            for _ in range(draw.choice((1, 1, 3))):
                told = changed(draw, told)
            content = json.dumps(told).encode()
        else:
            content = damaged(draw, whole[name])
        (folder / name).write_bytes(content)
        what = f"{name} {content[:300]!r}"
        found, data = tally.attempt(what, lambda: open_corpus(str(folder), settings), ValueError)
        if found:
            tally.attempt(f"spell {what}", lambda data=data: data.spelling.encode(["once upon a time"]), ValueError)
            tally.attempt(f"words {what}", lambda data=data: data.spelling.decode([0, 1, 2]), ValueError)
        if name == tokens.TOKENIZER:
            tally.attempt(f"tokenizer {what}", lambda: read(folder / name), ValueError)  # noqa: B023
        (folder / name).write_bytes(whole[name])
    tally.check()


FILES: dict[str, bytes] = {
    **{
        f"basic_{half}.tsv": b"Source\tTarget\n[MAX 1 2 ]\t2\n( ( [SM 3 4 ) ] )\t7\n"
        for half in ("train", "val", "test")
    },
    **{f"new.{half}.tsv": b"1.0\ta\tb\ttext one\ttext two\n0\tc\td\tone\ttwo\n" for half in ("train", "eval", "test")},
    **{f"{half}.csv": b'review,sentiment\n"good, very",positive\nbad,negative\n' for half in ("train", "test")},
}


def test_hostile_sequences(tally: Tally, draw: random.Random, tmp_path: Path):
    data = open_ranges("listops:train=6,validation=3,test=3,shortest=4,longest=20,seed=1")
    kept = keeping.keep(data, tmp_path / "kept.safetensors").read_bytes()
    for number in for_a_while():
        folder = tmp_path / str(number)
        folder.mkdir()
        first = draw.choice(("basic", "new", "t"))
        chosen = {name: content for name, content in FILES.items() if name.startswith(first)}
        victim = draw.choice(sorted(chosen))
        for name, content in chosen.items():
            (folder / name).write_bytes(damaged(draw, content) if name == victim else content)
        what = f"{victim} {(folder / victim).read_bytes()[:200]!r}"
        tally.attempt(what, lambda folder=folder: open_ranges(str(folder)).fingerprint, ValueError)
        content = damaged(draw, kept) if draw.random() < 0.6 else forged(draw)
        (folder / "a.safetensors").write_bytes(content)
        what = f"kept {content[:300]!r}"
        tally.attempt(what, lambda f=folder: open_ranges(str(f / "a.safetensors")).fingerprint, ValueError)
    tally.check()


def forged(draw: random.Random) -> bytes:
    """A file of sequences whose description says something else."""
    from safetensors.numpy import save

    told: Any = {"name": "x", "kind": "text", "classes": ["a", "b"], "symbols": 9, "length": 20}
    parts: dict[str, Any] = {}
    for part in keeping.PARTS:
        parts[f"{part}.labels"] = np.array([0, 1])
        parts[f"{part}.0.tokens"] = np.arange(6, dtype=np.uint8)
        parts[f"{part}.0.starts"] = np.array([0, 2, 6])
    name = draw.choice(sorted(parts))
    shape = tuple(draw.choice((0, 1, 2, 3)) for _ in range(draw.choice((1, 1, 2))))
    parts[name] = np.full(shape, draw.choice((0, 1, 200, -1))).astype(draw.choice((np.int64, np.uint8, np.float32)))
    try:
        return save(parts, {"ranges": json.dumps(changed(draw, told))})
    except Exception:  # half a letter, which no file can hold
        return b""
