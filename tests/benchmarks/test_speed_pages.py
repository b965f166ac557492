"""Pages of speed say of every figure what the latest report that has it says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
PAGE = "before\n<!-- bars -->old<!-- end -->\nbetween\n<!-- networks --><!-- end -->\nafter\n"


@pytest.fixture
def pages(module_at: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)  # scripts import each other by name
    return module_at(BENCHMARKS / "speed_pages.py")


def call(who: str, ms: float) -> dict[str, Any]:
    return {"what": "calls", "who": who, "direction": "forward", "ms": ms}


def network(who: str, speed: float) -> dict[str, Any]:
    about = {"what": "network", "direction": "inference", "way": "graphed", "batch": 64}
    return {**about, "who": who, "turn": 0, "images_per_s": speed, "ms": 64e3 / speed, "host_ms": 0.5}


def report(day: int, *rows: dict[str, Any]) -> dict[str, Any]:
    return {"machine": {"date": f"2026-01-0{day}T12:00:00+00:00"}, "rows": rows}


def test_a_page_says_of_each_figure_what_the_latest_report_says(pages: Any, tmp_path: Path) -> None:
    old = report(1, call("mala", 1.2), call("sdpa", 1.0), network("mavit_base", 1600), network("twin_base", 1000))
    new = report(2, network("mavit_base", 1499), network("twin_base", 1000), network("nalaformer_base", 1400))
    page, files = tmp_path / "page.md", [tmp_path / "old.json", tmp_path / "new.json"]
    page.write_text(PAGE)
    for file, one in zip(files, (old, new), strict=True):
        file.write_text(json.dumps(one))
    for _ in range(2):  # writing it again changes nothing
        pages.main(page, files)
        lines = page.read_text().splitlines()
        assert "| plain call over SDPA's, 128, 3, 196, 64 | at least" not in lines
        assert (
            "| plain call over SDPA's, 128, 3, 196, 64 | at most 1.25, 1.5 | **1.2** | not measured | 2026-01-01 |"
            in lines
        )
        assert "| mavit_base over released, graphed | at least 1.5 | 1.499 |  | 2026-01-02 |" in lines
        assert "| nalaformer_base over mavit_base, graphed | at least 0.85 | **0.934** |  | 2026-01-02 |" in lines
        assert "| `twin_base` | inference, graphed | 64 | 1,000 | 64 | 0.5 |  |  | 2026-01-02 |" in lines
        assert [lines[0], lines[-1]] == ["before", "after"]
        assert "old" not in lines


def test_a_page_without_a_place_for_a_table_is_told(pages: Any) -> None:
    with pytest.raises(ValueError, match="<!-- networks -->"):
        pages.placed("<!-- bars --><!-- end -->", "networks", "")


def test_several_shapes_are_one_line_from_the_least_to_the_most(pages: Any) -> None:
    rows = [
        {"what": "depthwise 3x3", "shape": shape, "who": who, "direction": "forward", "ms": ms}
        for shape, times in (("128,56,56,64", (3.0, 1.0)), ("128,28,28,128", (1.0, 1.0)))
        for who, ms in zip(("cudnn", "ours"), times, strict=True)
    ]
    (line,) = (line for line in pages.bars([report(1, *rows)]) if "3 x 3" in line)
    assert "| 1 to 3 | not measured |" in line
