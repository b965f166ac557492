"""The bars of speed, and what a report of `speed.py` says of each: met, missed by how much, or not measured.

    python benchmarks/speed_bars.py speed.json

A network's figure is the median of its turns. Ratios are of rows of the same report alone.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORWARD, TRAINING = "forward", "forward + backward"
STAGES = ((56, 64), (28, 128), (14, 256), (7, 512))
SHAPES = ("128,1,3136,64", "4,16,16384,128", "2,16,65536,96")
CAUSAL = ("8,16,4096,64", "8,16,4096,128", "4,16,16384,128")
Row = dict[str, Any]


@dataclass(frozen=True)
class Verdict:
    """A bar and what became of it.

    Attributes:
        bar: What was to be reached, in words.
        wanted: The number.
        reached: What was measured; None where nothing was.
        least: Whether the number is a least, not a most.
    """

    bar: str
    wanted: float
    reached: float | None
    least: bool

    @property
    def met(self) -> bool | None:
        """Whether it was reached; None where nothing was measured."""
        if self.reached is None:
            return None
        return self.reached >= self.wanted if self.least else self.reached <= self.wanted

    def __str__(self) -> str:
        asked = f"{'>=' if self.least else '<='} {self.wanted:g}"
        if self.reached is None:
            return f"not measured  {self.bar} {asked}"
        off = abs(self.reached / self.wanted - 1)
        word = "met" if self.met else f"missed by {100 * off:.0f} %"
        return f"{word:13} {self.bar} {asked}: {self.reached:.3g}"


def verdicts(report: dict[str, Any]) -> list[Verdict]:
    """Every bar, in the order of the list."""
    rows: list[Row] = report["rows"]
    pyramids = list(_pyramids(rows)) if any(row.get("what") == "pyramid" for row in rows) else []
    if pyramids and all(row.get("what") == "pyramid" for row in rows):  # a report of detectors alone
        return pyramids
    return [*pyramids, *_networks(rows), *_passes(rows), *_widths(rows), *_causal(rows), *_calls(rows)]


def _find(rows: list[Row], number: str, **wanted: Any) -> float | None:
    """The median of one number over the rows that have all that is wanted."""
    found = [row[number] for row in rows if number in row and all(row.get(k) == v for k, v in wanted.items())]
    return statistics.median(found) if found else None


def _over(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else first / second


def _networks(rows: list[Row]) -> Iterator[Verdict]:
    def ratio(one: str, other: str, direction: str, way: str, batch: int) -> float | None:
        wanted = {"what": "network", "direction": direction, "way": way, "batch": batch}
        return _over(*(_find(rows, "images_per_s", who=who, **wanted) for who in (one, other)))

    for way, bars in (("compiled", (1.3, 1.3)), ("graphed", (1.8, 1.6))):
        for direction, bar in zip(("inference", "training"), bars, strict=True):
            reached = ratio("mavit_tiny", "twin_tiny", direction, way, 128)
            yield Verdict(f"mavit_tiny over released, {way}, {direction}", bar, reached, True)
    given = "inference", "graphed", 64
    yield Verdict("mavit_base over released, graphed", 1.5, ratio("mavit_base", "twin_base", *given), True)
    yield Verdict(
        "nalaformer_base over mavit_base, graphed", 0.85, ratio("nalaformer_base", "mavit_base", *given), True
    )


def _pyramids(rows: list[Row]) -> Iterator[Verdict]:
    for size in ("tiny", "small"):
        for way in ("compiled", "eager"):
            wanted = {"what": "pyramid", "way": way}
            speeds = (_find(rows, "images_per_s", who=f"{who}_{size}", **wanted) for who in ("mavit", "twin"))
            if way == "compiled" or any(row.get("way") == way and row.get("who") == f"twin_{size}" for row in rows):
                yield Verdict(f"backbone and pyramid, mavit_{size} over released, {way}", 1.3, _over(*speeds), True)


def _passes(rows: list[Row]) -> Iterator[Verdict]:
    for side in (3, 5):
        for size, channels in STAGES:
            for direction in (FORWARD, TRAINING):
                wanted = {"what": f"depthwise {side}x{side}", "shape": f"128,{size},{size},{channels}"}
                times = (_find(rows, "ms", who=who, direction=direction, **wanted) for who in ("cudnn", "ours"))
                bar = f"cuDNN over depthwise {side} x {side}, {wanted['shape']}, {direction}"
                yield Verdict(bar, 1.5, _over(*times), True)


def _widths(rows: list[Row]) -> Iterator[Verdict]:
    copy = _find(rows, "gb_per_s", what="copy")
    for shape, bars in zip(SHAPES[1:], ((75, 60), (70, 55)), strict=True):
        for direction, bar in zip((FORWARD, TRAINING), bars, strict=True):
            wanted = {"what": "widths", "who": "mala", "shape": shape, "direction": direction}
            speed = _over(_find(rows, "gb", **wanted), _find(rows, "ms", **wanted))
            share = None if speed is None or copy is None else 1e5 * speed / copy
            yield Verdict(f"percent of copy, {shape}, {direction}", bar, share, True)
    for who, bars in (("rotary", (1.25, 1.35, 1.35)), ("nala", (1.5, 2.0, 2.0))):
        for shape, bar in zip(SHAPES, bars, strict=True):
            for direction in (FORWARD, TRAINING):
                wanted = {"what": "widths", "shape": shape, "direction": direction}
                times = (_find(rows, "ms", who=one, **wanted) for one in (who, "mala"))
                yield Verdict(f"{who} over mala, {shape}, {direction}", bar, _over(*times), False)


def _causal(rows: list[Row]) -> Iterator[Verdict]:
    for shape in CAUSAL:
        for direction in (FORWARD, TRAINING):
            wanted = {"what": "causal", "shape": shape, "direction": direction}
            times = (_find(rows, "ms", who=who, **wanted) for who in ("mala", "fla"))
            yield Verdict(f"causal mala over fla, {shape}, {direction}", 1.0, _over(*times), False)


def _calls(rows: list[Row]) -> Iterator[Verdict]:
    for direction, bar in ((FORWARD, 1.25), (TRAINING, 1.5)):
        times = (_find(rows, "ms", what="calls", who=who, direction=direction) for who in ("mala", "sdpa"))
        yield Verdict(f"plain call over SDPA's, 128,3,196,64, {direction}", bar, _over(*times), False)


if __name__ == "__main__":
    print(*verdicts(json.loads(Path(sys.argv[1]).read_text())), sep="\n")
