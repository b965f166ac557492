"""What pages of arms with seeds have in common: doubts first, tables and bars behind them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pages.words import FIRST

Row = Mapping[str, Any]
Values = Mapping[str, Sequence[float]]  # of every arm, one for each seed
WANTED_SEEDS = 3
NONE = "none"


def doubts(values: Values, arms: Sequence[str], *, lower: bool, unit: str, form: str = ".1f") -> list[str]:
    """What the numbers of all arms cannot tell, a sentence each.

    Args:
        values: What was measured.
        arms: Those that were meant to be.
        lower: Whether less is better.
        unit: Of the numbers.
        form: Of the numbers.
    """
    found: list[str] = []
    missing = [arm for arm in arms if arm not in values]
    if missing:
        found.append(f"Not measured: {', '.join(missing)}.")
    fewest = min(map(len, values.values()))
    if fewest < WANTED_SEEDS:
        found.append(
            f"Some arms have {fewest} seed{'s' if fewest > 1 else ''}: how much another would differ is not known, and "
            "no order of the arms is established."
        )
    best = (min if lower else max)(values, key=lambda arm: statistics.mean(values[arm]))
    same = [arm for arm in values if arm != best and overlap(values[arm], values[best])]
    if same:
        found.append(f"Not told apart from the best arm, {best}, as their seeds overlap: {', '.join(same)}.")
    if NONE in values and best != NONE:
        ahead = abs(statistics.mean(values[best]) - statistics.mean(values[NONE]))
        found.append(
            f"The arm without attention is {ahead:{form}} {unit} behind the best: all that attention adds here."
        )
    elif best == NONE:
        found.append("The arm without attention is the best: this task, so trained, says nothing for any attention.")
    return found


def overlap(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether two sets of seeds overlap; of single seeds nobody knows, so they do."""
    if min(len(one), len(other)) < 2:
        return True
    return min(one) <= max(other) and min(other) <= max(one)


def page(title: str, cannot: Sequence[str], parts: Sequence[str], commands: Sequence[str]) -> str:
    """The whole page."""
    listed = "\n".join(f"- {sentence}" for sentence in cannot)
    made = "\n".join(commands)
    return "\n\n".join([f"# {title}", FIRST, listed, *parts, f"```sh\n{made}\n```"]) + "\n"


def by_arm(cells: Sequence[Row], arms: Sequence[str], value: Callable[[Row], float]) -> dict[str, list[float]]:
    """A number of all cells, by arm, in the order of the arms."""
    found = {arm: [value(cell) for cell in cells if cell["arm"] == arm] for arm in arms}
    return {arm: values for arm, values in found.items() if values}


def steps_of(cells: Sequence[Row]) -> str:
    """How many steps they were trained for."""
    counts = sorted({cell["steps"] for cell in cells})
    return " or ".join(f"{count:,}" for count in counts)


def held(good: bool) -> str:
    """What is said of a bar."""
    return "holds" if good else "does not hold"


def read(path: Path) -> dict[str, Any] | None:
    """What a script wrote; None if it is not there."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
