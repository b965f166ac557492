"""All cells of an experiment, told of after each and at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from running.cells import Cell, How, work_off


def work_off_and_tell(
    script: str, cells: Sequence[Cell], how: How, tell: Callable[[], str], line: Callable[[dict[str, Any]], str]
) -> int:
    """Do all cells that are not done; 1 if something is left to do.

    Args:
        script: The file that serves: see `work_off`.
        cells: All of them.
        how: At what pace, and for how long.
        tell: Writes what came out so far and gives it as tables: called after each cell, and printed at the end.
        line: What came out of one, in a line.
    """

    def told(one: Cell) -> str:
        tell()
        return line(one.read() or {})

    left = work_off(script, cells, how, told)
    print(tell())
    return int(bool(left))
