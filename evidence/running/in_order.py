"""Trainings one after the other in the process that is told of them, with as many steps as all have time for.

How many that are is decided once, from how fast every arm is beside whatever else uses the GPU. Arms at the end of the
list are left out rather than have all learn next to nothing.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from running.cells import Cell, tidy
from running.files import keep
from running.turns import MARGIN, Doing, attempted, measured

FEWEST = 2  # steps, so that there is something to tell


@dataclass(frozen=True)
class Plan:
    """What is done.

    Attributes:
        steps: Of every training.
        arms: That there is time for, in their order.
    """

    steps: int
    arms: Sequence[str]


@dataclass(frozen=True)
class Room:
    """The time that there is.

    Attributes:
        until: When all should be done, in seconds since 1970.
        beside: Seconds that a training takes beside its steps.
        least: Steps that all should have; arms at the end are left out for it, but never the first two.
    """

    until: float
    beside: float
    least: int

    def plan(self, paces: Mapping[str, float], now: float) -> Plan:
        """As many steps as the first arms can have, the same for all of them.

        Args:
            paces: Seconds of a step of every arm, in their order; infinite for what cannot be trained.
            now: In seconds since 1970.

        Examples:
            >>> room = Room(until=100.0, beside=5.0, least=500)
            >>> room.plan({"a": 0.02, "b": 0.03, "c": 0.1}, now=0.0)
            Plan(steps=1500, arms=['a', 'b'])
        """
        arms = list(paces)
        while len(arms) > 2 and self._steps([paces[arm] for arm in arms], now) < self.least:
            arms.pop()
        return Plan(self._steps([paces[arm] for arm in arms], now), arms)

    def _steps(self, paces: Sequence[float], now: float) -> int:
        known = [pace for pace in paces if math.isfinite(pace)]
        left = MARGIN * (self.until - now) - self.beside * len(known)
        return max(FEWEST, math.floor(left / sum(known))) if known else FEWEST


def planned(folder: Path, kind: str, arms: Sequence[str], doing: Doing, room: Room) -> Plan:
    """What an earlier call decided, or what is decided now and kept in a file.

    Args:
        folder: Where it is kept.
        kind: That all are of.
        arms: All, in their order.
        doing: How they are timed.
        room: The time that there is.
    """
    file = folder / "plan.json"
    if not file.is_file():
        paces = {arm: measured(doing, kind, arm) for arm in arms}
        keep(file, {**asdict(room.plan(paces, time.time())), "step_ms": {arm: 1e3 * paces[arm] for arm in arms}})
        told = ", ".join(f"{arm} {1e3 * paces[arm]:.1f}" for arm in arms)
        print(f"ms a step: {told}; {room.until - time.time():.0f} s are left", flush=True)
    found = json.loads(file.read_text(encoding="utf-8"))
    plan = Plan(found["steps"], found["arms"])
    print(f"{plan.steps} steps of {', '.join(plan.arms)}", flush=True)
    return plan


def do_in_order(cells: Sequence[Cell], doing: Doing, until: float) -> list[Cell]:
    """Do what is not done, and tell of each; give what is left. What fails does not keep the others from their turn.

    Args:
        cells: In their order.
        doing: How. If a cell ends without a result, the time was over.
        until: When all should be done, in seconds since 1970. What would take longer, if it took as long as the
            shortest that was done, is not begun: a GPU that is paid for is handed back.
    """
    began, took = time.time(), list[float]()
    for one in cells:
        now = time.time()
        if not one.is_done and now < until and now + min(took, default=0.0) <= until:
            said = attempted(one, doing)
            tidy()
            took += [time.time() - now] if one.is_done else []
            print(f"{time.time() - began:.0f} s: {one.title}: {said}", flush=True)
    return [one for one in cells if not one.is_done]
