"""Speech: lines are put together as they were said, and a cell is trained, judged and told."""

from __future__ import annotations

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
    monkeypatch.setattr(found, "STAGES", (found.Stage(30, 5, 0.5, masked=False), found.Stage(60, 3, 0.5, masked=True)))
    monkeypatch.setattr(found, "RECIPE", found.RECIPE.changed(batch_size=3))
    monkeypatch.setattr(found, "STRETCH", 2)
    monkeypatch.setattr(found, "KNOWN", 4)
    found.heard.cache_clear()
    return found


@pytest.fixture
def packed(script: Any, tmp_path: Path) -> Path:
    """Lines of three characters, one of whom is held out; one line says nothing."""
    voices, random = script("packing.pack_voices"), np.random.default_rng()
    rows: list[dict[str, Any]] = []
    parts: list[Any] = []
    for turn, speaker in enumerate(["spathi", "supox", "utwig"] * 3):
        for number in range(4):
            features = random.normal(0, 4, (2 * random.integers(20, 50), voices.BANDS)).astype(np.float32)
            text = "..." if (turn, number) == (0, 2) else " ".join(random.choice(WORDS, 2))
            parts.append(voices.halved(features))
            rows.append({"speaker": speaker, "text": text, "frames": 2 * len(parts[-1])})
    voices.write_packed(tmp_path, rows, parts, quality=50)
    return tmp_path


def test_lines_are_put_together_as_they_follow_each_other(speech: Any, packed: Path):
    corpus, most = speech.heard(packed), speech.STAGES[-1].most
    lines, random = corpus.lines, np.random.default_rng()
    found = lines.passages(corpus.learnt, most, random)
    assert sorted(i for one in found for i in one) == sorted(i for run in corpus.learnt for i in run)
    assert 2 not in [i for one in found for i in one]  # it says nothing
    for one in found:
        assert len({lines.speakers[i] for i in one} - set(speech.HELD_OUT)) == 1
        row = torch.tensor([lines.row(one)])
        assert row[0, 1] <= most
        said = corpus.said(row, int(row[0, 3]))[0].tolist()
        assert speech.SPELLING.decode(said) == " ".join(lines.texts[i] for i in one)
    assert {lines.speakers[one.start] for one in corpus.test} == {"supox"}
    assert all(len(run) <= speech.STRETCH for run in lines.runs)


def test_what_is_judged_is_not_learnt(speech: Any, packed: Path):
    corpus = speech.heard(packed)
    learnt, test, known = ({i for run in runs for i in run} for runs in (corpus.learnt, corpus.test, corpus.known))
    assert known
    assert not learnt & (test | known)
    assert not test & known
    assert {i for run in corpus.again for i in run} <= learnt
    assert not {corpus.lines.speakers[i] for i in known} & set(speech.HELD_OUT)
    assert sorted(learnt | test | known) == sorted(i for run in corpus.lines.runs for i in run)


def test_features_are_those_of_the_lines_at_their_speed(speech: Any, packed: Path):
    corpus = speech.heard(packed)
    one = corpus.lines.passages(corpus.learnt, speech.STAGES[-1].most)[0]
    start, frames, *_ = row = corpus.lines.row(one)
    ear, speeds = speech.ear_of(corpus, "mala_causal"), torch.tensor([1.0, 0.9, 1.1])
    features, counts = corpus.features(torch.tensor([row] * 3), speeds, ear, speech.STAGES[-1].frames)
    assert counts.tolist() == (frames / speeds).long().tolist()  # in float32: 110 at 1.1 are 100, and 99 in float64
    whole = speech.FLOOR + speech.STEP * corpus.flat[start : start + frames].float()
    torch.testing.assert_close(features[0, :frames], ear.normalized(whole))
    torch.testing.assert_close(features[1, :frames], ear.normalized(whole[(torch.arange(frames) * 0.9).long()]))
    assert not features[2, counts[2] :].any()


def test_every_line_that_fits_comes_as_often_as_any_other(speech: Any, packed: Path):
    corpus, stage = speech.heard(packed), speech.STAGES[-1]
    draws = speech.Draws.of(corpus, stage, 400, 0)
    assert draws.rows.shape == (400, stage.places, 4)
    assert draws.longest == draws.rows[..., 3].max()
    assert draws.rows[..., 1].max() <= stage.most
    mine = [i for run in corpus.learnt for i in run]
    begun = {corpus.lines.starts[i]: i for i in mine}
    counts = dict.fromkeys(mine, 0)
    for start, frames, _, _ in draws.rows.flatten(0, 1).tolist():
        line = begun[start]
        while line in counts and corpus.lines.starts[line] < start + frames:
            counts[line] += 1
            line += 1
    assert min(counts.values()) > 0.9 * max(counts.values())
    assert 0.9 <= draws.speeds.min() < 0.93
    assert 1.07 < draws.speeds.max() <= 1.1


