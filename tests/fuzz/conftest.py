"""Fuzz loops: fresh seeds, a limit of time for each, and counts of their own at the end."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fuzzing import NAMES, Tally, bounded
from guarded import Guard


@pytest.fixture(scope="session")
def guard() -> Guard:
    """One for the process, as nobody can take it off again."""
    return Guard()


@pytest.fixture
def draw(seed: int) -> random.Random:
    """All that is random about a loop."""
    return random.Random(seed)


@pytest.fixture
def tally(guard: Guard, request: pytest.FixtureRequest) -> Iterator[Tally]:
    """Counts the tries of a loop within its bounds of memory, and tells them to the summary of the whole run."""
    counted = Tally(guard)
    with bounded():
        yield counted
    request.node.user_properties.append(("fuzz", counted.counts()))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the counts, of all loops and each; also where several processes ran them."""
    reports = [report for found in terminalreporter.stats.values() for report in found if hasattr(report, "when")]
    told = {r.nodeid: value for r in reports for name, value in getattr(r, "user_properties", ()) if name == "fuzz"}
    if not told:
        return
    terminalreporter.section("fuzz")
    for loop, counts in sorted(told.items()):
        terminalreporter.write_line(f"{loop.rpartition('::')[2]}: {_line(counts)}")
    terminalreporter.write_line(f"all: {_line([sum(column) for column in zip(*told.values(), strict=True)])}")


def _line(counts: Any) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in zip(NAMES, counts, strict=True))
