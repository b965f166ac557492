"""How many steps trainings can have: as many as end in time, by what a step of each takes beside whatever else runs.

Several processes find that out together (`begin`, `agreed`): each measures what nobody measures yet, all at the same
time, as trainings will be later, and one of them decides. A process that does all its trainings itself decides alone:
how many steps each kind has (`decided`), or how many the first arms have, those at the end being left out rather than
have all learn next to nothing (`planned`). What was decided stands in a file, for every later call too.
"""

from __future__ import annotations

import json
import math
import shutil
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from running.cells import tidy
from running.files import keep

MARGIN = 0.85  # of the time, as something always takes longer
FEWEST = 2  # steps, whatever the time, so that there is something to tell
PATIENCE = 90.0  # seconds for what others measure
BETWEEN = 0.2
PLAN, STEPS = "plan.json", "steps.json"

Measure = Callable[[str], float]  # seconds of a step of what has this name


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
            >>> pacing = Pacing({"text a": 2, "text b": 1}, {"text": 1.0}, until=40.0, crowd=2, beside=3.0)
            >>> pacing.steps({"text a": 0.1, "text b": 0.37}, now=0.0)
            {'text': 103}
        """
        seconds, whole = MARGIN * self.crowd * max(0.0, self.until - now), sum(self.shares.values())
        found: dict[str, int] = {}
        for kind, share in self.shares.items():
            mine = {name: count for name, count in self.trainings.items() if kind_of(name) == kind and name in rates}
            left = seconds * share / whole - self.beside * sum(mine.values())
            a_step = sum(rates[name] * count for name, count in mine.items())
            found[kind] = max(FEWEST, math.floor(left / a_step)) if a_step else FEWEST
        return found


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
    """The time that there is for one seed of all arms.

    Attributes:
        until: When all should be done, in seconds since 1970.
        beside: Seconds that a training takes beside its steps.
        least: Steps that all should have; arms at the end are left out for it, but never the first two.
    """

    until: float
    beside: float
    least: int

    def plan(self, rates: Mapping[str, float], now: float) -> Plan:
        """As many steps as the first arms can have, the same for all of them.

        Args:
            rates: Seconds of a step of every arm, in their order; infinite for what cannot be trained.
            now: In seconds since 1970.

        Examples:
            >>> room = Room(until=100.0, beside=5.0, least=500)
            >>> room.plan({"a": 0.02, "b": 0.03, "c": 0.1}, now=0.0)
            Plan(steps=1500, arms=['a', 'b'])
        """
        arms = list(rates)
        while len(arms) > 2 and self._steps(arms, rates, now) < self.least:
            arms.pop()
        return Plan(self._steps(arms, rates, now), arms)

    def _steps(self, arms: Sequence[str], rates: Mapping[str, float], now: float) -> int:
        known = {f"any {arm}": rates[arm] for arm in arms if math.isfinite(rates[arm])}
        return Pacing(dict.fromkeys(known, 1), {"any": 1.0}, self.until, 1, self.beside).steps(known, now)["any"]


def kind_of(name: str) -> str:
    """The kind of "KIND ARM"."""
    return name.split()[0]


def planned(folder: Path, arms: Sequence[str], room: Room, measure: Measure) -> Plan:
    """Steps, and the arms that have them, decided by this process.

    Args:
        folder: Where the decision is kept.
        arms: All, in their order.
        room: The time that there is.
        measure: See there; of an arm.
    """
    file = folder / PLAN
    if not file.is_file():
        rates = {arm: _measured(measure, arm) for arm in arms}
        keep(file, {**asdict(room.plan(rates, time.time())), "step_ms": {arm: 1e3 * rates[arm] for arm in arms}})
        print(f"{_told(rates)}; {room.until - time.time():.0f} s are left", flush=True)
    found = _read(file)
    print(f"{found['steps']} steps of {', '.join(found['arms'])}", flush=True)
    return Plan(found["steps"], found["arms"])


def decided(
    folder: Path, pacing: Pacing, seeds: int, least: int, most: Mapping[str, int], measure: Measure
) -> dict[str, int]:
    """Steps of kinds, decided by this process; a kind of which nothing can be measured has none.

    Args:
        folder: Where the decision is kept.
        pacing: One seed of all.
        seeds: How many are to end in time; with none nothing is decided that was not before.
        least: Steps that every training has at least, and fewer seeds end in time, as long as the first does.
        most: Steps that each kind has at most.
        measure: See there; of a kind and arm.
    """
    file = folder / STEPS
    found: dict[str, int] = _read(file) if file.is_file() else {}
    ahead = {kind: share for kind, share in pacing.shares.items() if kind not in found}
    if seeds and ahead and time.time() < pacing.until:
        rates = {name: _measured(measure, name) for name in pacing.trainings if kind_of(name) in ahead}
        known = _finite(rates)
        one, every = (_of_seeds(pacing, ahead, count).steps(known, time.time()) for count in (1, seeds))
        for kind in dict.fromkeys(map(kind_of, known)):
            found[kind] = min(most[kind], max(every[kind], min(least, one[kind])))
            mine = {name.removeprefix(f"{kind} "): rate for name, rate in rates.items() if kind_of(name) == kind}
            print(f"{kind}: {found[kind]:,} steps; {_told(mine)}", flush=True)
        keep(file, found)
    return found


def _of_seeds(pacing: Pacing, shares: Mapping[str, float], seeds: int) -> Pacing:
    """So many times the trainings of one seed, of kinds that share all of the time."""
    return replace(pacing, trainings={name: seeds * each for name, each in pacing.trainings.items()}, shares=shares)


def begin(folder: Path, pacing: Pacing) -> None:
    """Put what is to be done where processes look for it, unless an earlier call decided already."""
    if not (folder / STEPS).is_file():
        shutil.rmtree(folder, ignore_errors=True)  # measured by a call that was stopped
        keep(folder / PLAN, pacing)


def agreed(folder: Path, measure: Measure, patience: float = PATIENCE) -> dict[str, int]:
    """Steps of each kind, decided by whichever process.

    Args:
        folder: Where `begin` put the plan.
        measure: See there; of a kind and arm.
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
            keep(folder / STEPS, pacing.steps(_finite(rates), time.time()))
        elif time.monotonic() > until + patience:
            raise RuntimeError(f"nobody decided how many steps there are; remove {folder} and begin again")
        else:
            time.sleep(BETWEEN)


def _is_mine(claim: Path) -> bool:
    """Whether this process is the first to ask."""
    with suppress(FileExistsError), claim.open("x"):
        return True
    return False


def _measured(measure: Measure, name: str) -> float:
    """Seconds; infinite for what fails, which its training will do as well and say so."""
    try:
        return measure(name)
    except Exception:
        traceback.print_exc()
        return math.inf
    finally:
        tidy()


def _finite(rates: Mapping[str, float]) -> dict[str, float]:
    return {name: rate for name, rate in rates.items() if math.isfinite(rate)}


def _told(rates: Mapping[str, float]) -> str:
    return "ms a step: " + ", ".join(f"{name} {1e3 * rate:.1f}" for name, rate in rates.items())


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
