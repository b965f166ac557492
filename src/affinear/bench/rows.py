"""What was measured: one row per contender and direction, all of them in a report that goes to JSON and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from affinear.bench.cases import Shape
from affinear.bench.timing import Times

FORMAT = 2

OK, WRONG, FAILED = "ok", "wrong", "failed"


@dataclass(frozen=True)
class Row:
    """One contender in one direction over one case.

    Attributes:
        table: The table it belongs to.
        contender: Who.
        direction: What: forward, forward + backward, one token, host time, first call.
        shape: Of query, key and value.
        dtype: Of query, key and value.
        mechanism: What was computed.
        causal: Whether query i sees keys 0 to i only.
        rotary: Whether tokens had rotary positions.
        status: "ok", "wrong" or "failed"; only the first comes with times.
        reason: Why not, in a word or two.
        detail: Why not, in the words of the exception; or what else there is to say.
        error: Relative error against float64, None where the contender computes another function.
        budget: The error it was allowed.
        traffic: Bytes that have to move.
        peak: Bytes held beyond inputs and results, None where not measured.
        held: Bytes of inputs and results, which the peak is compared with.
        graph: Time as a replayed CUDA graph.
        call: Time as a plain call.
    """

    table: str
    contender: str
    direction: str
    shape: Shape
    dtype: str
    mechanism: str
    causal: bool = False
    rotary: bool = False
    status: str = OK
    reason: str = ""
    detail: str = ""
    error: float | None = None
    budget: float | None = None
    traffic: int = 0
    peak: int | None = None
    held: int = 0
    graph: Times | None = None
    call: Times | None = None

    @property
    def ms(self) -> float | None:
        """Milliseconds per call: of the graph where there is one, else of the plain call."""
        times = self.graph or self.call
        return None if times is None else times.median

    @property
    def gb_per_s(self) -> float | None:
        """Bytes that have to move over the time it took.

        Examples:
            >>> from dataclasses import replace
            >>> from affinear.bench.timing import collect
            >>> row = Row("decode", "a", "one token", Shape(1, 1, 1, 1), "float32", "mala", traffic=4_000_000)
            >>> replace(row, call=collect([2.0])).gb_per_s
            2.0
        """
        return None if not self.ms or not self.traffic else self.traffic / self.ms / 1e6

    def percent_of(self, copy_gb_per_s: float | None) -> float | None:
        """That rate as a percentage of what a plain copy reaches."""
        return None if self.gb_per_s is None or not copy_gb_per_s else 100 * self.gb_per_s / copy_gb_per_s

    @property
    def peak_percent(self) -> float | None:
        """The peak as a percentage of inputs and results."""
        return None if self.peak is None or not self.held else 100 * self.peak / self.held


@dataclass
class Report:
    """A run: where, with what, and every row so far.

    Attributes:
        machine: Names and versions.
        settings: What was asked for.
        copy_gb_per_s: What a plain copy reaches, bytes read and written; None before it was measured.
        copy: The times of that copy.
        rows: In the order measured.
        notes: What a reader should know besides.
        interrupted: Whether the run was stopped before its end.
        seconds: How long it took.
    """

    machine: dict[str, Any]
    settings: dict[str, Any]
    copy_gb_per_s: float | None = None
    copy: Times | None = None
    rows: list[Row] = field(default_factory=list["Row"])
    notes: list[str] = field(default_factory=list[str])
    interrupted: bool = False
    seconds: float = 0.0

    @property
    def on_gpu(self) -> bool:
        """Whether it ran on a GPU."""
        return self.machine.get("gpu") is not None

    def to_json(self, verdicts: list[dict[str, Any]] | None = None) -> str:
        """The whole report as JSON, with what follows from the rows spelled out for readers of the file."""
        content: dict[str, Any] = {"format": FORMAT, **asdict(self)}
        content["rows"] = [{**asdict(row), **self._derived(row)} for row in self.rows]
        content["bars"] = verdicts or []
        return json.dumps(content, indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> Report:
        """Read what `to_json` wrote."""
        content = json.loads(text)
        if content.get("format") != FORMAT:
            raise ValueError(
                f"format: expected {FORMAT}, got {content.get('format')!r}; read it with the version that wrote it"
            )
        fields = {name: content[name] for name in Report.__dataclass_fields__}
        fields |= {"copy": _times(content["copy"]), "rows": [_row(row) for row in content["rows"]]}
        return Report(**fields)

    def _derived(self, row: Row) -> dict[str, float | None]:
        return {
            "ms": row.ms,
            "gb_per_s": row.gb_per_s,
            "percent_of_copy": row.percent_of(self.copy_gb_per_s),
            "peak_percent": row.peak_percent,
        }


def _times(content: Mapping[str, Any] | None) -> Times | None:
    return None if content is None else Times(**content)


def _row(content: Mapping[str, Any]) -> Row:
    fields = {name: content[name] for name in Row.__dataclass_fields__}
    fields |= {"shape": Shape(**content["shape"]), "graph": _times(content["graph"]), "call": _times(content["call"])}
    return Row(**fields)
