"""What a reader sees: times where there are any, reasons where not, and the bars."""

from collections.abc import Callable

from rich.console import Console

from affinear.bench import report as reading
from affinear.bench.rows import Report, Row

MakeRow = Callable[..., Row]
MakeReport = Callable[..., Report]


def printed(*parts: object) -> str:
    console = Console(width=140, highlight=False)
    with console.capture() as captured:
        for part in parts:
            console.print(part)
    return captured.get()


def test_there_is_one_table_per_direction(make_row: MakeRow, make_report: MakeReport):
    report = make_report(make_row(1.0), make_row(2.0, direction="forward + backward"), make_row(3.0, table="causal"))
    titles = [str(table.title) for table in reading.tables(report, "non-causal")]
    assert titles == ["Full attention, forward", "Full attention, forward + backward"]


def test_a_line_has_times_rate_percentage_peak_and_bar(make_row: MakeRow, make_report: MakeReport):
    row = make_row(0.2, traffic=8 * 64 * 16384 * 64, peak=30, held=600)
    said = printed(*reading.tables(make_report(row, copy=4026.53), "non-causal"))
    for cell in ("64,1,16384,64", "affinear triton", "0.200", "2,684", "66.7", "5.0 %"):
        assert cell in said
    assert "≥ 75 % of copy missed, peak ≤ 10 % met" in said


def test_a_wrong_row_shows_its_error_and_no_time(make_row: MakeRow, make_report: MakeReport):
    row = make_row(status="wrong", reason="wrong (error 3.2e-01)", error=0.32, peak=None)
    said = printed(*reading.tables(make_report(row), "non-causal"))
    line = next(line for line in said.splitlines() if "affinear triton" in line)
    cells = line.split("affinear triton")[1].replace("≥ 75 % of copy missed", "")
    assert cells.strip(" ,") == "wrong (error 3.2e-01)"


def test_overhead_is_in_microseconds(make_row: MakeRow, make_report: MakeReport):
    row = make_row(0.025, table="overhead", direction="host time, forward")
    said = printed(*reading.tables(make_report(row), "overhead"))
    assert "host time, forward" in said
    assert "25.0 to 25.0" in said


def test_the_summary_counts_bars_and_names_what_was_missed_or_failed(make_row: MakeRow, make_report: MakeReport):
    good = make_row(1.0, traffic=4 * 10**9)
    bad = make_row(1.0, traffic=10**9, direction="forward + backward")
    failed = make_row(status="failed", reason="out of memory", contender="SDPA", detail="tried to allocate")
    report = make_report(good, bad, failed)
    report.notes.append("fla is not there")
    report.interrupted = True
    said = printed(*reading.summary(report))
    assert "Bars: 1 met, 1 missed." in said
    assert "missed: non-causal 64,1,16384,64 forward + backward affinear triton: ≥ 65 % of copy, measured 25 %" in said
    assert "out of memory: non-causal 64,1,16384,64 forward SDPA: tried to allocate" in said
    assert "Note: fla is not there" in said
    assert "Interrupted after 3 rows; not begun: nothing." in said


def test_the_heading_says_where_and_how_fast_a_copy_is(make_report: MakeReport):
    said = reading.heading(make_report(copy=4254.4))
    assert "NVIDIA H200" in said
    assert "4,254 GB/s" in said
