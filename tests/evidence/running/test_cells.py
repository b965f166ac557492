"""Cells are worked off by few processes, which outlive a cell that is done, and not one that failed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ..conftest import EVIDENCE

PROGRAM = """
import os, sys
from pathlib import Path
sys.path.insert(0, {evidence!r})
from running.cells import keep, serve, work_off

def do(told):
    print("doing", told[0])
    if told[1] == "raises":
        raise ValueError("no luck")
    if told[1] == "dies":
        os._exit(3)
    keep(Path(told[0]) / "result.json", {{"process": os.getpid()}})

if "--serve" in sys.argv:
    raise SystemExit(serve(do))
"""


@pytest.mark.exhaustive
def test_one_process_does_many_cells_and_another_goes_on_after_a_failure(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    module, program = script("running.cells"), tmp_path / "program.py"
    program.write_text(PROGRAM.format(evidence=str(EVIDENCE)))
    names = ("good", "good", "raises", "good", "dies", "good")
    folders = [tmp_path / "cells" / str(number) for number in range(len(names))]
    cells = [module.Cell(f"cell {f.name}", f, (str(f), name)) for f, name in zip(folders, names, strict=True)]
    told: list[str] = []
    module.work_off(str(program), cells, 1, 5, lambda one: told.append(one.title) or "done")
    assert told == ["cell 0", "cell 1", "cell 3", "cell 5"]
    done = [json.loads(one.result.read_text())["process"] for one in cells if one.result.is_file()]
    assert done[0] == done[1]
    assert len(set(done)) == 3
    assert "no luck" in (tmp_path / "cells" / "2.txt").read_text()
    assert capsys.readouterr().out.count("failed") == 2
    again: list[str] = []
    module.work_off(str(program), cells, 1, 0, lambda one: again.append(one.title) or "")
    assert again == []


def test_what_is_done_needs_no_process(script: Any, tmp_path: Path):
    module = script("running.cells")
    one = module.Cell("done", tmp_path / "done", ())
    module.keep(one.result, {"score": 1})
    assert one.read() == {"score": 1}
    module.work_off("/nowhere.py", [one], 4, 1, lambda _: pytest.fail("it is done"))