def test_stages_have_whole_parts_and_all_steps_together(speech: Any):
    steps = int(np.random.default_rng().integers(200, 5000))
    counts = speech.steps_of(steps)
    assert sum(counts) == steps
    assert all(count % speech.PART == 0 for count in counts[:-1])


def test_a_stage_has_no_more_steps_than_its_limit(speech: Any, monkeypatch: pytest.MonkeyPatch):
    limit = speech.PART * int(np.random.default_rng().integers(1, 5))
    monkeypatch.setattr(speech, "STAGES", (speech.Stage(30, 5, 0.5, False, limit), speech.Stage(60, 3, 0.5, True)))
    assert speech.steps_of(4000) == [limit, 4000 - limit]
    assert speech.steps_of(2 * speech.PART) == [speech.PART, speech.PART]


@pytest.mark.parametrize("arm", ["softmax_relative", "none", "mala_causal"])
def test_a_cell_is_trained_judged_and_told(speech: Any, packed: Path, tmp_path: Path, arm: str):
    told = ["--data", str(packed), "--out", str(tmp_path / "out"), "--steps", "53", "--cell", f"{arm}-1"]
    speech.run(speech.parsed([*told, "--limit", "4"]))
    found = json.loads((tmp_path / "out" / "cells" / f"{arm}-1.json").read_text())
    assert (found["cell"], found["plan"]["steps"]) == ({"arm": arm, "seed": 1}, 53)
    assert found["words"] > 0
    assert found["known"]["words"] > 0
    assert all(0 < some["loss"] < 30 for some in (found, found["known"], found["again"]))
    assert [stage["steps"] for stage in found["stages"]] == [50, 3]
    assert 0 < found["stages"][0]["hours"] <= found["stages"][1]["hours"] <= found["hours"][0]
    assert sum(stage["hours"] * stage["times"] for stage in found["stages"]) == pytest.approx(
        found["epochs"] * found["hours"][0]
    )
    assert len(found["losses"]) == 2  # one of each stage
    assert ("stream" in found) == (arm == "mala_causal")
    assert "WER" in speech.line(found)


def test_words_are_searched_for_in_what_cells_have_kept(
    speech: Any, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    corpus = speech.heard(packed)
    held = [*corpus.test, *corpus.known]

    def sure(text: str) -> Any:  # every letter but for noise, with a blank behind it
        pieces = [number for piece in speech.SPELLING.encode(text) for number in (piece, 0)]
        scores = torch.randn(len(pieces), speech.SPELLING.size)
        scores[torch.arange(len(pieces)), torch.tensor(pieces)] += 20
        return scores.log_softmax(dim=-1)

    speech.keep_scores(tmp_path / "cells" / "mala-2.npz", [sure(corpus.text(one)) for one in held])
    told = ["speech", "--data", str(packed), "--out", str(tmp_path), "--part", "words"]
    monkeypatch.setattr("sys.argv", told)
    assert speech.main() == 0
    found = json.loads((tmp_path / "words" / "mala-2.json").read_text())
    assert (found["cell"], found["wer"], found["known"]["wer"]) == ({"arm": "mala", "seed": 2}, 0, 0)
    assert found["words"] == sum(len(corpus.text(one).split()) for one in corpus.test)
    assert 0 <= found["unknown"] <= 1
    speech.keep_scores(tmp_path / "cells" / "none-0.npz", [sure("we")])
    with pytest.raises(ValueError, match=rf"expected scores of {len(held)} recordings, .* got 1"):
        speech.main()


def test_nothing_is_told_of_a_cell_that_was_cut_off(speech: Any, packed: Path, tmp_path: Path):
    told = ["--data", str(packed), "--out", str(tmp_path / "out"), "--steps", "3", "--until", "0", "--cell", "none-0"]
    speech.run(speech.parsed(told))
    assert not (tmp_path / "out" / "cells").exists()


def test_all_arms_are_trained_for_as_many_steps_as_there_is_time_for(
    speech: Any, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(speech, "BESIDE", 0.0)
    monkeypatch.setattr(speech, "seconds_of", lambda arm, corpus: {"none": 100.0, "mala": 200.0, "linear": 900.0}[arm])
    told = ["speech", "--data", str(packed), "--out", str(tmp_path / "out"), "--only", "none,mala,linear"]
    monkeypatch.setattr("sys.argv", [*told, "--minutes", "100", "--least", "10", "--limit", "4"])
    assert speech.main() == 0
    found = [json.loads(file.read_text()) for file in sorted((tmp_path / "out" / "cells").glob("*.json"))]
    assert [one["cell"]["arm"] for one in found] == ["mala", "none"]
    assert {one["plan"]["steps"] for one in found} == {16}  # in 85 minutes
    assert "| mala | 1 |" in capsys.readouterr().out


def test_seeds_come_after_all_arms(speech: Any):
    names = [one.name for one in speech.trainings(["mala", "none"], 2, ["mala"])]
    assert names == ["mala-0", "none-0", "mala-1"]
    assert speech.Training.of("softmax_relative-3") == speech.Training("softmax_relative", 3)
