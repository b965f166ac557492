"""Long ranges: data that is judged by in part, and a cell that is trained and told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from affinear.tasks.ranges.opening import open_ranges


@pytest.fixture
def reviews(tmp_path: Path) -> Path:
    """Eight reviews, every second of each class to be judged by."""
    rows = [f"{'good' if number % 2 else 'bad'} number {number},{number % 2}" for number in range(8)]
    path = tmp_path / "reviews.csv"
    path.write_text("\n".join(["review,sentiment", *rows]) + "\n", encoding="utf-8")
    return path


def test_judging_by_some_leaves_all_to_learn_from(script: Any, tmp_path: Path, reviews: Path):
    ranges = script("ranges")
    told = ["--output", str(tmp_path), "--text", str(reviews)]
    whole = open_ranges(str(ranges.data_file(ranges.arguments().parse_args(told), "text")))
    some = open_ranges(str(ranges.data_file(ranges.arguments().parse_args([*told, "--judge", "3"]), "text")))
    assert whole.sizes == (4, 4)
    assert some.sizes == (4, 3)
    assert some.train.rows[0].tokens.tolist() == whole.train.rows[0].tokens.tolist()
    assert some.test.labels.tolist() == [whole.test.labels[index] for index in (0, 1, 3)]


def test_a_cell_is_trained_and_told_with_how_many_it_was_judged_by(script: Any, tmp_path: Path, reviews: Path):
    ranges = script("ranges")
    sets = [word for one in ("steps=2", "batch_size=2", "length=16", "warmup_steps=1") for word in ("--set", one)]
    told = ["--output", str(tmp_path), "--text", str(reviews), "--workers", "0", *sets]
    given = ranges.arguments().parse_args(told)
    one = ranges.one_cell(given, "text", "mala", 5, ranges.data_file(given, "text"))
    ranges.cell(ranges.arguments().parse_args(one.arguments))
    table = ranges.tell([one], given, {"text": 4})
    found = json.loads((tmp_path / "ranges.json").read_text())
    assert found["judged"] == {"text": 4}
    (cell,) = found["cells"]
    assert (cell["kind"], cell["arm"], cell["seed"], cell["recipe"]["steps"]) == ("text", "mala", 5, 2)
    assert cell["score"]["accuracy"] in (0, 0.25, 0.5, 0.75, 1)
    assert "| text | mala | 1 |" in table
