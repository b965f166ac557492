"""Options that experiments share say what they say, and what is not known is refused in a sentence."""

from __future__ import annotations

import argparse
import doctest
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def options(script: Any) -> Any:
    return script("running.options")


def test_examples_hold(options: Any):
    found = doctest.testmod(options)
    assert found.attempted > 0
    assert found.failed == 0


def test_what_is_given_says_how_cells_are_worked_off(options: Any):
    parser = argparse.ArgumentParser()
    options.add_options(parser, parallel=6, workers=1, minutes=20)
    given = parser.parse_args([])
    assert (given.seeds, given.workers, given.set) == ("0,1,2", 1, None)
    how = options.how_of(given, Path("outputs"))
    assert (how.parallel, how.minutes, how.stop, how.fresh, how.threads, how.mps) == (6, 20, True, False, 1, None)
    given = parser.parse_args(["--parallel", "2", "--minutes", "0.5", "--mps"])
    how = options.how_of(given, Path("outputs"), stop=False, fresh=True, threads=2)
    assert (how.parallel, how.minutes, how.stop, how.fresh, how.threads) == (2, 0.5, False, True, 2)
    assert how.mps == Path("outputs/mps")


def test_an_arm_that_is_not_known_is_refused_without_a_traceback(options: Any):
    def main() -> int:
        return len(options.arms_of("mala,nobody", ["mala"], ["mala", "none"]))

    with pytest.raises(ValueError, match=r"^--arms: expected some of mala, none, got 'nobody'$"):
        main()
    with pytest.raises(SystemExit, match=r"^--arms: expected some of mala, none, got 'nobody'\.$"):
        options.without_traceback(main)
    assert options.without_traceback(lambda: 1) == 1
