"""How many steps trainings can have, found out by all processes of an experiment in its beginning.

Each process measures what nobody measures yet, all at the same time, as trainings will be later. When all is measured
one of them decides, and what it decided stands in a file, for every later call too.
"""

from __future__ import annotations

import json
import math
import shutil
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from running.files import keep

MARGIN = 0.9  # of the time, as something always takes longer
PATIENCE = 90.0  # seconds for what others measure
BETWEEN = 0.2
PLAN, STEPS = "plan.json", "steps.json"


@dataclass(frozen=True)
class Pacing:
    """What there is to do, and in which time.

    Attributes:
        trainings: How many there are of each kind and arm, "KIND ARM", what takes longest first.
        shares: Of the time, by kind.
        until: When all should be done, in seconds since 1970.
        crowd: Processes that train.
        beside: Seconds that a training takes beside its steps.
    """

    trainings: Mapping[str, int]
    shares: Mapping[str, float]
    until: float
    crowd: int
    beside: float

    def steps(self, rates: Mapping[str, float], now: float) -> dict[str, int]:
        """As many for each kind as its share of the time allows, the same for all of its arms.

        Args:
            rates: Seconds of a step, by kind and arm; what has none is counted as nothing.
            now: In seconds since 1970.

        Examples:
            >>> pacing = Pacing({"text a": 2, "text b": 1}, {"text": 1.0}, until=35.0, crowd=2, beside=2.0)
            >>> pacing.steps({"text a": 0.1, "text b": 0.37}, now=0.0)
            {'text': 100}
        """
        seconds, whole = MARGIN * self.crowd * max(0.0, self.until - now), sum(self.shares.values())
        found: dict[str, int] = {}
        for kind, share in self.shares.items():
            mine = {name: count for name, count in self.trainings.items() if name.split()[0] == kind and name in rates}
            left = seconds * share / whole - self.beside * sum(mine.values())
            a_step = sum(rates[name] * count for name, count in mine.items())
            found[kind] = max(2, math.floor(left / a_step)) if a_step else 2
        return found


def begin(folder: Path, pacing: Pacing) -> None:
    """Put what is to be done where processes look for it, unless an earlier call decided already."""
    if not (folder / STEPS).is_file():
        shutil.rmtree(folder, ignore_errors=True)  # measured by a call that was stopped
        keep(folder / PLAN, pacing)


def agreed(folder: Path, measure: Callable[[str], float], patience: float = PATIENCE) -> dict[str, int]:
    """Steps of each kind, decided by whichever process.

    Args:
        folder: Where `begin` put the plan.
        measure: Seconds of a step of a kind and arm.
        patience: How long to wait for what others measure.

    Raises:
        RuntimeError: If nobody decides.
    """
    decision = folder / STEPS
    if not decision.is_file():
        pacing = Pacing(**json.loads((folder / PLAN).read_text(encoding="utf-8")))
        for name in pacing.trainings:
            if _is_mine(folder / f"{name}.claim"):
                keep(folder / f"{name}.rate", _measured(measure, name))
        _decide(folder, pacing, patience)
    return _read(decision)


def _decide(folder: Path, pacing: Pacing, patience: float) -> None:
    """Wait until there is a decision, or everything to make it of."""
    until = time.monotonic() + patience
    while not (folder / STEPS).is_file():
        files = {name: folder / f"{name}.rate" for name in pacing.trainings}
        late = time.monotonic() > until
        if (late or all(file.is_file() for file in files.values())) and _is_mine(folder / "decision.claim"):
            rates = {name: float(_read(file)) for name, file in files.items() if file.is_file()}
            known = {name: rate for name, rate in rates.items() if math.isfinite(rate)}
            keep(folder / STEPS, pacing.steps(known, time.time()))
        elif time.monotonic() > until + patience:
            raise RuntimeError(f"nobody decided how many steps there are; remove {folder} and begin again")
        else:
            time.sleep(BETWEEN)


def _is_mine(claim: Path) -> bool:
    """Whether this process is the first to ask."""
    with suppress(FileExistsError), claim.open("x"):
        return True
    return False


def _measured(measure: Callable[[str], float], name: str) -> float:
    """Seconds; infinite for what fails, which its training will do as well and say so."""
    try:
        return measure(name)
    except Exception:
        traceback.print_exc()
        return math.inf


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
