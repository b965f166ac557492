"""Fuzz loops: fresh seeds, a limit of time for each, and counts of their own at the end."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fuzzing import Tally, bounded
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
