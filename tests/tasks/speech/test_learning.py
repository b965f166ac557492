"""Speech on the engine, from the command line: letters that are tones are learnt, and heard as they come."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from affinear import tasks
from affinear.cli import build_app
from affinear.train import Run, curves, train

from .tiny import RATE, write

PITCHES = {"a": 500, "b": 1200, "c": 2500}
ARGS: dict[str, Any] = {"dim": 32, "depth": 2, "num_heads": 2, "kernel_size": 7, "dropout": 0.0, "causal": True}


def spoken(text: str) -> Any:
    """A tone of 0.16 s for every letter, with a gap after it, and a longer one between words."""
    random = np.random.default_rng()
    pieces: list[Any] = []
    for letter in text:
        moment = np.arange(int(0.16 * RATE)) / RATE
        pitch = PITCHES.get(letter, 0) * random.uniform(0.97, 1.03)
        pieces += [0.3 * np.sin(2 * np.pi * pitch * moment), np.zeros(int(random.uniform(0.06, 0.1) * RATE))]
    return np.concatenate(pieces) + random.normal(0, 0.003, sum(map(len, pieces)))


def some_text() -> str:
    random = np.random.default_rng()
    return " ".join("".join(random.choice(list("abc"), size=random.integers(1, 4))) for _ in range(2))


@pytest.mark.exhaustive
def test_tones_are_learnt_and_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(curves, "draw", lambda output, *given: (output / curves.NAME).write_bytes(b""))
    for half, count in (("train", 96), ("test", 12)):
        rows: list[str] = []
        for number in range(count):
            text = some_text()
            write(tmp_path / f"{half}{number}.wav", spoken(text))
            rows.append(json.dumps({"audio": f"{half}{number}.wav", "text": text}))
        (tmp_path / f"{half}.jsonl").write_text("\n".join(rows))
    changes: dict[str, Any] = {"steps": 300, "eval_steps": 300, "batch_size": 16, "batch_seconds": 40.0, "lr": 3e-3}
    changes |= {"sample_rate": RATE, "bands": 24, "speeds": (1.0,), "band_masks": 0, "time_masks": 0, "workers": 0}
    setup = tasks.recipe_for("speech", "conformer_small", "small", **changes, warmup_steps=30, ema_decay=None)
    result = train(Run("conformer_small", str(tmp_path), tmp_path / "run", setup, ARGS))
    assert result.score["wer"] < 0.2
    write(tmp_path / "heard.wav", spoken("ab cab"))
    told = [
        CliRunner().invoke(
            build_app(), ["predict", str(tmp_path / "heard.wav"), "--weights", str(tmp_path / "run"), *more]
        )
        for more in ([], ["--stream"], ["--json"])
    ]
    assert [one.exit_code for one in told] == [0, 0, 0], told
    whole = json.loads(told[2].stdout)[0]["text"]
    assert told[0].stdout == told[1].stdout == f"{tmp_path / 'heard.wav'}: {whole}\n"
    assert set(whole) <= set("abc ")
    absent = CliRunner().invoke(
        build_app(), ["predict", "--stream", str(tmp_path / "no.wav"), "--weights", str(tmp_path / "run")]
    )
    assert absent.exit_code == 1
    assert "nothing of that name" in absent.output
