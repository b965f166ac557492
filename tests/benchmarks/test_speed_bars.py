"""A report of speed is judged by its own rows alone."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "speed_bars.py"


def bars() -> Any:
    spec = importlib.util.spec_from_file_location("speed_bars", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["speed_bars"] = module  # which its dataclass asks for
    spec.loader.exec_module(module)
    return module


def pyramid(who: str, way: str, speed: float) -> dict[str, Any]:
    return {"what": "pyramid", "who": who, "way": way, "images_per_s": speed}


def test_backbone_and_pyramid_are_compared_with_the_released_ones_way_by_way() -> None:
    rows = [pyramid("twin_tiny", "compiled", 100.0), pyramid("mavit_tiny", "compiled", 140.0)]
    rows += [pyramid("twin_tiny", "eager", 100.0), pyramid("mavit_tiny", "eager", 90.0)]
    compiled, eager, small = bars().verdicts({"rows": rows})
    assert str(compiled).startswith("met")
    assert str(eager).startswith("missed by 31 %")
    assert small.met is None
