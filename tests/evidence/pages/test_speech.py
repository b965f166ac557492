"""The page of speech says first what cannot be concluded, and nothing that the cells do not."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def heard(folder: Path, arm: str, seed: int, wer: float, **more: Any) -> None:
    (folder / "cells").mkdir(exist_ok=True)
    told = {
        "cell": {"arm": arm, "seed": seed},
        "plan": {"steps": 900},
        "parameters": 4_000_000,
        "wer": wer,
        "cer": wer / 2,
    }
    told |= {"shape": {"depth": 6, "dim": 192}, "hours": [9.42, 0.81, 0.52], "epochs": 24.2}
    told |= {"losses": [9.0, 1.0, 1.25], "known": {"wer": wer / 4, "cer": wer / 8, "recordings": 77, "words": 1234}}
    told |= {"words": 5000, "recordings": 400, **more}
    (folder / "cells" / f"{arm}-{seed}.json").write_text(json.dumps(told))


@pytest.mark.parametrize(
    ("behind", "said"), [(0.03, "the bar does not hold, missed by 2.0."), (0.009, "the bar holds.")]
)
def test_speech_holds_mala_to_softmax_with_relative_positions(
    written: Callable[..., str], tmp_path: Path, behind: float, said: str
):
    base = random.uniform(0.3, 0.5)
    for seed in range(3):
        heard(tmp_path, "softmax_relative", seed, base + 0.001 * seed)
        heard(tmp_path, "mala", seed, base + behind + 0.001 * seed)
    heard(tmp_path, "mala_causal", 0, base + 0.2, stream={"same_tokens": 999, "tokens": 1000})
    hour = {
        "machine": {"device": "X1"},
        "rows": [{"model": "m", "arm": "mala", "minutes": 60.0, "seconds": 0.5, "gib": 1.25}],
    }
    hour["rows"] += [{"model": "m", "arm": "softmax_relative", "minutes": 60.0, "would_need_gib": 180.0}]  # pyright: ignore
    (tmp_path / "speech_hour.json").write_text(json.dumps(hour))
    text = written("speech", tmp_path, tmp_path / "page")
    assert said in text
    assert "9.4 hours of them to learn from, 24 times; 0.8 hours of five others and 0.5 of lines that" in text
    assert "the networks have 6 blocks of 192 channels" in text
    assert "on 77 (1,234 words) of those that were" in text
    assert f"| {25 * (base + 0.001):.1f} ± 0.0 |" in text
    assert "One seed of an arm" not in text
    assert "999 of 1,000 tokens" in text
    assert "| 1.25 ± 0.00 | 4.00 M | 900 |" in text
    assert "have not learnt to hear" not in text
    assert "--out speech --only softmax_relative,mala,mala_causal --steps 900 --minutes 9" in text
    assert "--part words" not in text
    assert "Not measured: softmax, linear, nala, inline, none." in text
    assert "Some arms have 1 seed:" in text
    assert "180 of scores alone" in text
    assert f"{100 * (base + 0.001):.1f} ± 0.1" in text


def test_an_hour_is_told_beside_sdpa(written: Callable[..., str], tmp_path: Path):
    sdpa, ours = random.uniform(0.5, 1.0), random.uniform(0.1, 0.2)
    rows = [
        {"model": "m", "arm": arm, "minutes": minutes, "seconds": seconds, "gib": gib}
        for arm, minutes, seconds, gib in (
            ("softmax", 60.0, sdpa, 2.0),
            ("mala", 60.0, ours, 1.5),
            ("softmax", 1.0, 0.01, 0.1),
            ("mala", 1.0, 0.02, 0.1),
        )
    ]
    (tmp_path / "speech_hour.json").write_text(json.dumps({"machine": {"device": "X1"}, "rows": rows}))
    text = written("speech", tmp_path, tmp_path / "page")
    times = f"{sdpa / ours:.1f}"
    assert "**Bar: linear mechanisms take an hour in one piece.** It holds." in text
    assert f"With m they are {times} to {times} times as fast as SDPA, with 1.50 to 1.50 GiB beside its 2.00." in text
    assert "Not faster than SDPA: mala at 1 minutes." in text


def test_nothing_is_shown_by_networks_that_hear_nothing(written: Callable[..., str], tmp_path: Path):
    for arm in ("softmax_relative", "mala"):
        heard(tmp_path, arm, 0, random.uniform(0.97, 1.0))
    heard(tmp_path, "none", 0, 0.912)
    row = {"mechanism": "mala", "recordings": 9, "tokens": 1234, "same_tokens": 1234, "pieces": 20}
    stream = {"machine": {"device": "CPU"}, "rows": [row, {**row, "mechanism": "nala", "same_tokens": 1233}]}
    (tmp_path / "stream.json").write_text(json.dumps(stream))
    text = written("speech", tmp_path, tmp_path / "page")
    assert "softmax_relative, mala have not learnt to hear in so few steps" in text
    assert "- none have hardly learnt to hear: they write letters that sound alike, and 91 words" in text
    assert "or better.** Nothing is shown: neither has learnt to hear." in text
    assert "| nala | 9 | 1,234 | 1,233 | 20 |" in text
    assert "token for token.** It does not hold." in text


def test_what_was_learnt_is_told_beside_what_was_not_and_words_with_n_grams(
    written: Callable[..., str], tmp_path: Path
):
    learnt = random.uniform(0.2, 0.4)
    stage = {"steps": 4000, "hours": 8.7, "times": 52.3}
    known = {"wer": 0.5, "cer": 0.2, "recordings": 77, "words": 1234, "loss": 0.81}
    for arm in ("softmax_relative", "mala"):
        again = {"loss": learnt / 2, "wer": learnt}
        heard(tmp_path, arm, 0, 0.6, again=again, known=known, loss=1.02, stages=[{**stage, "steps": 400}, stage])
    (tmp_path / "words").mkdir()
    words = {"wer": 0.412, "unknown": 0.08, "known": {"wer": 0.333, "unknown": 0.055}}
    told = {"cell": {"arm": "mala", "seed": 0}, "order": 2, "beam": 8, **words}
    (tmp_path / "words" / "mala-0.json").write_text(json.dumps(told))
    text = written("speech", tmp_path, tmp_path / "page")
    assert f"| mala | {learnt / 2:.2f} | 0.81 | 1.02 | {100 * learnt:.1f} |" in text
    assert "There were 400 steps over the 8.7 hours whose lines are short enough, 52 times; 4,000 steps" in text
    assert "| mala | 1 | 41.2 | 33.3 |" in text
    assert "Of the words of speakers that were never heard 8.0 % are not among those learnt, and 5.5 %" in text
    assert json.loads((tmp_path / "page" / "speech.json").read_text())["words"][0]["beam"] == 8
