"""What came out is told after every cell and once more at the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

# What a script that serves does, without the seconds of its imports.
STAND_IN = """
import json, os, pathlib, sys
for line in sys.stdin:
    result, number = json.loads(line)["arguments"]
    if number == "none":
        sys.exit(1)
    path = pathlib.Path(result)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"number": int(number)}))
    os.write(1, b".")
"""


def test_all_is_told_after_each_cell_and_printed_at_the_end(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    telling = script("running.telling")
    running = script("running.cells")
    (tmp_path / "program.py").write_text(STAND_IN)

    def cell(number: str) -> Any:
        folder = tmp_path / "cells" / number
        return running.Cell.in_folder(f"cell {number}", folder, [str(folder / "result.json"), number])

    told: list[list[int]] = []

    def worked_off(cells: list[Any]) -> int:
        def tell() -> str:
            told.append([found["number"] for found in running.results(cells)])
            return f"all: {told[-1]}"

        program, how = str(tmp_path / "program.py"), running.How(1, 1.0)
        return telling.work_off_and_tell(program, cells, how, tell, lambda found: f"number {found['number']}")

    assert worked_off([cell("1"), cell("2"), cell("none")]) == 1
    assert told == [[1], [1, 2], [1, 2]]  # after each that is done, and at the end
    out = capsys.readouterr().out
    assert "cell 2: number 2\n" in out
    assert out.endswith("all: [1, 2]\n")
    assert worked_off([cell("1"), cell("2")]) == 0


def test_a_cell_has_a_folder_or_two_files(script: Any, tmp_path: Path):
    cells = script("running.cells")
    one = cells.Cell.in_folder("mala, seed 0", tmp_path / "mala-0", ["--arms", "mala"])
    assert (one.result, one.log) == (tmp_path / "mala-0" / "result.json", tmp_path / "mala-0.txt")
    assert (one.title, one.arguments) == ("mala, seed 0", ("--arms", "mala"))
    one = cells.Cell.in_files("mala-0", tmp_path, ("--out", "x", "--cell"))
    assert (one.result, one.log) == (tmp_path / "mala-0.json", tmp_path / "mala-0.log")
    assert (one.title, one.arguments) == ("mala-0", ("--out", "x", "--cell", "mala-0"))
    one.result.write_text(json.dumps({"wer": 1}))
    assert cells.results([one, cells.Cell.in_files("mala-1", tmp_path, ())]) == [{"wer": 1}]
