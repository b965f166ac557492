"""Every bar, met and missed, with numbers worked out by hand."""

from collections.abc import Callable

import pytest

from affinear.bench.bars import verdicts
from affinear.bench.cases import FORWARD, TRAINING, Shape
from affinear.bench.plan import LONG, STAGE_1, STAGE_2, STAGE_3
from affinear.bench.rows import Report, Row
from affinear.bench.timing import collect

MakeRow = Callable[..., Row]
MakeReport = Callable[..., Report]


def judged(report: Report) -> list[tuple[str, bool]]:
    return [(verdict.bar, verdict.met) for verdict in verdicts(report)]


@pytest.mark.parametrize("shape", LONG)
@pytest.mark.parametrize(
    ("direction", "gb_per_s", "expected"),
    [
        (FORWARD, 3001, ("≥ 75 % of copy", True)),
        (FORWARD, 2999, ("≥ 75 % of copy", False)),
        (TRAINING, 2601, ("≥ 65 % of copy", True)),
        (TRAINING, 2599, ("≥ 65 % of copy", False)),
    ],
)
def test_share_of_the_copy(
    make_row: MakeRow, make_report: MakeReport, shape: Shape, direction: str, gb_per_s: int, expected: tuple[str, bool]
):
    row = make_row(1.0, shape=shape, direction=direction, traffic=gb_per_s * 10**6)
    assert judged(make_report(row, copy=4000.0)) == [expected]


@pytest.mark.parametrize(
    ("shape", "direction", "bar"),
    [(STAGE_1, FORWARD, 0.065), (STAGE_1, TRAINING, 0.22), (STAGE_2, FORWARD, 0.045), (STAGE_2, TRAINING, 0.16)],
)
def test_milliseconds_as_a_graph_on_the_card_they_were_set_for(
    make_row: MakeRow, make_report: MakeReport, shape: Shape, direction: str, bar: float
):
    for factor, met in ((0.99, True), (1.01, False)):
        row = make_row(factor * bar, shape=shape, direction=direction)
        assert judged(make_report(row)) == [(f"≤ {bar} ms", met)]
        assert judged(make_report(row, gpu="another card")) == []
    only_called = make_row(shape=shape, direction=direction, call=collect([0.5 * bar]))
    assert judged(make_report(only_called)) == [(f"≤ {bar} ms", False)]


def test_short_sequences_are_held_to_softmax(make_row: MakeRow, make_report: MakeReport):
    mine, rival = make_row(2.0, shape=STAGE_3), make_row(1.9, shape=STAGE_3, contender="SDPA")
    assert judged(make_report(mine, rival)) == [("≤ 1 x SDPA", False)]
    assert judged(make_report(make_row(1.8, shape=STAGE_3), rival)) == [("≤ 1 x SDPA", True)]
    assert judged(make_report(mine, make_row(1.0, shape=STAGE_3, contender="SDPA", direction=TRAINING))) == []


def test_causal_is_held_to_fla_where_it_was_measured(make_row: MakeRow, make_report: MakeReport):
    kind = {"table": "causal", "causal": True, "shape": Shape(8, 16, 4096, 64)}
    mine = make_row(1.0, **kind)
    assert judged(make_report(mine)) == []
    assert judged(make_report(mine, make_row(0.9, contender="fla", **kind))) == [("≤ 1 x fla", False)]


def test_rotary_is_held_to_none_and_nala_to_mala(make_row: MakeRow, make_report: MakeReport):
    none = make_row(1.0, table="rotary")
    for ms, met in ((1.24, True), (1.26, False)):
        turned = make_row(ms, table="rotary", rotary=True)
        assert judged(make_report(none, turned)) == [("≤ 1.25 x none", met)]
    mala = make_row(1.0, table="mechanisms", shape=STAGE_1)
    for ms, met in ((1.59, True), (1.61, False)):
        nala = make_row(ms, table="mechanisms", shape=STAGE_1, mechanism="nala")
        assert judged(make_report(mala, nala)) == [("≤ 1.6 x mala", met)]


def test_decoding_is_held_to_reading_and_writing_the_state(make_row: MakeRow, make_report: MakeReport):
    # 40 MB at 4000 GB/s take 0.01 ms.
    for ms, met in ((0.0149, True), (0.0151, False)):
        row = make_row(ms, table="decode", direction="one token", traffic=40_000_000)
        assert judged(make_report(row, copy=4000.0)) == [("≤ 1.5 x state", met)]


def test_an_in_place_step_of_the_kernels_has_the_bar_of_decoding_too(make_row: MakeRow, make_report: MakeReport):
    row = make_row(1.0, table="decode", contender="affinear triton, in place", traffic=10**9)
    assert judged(make_report(row)) == [("≤ 1.5 x state", False)]


def test_memory(make_row: MakeRow, make_report: MakeReport):
    for peak, met in ((100, True), (101, False)):
        row = make_row(1.0, shape=Shape(1, 1, 1, 1), peak=peak, held=1000)
        assert judged(make_report(row)) == [("peak ≤ 10 %", met)]


def test_a_row_without_a_time_misses_its_bar(make_row: MakeRow, make_report: MakeReport):
    verdict = verdicts(make_report(make_row(status="wrong", reason="wrong (error 1.0e-01)")))[0]
    assert (verdict.measured, verdict.met) == ("wrong (error 1.0e-01)", False)


def test_bars_are_for_the_kernels_and_for_the_mechanism_they_were_set_for(make_row: MakeRow, make_report: MakeReport):
    fast = {"traffic": 4 * 10**9}
    assert judged(make_report(make_row(1.0, **fast))) != []
    assert judged(make_report(make_row(1.0, contender="affinear torch", **fast))) == []
    assert judged(make_report(make_row(1.0, mechanism="nala", **fast))) == []
    assert judged(make_report(make_row(1.0, dtype="float32", **fast))) == []
