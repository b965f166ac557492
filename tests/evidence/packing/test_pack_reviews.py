"""The script that makes one table of IMDB's reviews, with its published split, out of two packages."""

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from affinear.tasks.ranges.opening import open_ranges

SCRIPT = Path(__file__).parents[3] / "evidence" / "packing" / "pack_reviews.py"
ALL = [("fine", "positive"), ("dull, long", "negative"), ("good\n", "positive"), ("bad", "negative")]
TRAIN = [("fine", "1", "imdb"), ("bad ", "0", "imdb"), ("dull, long", "0", "rotten_tomatoes")]


@pytest.fixture
def script(module_at: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, for a review of each class in each half."""
    module = module_at(SCRIPT)
    monkeypatch.setattr(module, "EACH", 1)
    return module


def table(path: Path, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([head, *rows])
    return path


def packed(script: Any, folder: Path, reviews: Sequence[Sequence[str]], train: Sequence[Sequence[str]]) -> Any:
    every = table(folder / "all.csv", ("review", "sentiment"), reviews)
    learnt = table(folder / "train.csv", ("text", "label", "source"), train)
    return script.pack(every, learnt, folder / "reviews.csv")


def test_the_table_is_opened_with_the_split_of_the_second(tmp_path: Path, script: Any):
    assert packed(script, tmp_path, ALL, TRAIN) == 0
    data = open_ranges(str(tmp_path / "reviews.csv"))
    for split, expected in ((data.train, [b"fine", b"bad"]), (data.test, [b"dull, long", b"good\n"])):
        assert [split.rows[0][index].tobytes() for index in range(len(split))] == expected
    assert data.train.labels.tolist() == [1, 0]
    assert data.test.labels.tolist() == [0, 1]


def test_of_a_review_in_both_halves_each_has_its_own_copy(tmp_path: Path, script: Any):
    assert packed(script, tmp_path, [*ALL[:2], ("fine", "positive"), ALL[3]], TRAIN) == 1
    data = open_ranges(str(tmp_path / "reviews.csv"))
    assert data.sizes == (2, 2)
    assert [data.test.rows[0][index].tobytes() for index in range(2)] == [b"dull, long", b"fine"]


def test_other_reviews_are_refused_and_nothing_is_written(tmp_path: Path, script: Any):
    with pytest.raises(ValueError, match=r"1 of .*train\.csv are not there"):
        packed(script, tmp_path, ALL, [*TRAIN, ("new", "1", "imdb")])
    with pytest.raises(ValueError, match="expected 1 reviews of each class in each half"):
        packed(script, tmp_path, [*ALL, ("more", "positive")], TRAIN)
    table(tmp_path / "else.csv", ("review", "stars"), [("fine", "5")])
    with pytest.raises(ValueError, match=r"else.csv: expected a column called sentiment"):
        script.pack(tmp_path / "else.csv", tmp_path / "train.csv", tmp_path / "reviews.csv")
    assert not (tmp_path / "reviews.csv").exists()
