"""Rates and percentages come out as on paper, and a report reads back as it was written."""

import json
from collections.abc import Callable

import pytest

from affinear.bench import ops
from affinear.bench.cases import Shape
from affinear.bench.rows import Report, Row
from affinear.bench.timing import collect


def test_rate_and_percentage_worked_out_by_hand(make_row: Callable[..., Row]):
    # 8 bytes times 64 * 16384 * 64 elements in 0.2 ms are 2684 GB/s, two thirds of a copy at 4026.5 GB/s.
    row = make_row(0.2, traffic=8 * 64 * 16384 * 64)
    assert row.gb_per_s == pytest.approx(2684.35, abs=0.01)
    assert row.percent_of(4026.53) == pytest.approx(66.67, abs=0.01)


def test_the_graph_counts_where_there_is_one(make_row: Callable[..., Row]):
    assert make_row(graph=collect([1.0]), call=collect([3.0])).ms == 1.0
    assert make_row(graph=None, call=collect([3.0])).ms == 3.0
    assert make_row().ms is None


def test_peak_is_a_percentage_of_inputs_and_results(make_row: Callable[..., Row]):
    assert make_row(1.0, peak=30, held=600).peak_percent == pytest.approx(5.0)
    assert make_row(1.0, peak=0, held=600).peak_percent == 0.0
    assert make_row(1.0, peak=None, held=600).peak_percent is None


def test_a_report_reads_back_as_it_was_written(make_row: Callable[..., Row], make_report: Callable[..., Report]):
    report = make_report(
        make_row(0.5, traffic=100, error=1e-3, budget=2e-3, peak=7, held=70),
        make_row(status="failed", reason="out of memory", shape=Shape(1, 2, 3, 4), rotary=True),
    )
    report.notes.append("a note")
    report.interrupted = True
    assert Report.from_json(ops.as_json(report).decode()) == report


def test_the_file_spells_out_what_follows_from_the_rows(
    make_row: Callable[..., Row], make_report: Callable[..., Report]
):
    report = make_report(make_row(0.5, traffic=10**9, peak=7, held=70), copy=4000.0)
    content = json.loads(ops.as_json(report))
    row = content["rows"][0]
    assert (row["ms"], row["gb_per_s"], row["percent_of_copy"], row["peak_percent"]) == (0.5, 2000.0, 50.0, 10.0)
    assert content["bars"][0] == {"row": 0, "bar": "≥ 75 % of copy", "measured": "50 %", "met": False}


def test_a_file_of_another_format_is_refused(make_report: Callable[..., Report]):
    content = json.loads(ops.as_json(make_report())) | {"format": 99}
    with pytest.raises(ValueError, match="format: expected 2, got 99"):
        Report.from_json(json.dumps(content))
