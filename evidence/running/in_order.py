"""Trainings one after the other in the process that is told of them.

A process takes long to begin, so that one that does all its trainings itself is sooner done; when the GPU is lost, it
ends, and the same command goes on.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch

from running.cells import Cell, tidy
from running.files import write


@dataclass(frozen=True)
class Doing:
    """How trainings of an experiment are done.

    Attributes:
        do: Does the cell of some arguments. If it ends without a result, the time was over.
        told: A line about a cell that is done, or ended so.
    """

    do: Callable[[Sequence[str]], None]
    told: Callable[[Cell], str]


def do_in_order(
    cells: Sequence[Cell], doing: Doing, until: float, alike: Callable[[Cell], Hashable] = lambda _: None
) -> list[Cell]:
    """Do what is not done, and tell of each; give what is left. What fails does not keep the others from their turn.

    Args:
        cells: In their order.
        doing: How.
        until: When all should be done, in seconds since 1970. What would take longer, if it took as long as the
            shortest like it that was done, is not begun: a GPU that is paid for is handed back.
        alike: The same for cells that take about as long as each other; all do, if left out.
    """
    began, took = time.time(), dict[Hashable, float]()
    for one in cells:
        now, like = time.time(), alike(one)
        if not one.is_done and now < until and now + took.get(like, 0.0) <= until:
            said = attempted(one, doing)
            tidy()
            if one.is_done:
                took[like] = min(took.get(like, float("inf")), time.time() - now)
            print(f"{time.time() - began:.0f} s: {one.title}: {said}", flush=True)
    return [one for one in cells if not one.is_done]


def attempted(cell: Cell, doing: Doing) -> str:
    """Do a cell, and say what came of it.

    Raises:
        RuntimeError: If the GPU is of no use to this process any more.
    """
    cell.failure.unlink(missing_ok=True)
    try:
        doing.do(cell.arguments)
        return doing.told(cell)
    except Exception as error:  # the others may still be trained
        traceback.print_exc()
        said = f"{type(error).__name__}: {error}"
        write(cell.failure, said + "\n")
    tidy()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return f"FAILED, {said[:300]}"
