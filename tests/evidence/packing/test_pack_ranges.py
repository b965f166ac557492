"""Some sequences of a data set go into one file, and stay what they are."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from affinear.tasks.ranges.opening import open_ranges


def told(script: Any, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["pack_ranges.py", *words])
    return script("packing.pack_ranges").main()


def test_some_sequences_are_kept_with_their_classes(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    spec = "listops:train=30,validation=20,test=12"
    out = tmp_path / "some.safetensors"
    assert told(script, monkeypatch, spec, str(out), "--train", "9", "--test", "5") == 0
    whole, some = open_ranges(spec), open_ranges(str(out))
    assert some.sizes == (9, 5)
    known = {(whole.train.rows[0][i].tobytes(), int(whole.train.labels[i])) for i in range(30)}
    found = [(some.train.rows[0][i].tobytes(), int(some.train.labels[i])) for i in range(9)]
    assert len(set(found)) == 9
    assert set(found) <= known


def test_more_than_there_are_is_all(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    out = tmp_path / "all.safetensors"
    told(script, monkeypatch, "listops:train=6,validation=1,test=4", str(out), "--train", "99", "--test", "99")
    assert open_ranges(str(out)).sizes == (6, 4)


def test_sequences_are_cut(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    spec, out = "listops:train=9,validation=2,test=4", tmp_path / "short.safetensors"
    assert told(script, monkeypatch, spec, str(out), "--train", "9", "--test", "4", "--length", "12") == 0
    whole, some = open_ranges(spec), open_ranges(str(out))
    assert (some.sizes, some.length, some.train.longest) == ((9, 4), 12, 12)
    assert [row.tobytes() for row in some.train.rows[0]] == [row[:12].tobytes() for row in whole.train.rows[0]]


@pytest.mark.parametrize(("spec", "length"), [("pathfinder", "9"), ("listops", "0")])
def test_pictures_and_whole_sequences_are_not_cut_away(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, spec: str, length: str
):
    words = [f"{spec}:train=3,validation=1,test=1", str(tmp_path / "x.safetensors"), "--train", "2", "--test", "1"]
    with pytest.raises(SystemExit, match="--length: expected at least 1, and data that may be cut"):
        told(script, monkeypatch, *words, "--length", length)


@pytest.mark.parametrize(("count", "spec"), [("0", "listops:train=6,validation=1,test=4"), ("3", "nowhere")])
def test_what_cannot_be_is_told(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, count: str, spec: str):
    with pytest.raises(SystemExit, match="pack_ranges: "):
        told(script, monkeypatch, spec, str(tmp_path / "x.safetensors"), "--train", count, "--test", "1")
