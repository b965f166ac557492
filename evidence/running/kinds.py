"""Experiments whose cells are a kind of data, an arm and a seed: their turns, steps of a kind, and what came out."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from affinear.train import Run
from running.briefly import Brief, WorkOf, train_briefly
from running.cells import Cell
from running.files import keep
from running.in_order import Doing, do_in_order
from running.machine import machine
from running.pacing import Pacing, decided

BESIDE = 3.0  # seconds of a training beside its steps
PROBED, BUILDING = 120, 24  # steps of a probe, and those of them that build kernels and a graph
PACED = (14, 20)  # steps by which it is decided how many there are: some that build kernels and a graph, and timed ones


@dataclass(frozen=True)
class Turns:
    """What there is to do in this process, and in which time.

    Attributes:
        folder: Where it is kept how many steps were decided on.
        kinds: In their order.
        arms: Likewise.
        seeds: Likewise; the first of all kinds and arms comes before the second of any.
        most: Steps that each kind has at most.
        shares: Of the time for steps, by kind.
        fit: How many seeds are to end in time; 0 has all take the most steps.
        least: Steps that every training has at least, and fewer seeds end in time, as long as the first does.
        until: When all should be done, in seconds since 1970.
        cells: Those of a kind, an arm and a seed, with so many steps.
        pace: Measures seconds of a step of a kind and arm.
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
    cells: Callable[[str, str, int, int], Sequence[Cell]]
    pace: Callable[[str, str], float]

    def steps(self) -> dict[str, int]:
        """Of all trainings of each kind."""
        counts = {pair: len(self.cells(*pair, 0, self.least)) for pair in product(self.kinds, self.arms)}
        trainings = {f"{kind} {arm}": count for (kind, arm), count in counts.items() if count}
        one_seed = Pacing(trainings, {kind: self.shares[kind] for kind in self.kinds}, self.until, 1, BESIDE)

        def pace(name: str) -> float:
            return self.pace(*name.split(maxsplit=1))

        return {**self.most, **decided(self.folder, one_seed, self.fit, self.least, self.most, pace)}


def take_turns(turns: Turns, doing: Doing) -> list[Cell]:
    """Do all cells that are not done, and tell of each; give those that are left."""
    steps = turns.steps()
    cells = {
        cell: (kind, arm)
        for seed, kind, arm in product(turns.seeds, turns.kinds, turns.arms)
        for cell in turns.cells(kind, arm, seed, steps[kind])
    }
    return do_in_order(list(cells), doing, turns.until, cells.__getitem__)


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


def steps_of(told: Sequence[str] | None, usual: Mapping[str, int]) -> dict[str, int]:
    """Steps of every kind: the usual ones, but for what is told as "KIND=N".

    Raises:
        ValueError: If it is told otherwise.

    Examples:
        >>> steps_of(["text=900"], {"image": 2000, "text": 1000})
        {'image': 2000, 'text': 900}
    """
    found = dict(usual)
    for one in told or ():
        kind, _, number = one.partition("=")
        if kind not in usual or not number.isdecimal() or int(number) < 2:
            raise ValueError(f"--steps: expected KIND=N, at least 2 steps for one of {', '.join(usual)}, got {one!r}")
        found[kind] = int(number)
    return found


def came_to(brief: Brief) -> dict[str, Any]:
    """What a training came to, for its cell's file."""
    return {
        "score": dict(brief.score.numbers),
        "losses": brief.pace.losses,
        "stretch": brief.stretch,
        "parameters": brief.parameters,
        "ms_per_step": 1000 * brief.pace.step_seconds,
        "no_graph": brief.pace.why,
        "peak_memory": brief.pace.peak,
        "recipe": brief.recipe,
        "settings": brief.settings,
    }


def found_in(folder: Path, kinds: Sequence[str], arms: Sequence[str]) -> list[dict[str, Any]]:
    """What all cells of a folder came to, whichever calls they were done by, in the order of kinds, arms and seeds."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*/*/result.json")]

    def place(one: Mapping[str, Any]) -> tuple[int, ...]:
        return kinds.index(one["kind"]), arms.index(one["arm"]), one.get("width", 0), one["seed"]

    return sorted(found, key=place)


@dataclass(frozen=True)
class Trial:
    """A training whose steps are to be timed.

    Attributes:
        kind: Of data.
        arm: Of the experiment.
        run: With `PROBED` steps.
        data: Open.
        steps: That all its trainings have together.
    """

    kind: str
    arm: str
    run: Run
    data: Any
    steps: int


def probe(trials: Iterable[Trial], path: Path, work_of: WorkOf | None = None) -> None:
    """Time a step of each, alone, say whether it is one CUDA graph, and how long the whole would take."""
    rows: list[dict[str, Any]] = []
    seconds = 0.0
    for one in trials:
        rows.append(timed(one, work_of))
        seconds += one.steps * rows[-1]["ms"] / 1000
        print("{kind}, {arm}: {ms:.2f} ms a step, {gigabytes:.2f} GiB, {said}".format(**rows[-1]), flush=True)
        keep(path, {"machine": machine(), "rows": rows})
    print(f"All steps, one after the other: {seconds:.0f} s", flush=True)


def timed(one: Trial, work_of: WorkOf | None = None) -> dict[str, Any]:
    """A step by the clock, from the stretch on that has the graph, with a look at the loss after every stretch."""
    began, marks = time.perf_counter(), list[float]()
    brief = train_briefly(one.run, one.data, work_of, lambda _: marks.append(time.perf_counter()))
    built = BUILDING // brief.stretch
    seconds = (marks[-1] - marks[built - 1]) / (brief.pace.steps - built * brief.stretch)
    first, last = brief.pace.losses[0], brief.pace.losses[-1]
    graph = "a graph" if not brief.pace.why else f"no graph ({brief.pace.why})"
    return {
        "kind": one.kind,
        "arm": one.arm,
        "ms": 1000 * seconds,
        "gigabytes": brief.pace.peak / 2**30,
        "parameters": brief.parameters,
        "no_graph": brief.pace.why,
        "said": f"{graph}, loss {first:.3f} to {last:.3f}, {time.perf_counter() - began:.1f} s in all",
    }
