"""A report of speed is judged by its own rows alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "speed_bars.py"


@pytest.fixture(scope="module")
def bars(module_at: Callable[[Path], Any]) -> Any:
    return module_at(SCRIPT)


def pyramid(who: str, way: str, speed: float) -> dict[str, Any]:
    return {"what": "pyramid", "who": who, "way": way, "images_per_s": speed}


def test_backbone_and_pyramid_are_compared_with_the_released_ones_way_by_way(bars: Any) -> None:
    rows = [pyramid("twin_tiny", "compiled", 100.0), pyramid("mavit_tiny", "compiled", 140.0)]
    rows += [pyramid("twin_tiny", "eager", 100.0), pyramid("mavit_tiny", "eager", 90.0)]
    compiled, eager, small = bars.verdicts({"rows": rows})
    assert str(compiled).startswith("met")
    assert str(eager).startswith("missed by 31 %")
    assert small.met is None
