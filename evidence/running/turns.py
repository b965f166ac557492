"""Trainings one after the other in the process that is told of them, with as many steps as there is time for.

A process takes long to begin, so that one that does all its trainings itself is sooner done; when the GPU is lost, it
ends, and the same command goes on. How many steps the arms of a kind have can be decided first: every arm takes some,
beside whatever else uses the GPU, and all get as many as fit into the kind's share of the time. What was decided stands
in a file, for later calls too.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch

from running.cells import Cell, tidy
from running.files import keep, write

MARGIN = 0.85  # of the time, as something always takes longer
BESIDE = 3.0  # seconds of a training beside its steps
FEWEST = 2  # steps, whatever the time
DECIDED = "steps.json"


@dataclass(frozen=True)
class Doing:
    """How trainings of an experiment are done.

    Attributes:
        cells: Those of a kind, an arm and a seed, with so many steps.
        pace: Measures seconds of a step of a kind and arm.
        do: Does the cell of some arguments.
        told: A line about a cell that is done.
    """

    cells: Callable[[str, str, int, int], Sequence[Cell]]
    pace: Callable[[str, str], float]
    do: Callable[[Sequence[str]], None]
    told: Callable[[Cell], str]


@dataclass(frozen=True)
class Turns:
    """What there is to do, and in which time.

    Attributes:
        folder: Where the decision is kept.
        kinds: In their order.
        arms: Likewise.
        seeds: Likewise; the first of all kinds and arms comes before the second of any.
        most: Steps that each kind has at most.
        shares: Of the time for steps, by kind.
        fit: How many seeds are to end in time; 0 has all take the most steps.
        least: Steps that every training has at least, and fewer seeds end in time, as long as the first does.
        until: When all should be done, by `time.monotonic`. No cell is begun that would end later.
    """

    folder: Path
    kinds: Sequence[str]
    arms: Sequence[str]
    seeds: Sequence[int]
    most: Mapping[str, int]
    shares: Mapping[str, float]
    fit: int
    least: int
    until: float


def add_options(parser: argparse.ArgumentParser, minutes: float) -> None:
    """Have a parser take which seeds there are, how long they may take, and what is changed in all trainings.

    Args:
        parser: Of the script.
        minutes: How long, unless told otherwise.
    """
    parser.add_argument("--seeds", default="0,1,2", help="which, with commas")
    parser.add_argument("--minutes", default=minutes, type=float, help="stop after so many; the same command goes on")
    parser.add_argument("--fit", default=0, type=int, metavar="N", help="take as many steps as let N seeds end in time")
    parser.add_argument("--least", default=50, type=int, metavar="N", help="steps that are given if one seed can end")
    parser.add_argument("--shared", action="store_true", help="say that other programs use the machine: no times")
    parser.add_argument("--set", action="append", help="a field of recipe or settings: field=value; may be given again")


def take_turns(turns: Turns, doing: Doing) -> list[Cell]:
    """Do all cells that are not done, and tell of each; give those that are left."""
    left, took, began = list[Cell](), dict[tuple[str, str], float](), time.monotonic()
    steps = steps_of_kinds(turns, doing)
    for seed, kind, arm in product(turns.seeds, turns.kinds, turns.arms):
        for cell in doing.cells(kind, arm, seed, steps[kind]):
            start = time.monotonic()
            if not cell.is_done and start + took.get((kind, arm), 0.0) < turns.until:
                said = attempted(cell, doing)
                took[kind, arm] = time.monotonic() - start
                print(f"{time.monotonic() - began:.0f} s: {cell.title}: {said}", flush=True)
            if not cell.is_done:
                left.append(cell)
    return left


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


def steps_of_kinds(turns: Turns, doing: Doing) -> dict[str, int]:
    """Steps of all trainings of each kind, decided once."""
    file = turns.folder / DECIDED
    decided: dict[str, int] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    ahead = [kind for kind in turns.kinds if kind not in decided]
    if turns.fit and ahead and time.monotonic() < turns.until:
        counts = {(kind, arm): len(doing.cells(kind, arm, 0, turns.least)) for kind, arm in product(ahead, turns.arms)}
        paces = {name: measured(doing, *name) for name, count in counts.items() if count}
        whole, beside = MARGIN * (turns.until - time.monotonic()), BESIDE * sum(counts.values())
        for kind in ahead:
            mine = {arm: pace for (one, arm), pace in paces.items() if one == kind}
            a_step = sum(counts[kind, arm] * pace for arm, pace in mine.items() if math.isfinite(pace))
            share = turns.shares[kind] / sum(turns.shares[one] for one in ahead)
            seconds, alone = (share * (whole / seeds - beside) for seeds in (turns.fit, 1))
            decided[kind] = fitting(seconds, alone, a_step, turns.least, turns.most[kind])
            told = ", ".join(f"{arm} {1000 * pace:.1f}" for arm, pace in mine.items())
            print(f"{kind}: {decided[kind]:,} steps; ms a step: {told}", flush=True)
        keep(file, decided)
    return {**turns.most, **decided}


def fitting(seconds: float, alone: float, a_step: float, least: int, most: int) -> int:
    """Steps that fit into so many seconds; no fewer than `least`, if these fit into those of one seed alone.

    Examples:
        >>> fitting(60.0, 180.0, 0.25, 50, 1_000), fitting(60.0, 180.0, 0.25, 50, 100)
        (240, 100)
        >>> fitting(60.0, 180.0, 0.25, 500, 1_000), fitting(60.0, 180.0, 0.25, 900, 1_000)
        (500, 720)
    """
    if not a_step:
        return most
    some, one = (max(FEWEST, math.floor(time / a_step)) for time in (seconds, alone))
    return min(most, max(some, min(least, one)))


def measured(doing: Doing, kind: str, arm: str) -> float:
    """Seconds of a step; infinite for what fails, as its training will, and say so."""
    try:
        return doing.pace(kind, arm)
    except Exception:  # an arm without a pace does not hold the others up
        traceback.print_exc()
        return math.inf
    finally:
        tidy()
