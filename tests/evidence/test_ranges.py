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


def test_cells_are_trained_and_told_whichever_call_they_were_done_by(script: Any, tmp_path: Path, reviews: Path):
    ranges = script("ranges")
    sets = [word for one in ("batch_size=2", "length=16") for word in ("--set", one)]
    given = ranges.arguments().parse_args(["--output", str(tmp_path), "--text", str(reviews), *sets])
    files = {"text": ranges.data_file(given, "text")}
    for arm, seed in (("mala", 5), ("softmax", 4)):
        (one,) = ranges.cells_of(given, files, "text", arm, seed, 2)
        ranges.cell(ranges.arguments().parse_args(one.arguments))
    table = ranges.tell(given)
    found = json.loads((tmp_path / "ranges.json").read_text())
    assert found["judged"] == {"text": 4}
    assert [(one["arm"], one["seed"]) for one in found["cells"]] == [("softmax", 4), ("mala", 5)]
    for cell in found["cells"]:
        assert (cell["kind"], cell["recipe"]["steps"], cell["learnt_from"]) == ("text", 2, 4)
        assert cell["score"]["accuracy"] in (0, 0.25, 0.5, 0.75, 1)
    assert "| text | mala | 1 |" in table


def test_data_that_is_made_up_is_made_once(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ranges = script("ranges")
    monkeypatch.setitem(ranges.SIZES, "pathfinder", (3, 1, 2))
    monkeypatch.setattr(ranges, "PARTS", 1)
    given = ranges.arguments().parse_args(["--output", str(tmp_path)])
    assert ranges.chosen_kinds(given) == ["listops", "pathfinder"]
    file = ranges.data_file(given, "pathfinder")
    before = file.stat().st_mtime_ns
    assert open_ranges(str(file)).sizes == (3, 2)
    assert ranges.data_file(given, "pathfinder").stat().st_mtime_ns == before
