"""Speech: lines are put together as they were said, and a cell is trained, judged and told."""

from __future__ import annotations

import bz2
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

WORDS = ["we", "are", "the", "slylandro", "and", "you", "are", "not", "so", "small"]


@pytest.fixture
def speech(script: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, with networks and batches that are small."""
    found = script("speech")
    monkeypatch.setattr(found, "SHAPE", {**found.SHAPE, "dim": 16, "depth": 1, "num_heads": 2})
    monkeypatch.setattr(found, "PLACES", 3)
    monkeypatch.setattr(found, "RECIPE", found.RECIPE.changed(batch_size=3))
    monkeypatch.setattr(found, "TOKENS", 60)
    monkeypatch.setattr(found, "FRAMES", 4 * 59 + 7)
    found.heard.cache_clear()
    return found


@pytest.fixture
def packed(script: Any, tmp_path: Path) -> Path:
    """Lines of three characters, one of whom is held out; one line says nothing."""
    voices, random = script("packing.pack_voices"), np.random.default_rng()
    rows: list[dict[str, Any]] = []
    parts: list[bytes] = []
    for turn, speaker in enumerate(["spathi", "supox", "utwig"] * 3):
        for number in range(4):
            made = voices.pack(random.normal(0, 4, (2 * random.integers(20, 60), voices.BANDS)).astype(np.float32))
            text = "..." if (turn, number) == (0, 2) else " ".join(random.choice(WORDS, 2))
            rows.append({"speaker": speaker, "text": text, "frames": 2 * made.shape[1]})
            parts.append(made.tobytes())
    (tmp_path / "voices.json").write_text(json.dumps(rows), encoding="utf-8")
    (tmp_path / "voices.bz2").write_bytes(bz2.compress(b"".join(parts)))
    return tmp_path


def test_lines_are_put_together_as_they_follow_each_other(speech: Any, packed: Path):
    corpus = speech.heard(packed)
    lines, random = corpus.lines, np.random.default_rng()
    found = lines.passages(corpus.learnt, corpus.most, random)
    assert sorted(i for one in found for i in one) == sorted(i for run in corpus.learnt for i in run)
    assert 2 not in [i for one in found for i in one]  # it says nothing
    for one in found:
        assert len({lines.speakers[i] for i in one} - set(speech.HELD_OUT)) == 1
        row = torch.tensor([lines.row(one)])
        assert row[0, 1] <= corpus.most
        said = corpus.said(row)[0, : row[0, 3]].tolist()
        assert speech.SPELLING.decode(said) == " ".join(lines.texts[i] for i in one)
    assert {lines.speakers[one.start] for one in corpus.test} == {"supox"}


def test_features_are_those_of_the_lines_at_their_speed(speech: Any, packed: Path):
    corpus = speech.heard(packed)
    one = corpus.lines.passages(corpus.learnt, corpus.most)[0]
    start, frames, *_ = row = corpus.lines.row(one)
    ear, speeds = speech.ear_of(corpus, "mala_causal"), torch.tensor([1.0, 0.9, 1.1])
    features, counts = corpus.features(torch.tensor([row] * 3), speeds, ear)
    assert counts.tolist() == [frames, int(frames / 0.9), int(frames / 1.1)]
    whole = speech.FLOOR + speech.STEP * corpus.flat[start : start + frames].float()
    torch.testing.assert_close(features[0, :frames], ear.normalized(whole))
    torch.testing.assert_close(features[1, :frames], ear.normalized(whole[(torch.arange(frames) * 0.9).long()]))
    assert not features[2, counts[2] :].any()


def test_every_line_comes_as_often_as_any_other(speech: Any, packed: Path):
    corpus = speech.heard(packed)
    passages, speeds, epochs = speech.draws(corpus, 200, 0)
    frames = sum(corpus.lines.frames[i] for run in corpus.learnt for i in run)
    assert passages.shape == (200, 3, 4)
    assert passages[..., 1].sum() / frames == pytest.approx(epochs, rel=0.05)
    assert 0.9 <= speeds.min() < 0.93
    assert 1.07 < speeds.max() <= 1.1


@pytest.mark.parametrize("arm", ["softmax_relative", "none", "mala_causal"])
def test_a_cell_is_trained_judged_and_told(speech: Any, packed: Path, tmp_path: Path, arm: str):
    told = ["--data", str(packed), "--out", str(tmp_path / "out"), "--steps", "4", "--cell", f"{arm}-1"]
    speech.run(speech.parsed([*told, "--limit", "4"]))
    found = json.loads((tmp_path / "out" / "cells" / f"{arm}-1.json").read_text())
    assert (found["cell"], found["plan"]["steps"]) == ({"arm": arm, "seed": 1}, 4)
    assert found["words"] > 0
    assert len(found["losses"]) == 1
    assert ("stream" in found) == (arm == "mala_causal")
    assert "WER" in speech.line(found)


def test_nothing_is_told_of_a_cell_that_was_cut_off(speech: Any, packed: Path, tmp_path: Path):
    told = ["--data", str(packed), "--out", str(tmp_path / "out"), "--steps", "3", "--until", "0", "--cell", "none-0"]
    speech.run(speech.parsed(told))
    assert not (tmp_path / "out" / "cells").exists()


def test_seeds_come_after_all_arms(speech: Any):
    names = [one.name for one in speech.trainings(["mala", "none"], 2, ["mala"])]
    assert names == ["mala-0", "none-0", "mala-1"]
    assert speech.Training.of("softmax_relative-3") == speech.Training("softmax_relative", 3)
