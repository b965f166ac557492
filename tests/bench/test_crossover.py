"""Lines end where a call would take too long, cross where they should, and are drawn."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from matplotlib import colors

from affinear.bench import crossover, ops
from affinear.bench.cases import Shape
from affinear.bench.chart import crossover_figure
from affinear.bench.contenders import Contender
from affinear.bench.crossover import meeting_point
from affinear.bench.rows import Report, Row
from affinear.lens.figures import NEGATIVE, render


class Instant:
    """Stands for a problem: takes a thousandth of a millisecond per token, squared for softmax."""

    make_row: Callable[..., Row]

    def __init__(self, case, clock) -> None:
        self.case = case

    def measure(self, table: str, contender: Contender, direction: str) -> Row:
        tokens = self.case.shape.tokens
        return self.make_row(
            1e-3 * tokens**contender.order,
            table=table,
            contender=contender.name,
            direction=direction,
            shape=self.case.shape,
        )


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch, make_row: Callable[..., Row]) -> list[Row]:
    monkeypatch.setattr(crossover, "Problem", Instant)
    monkeypatch.setattr(Instant, "make_row", staticmethod(make_row), raising=False)
    plan = replace(ops.prepare(), lengths=(64, 128, 256, 512, 1024, 2048), limit_ms=300.0)
    return list(crossover.rows(plan, lambda said: None))


def test_softmax_stops_at_the_limit_and_nobody_else(rows: list[Row]):
    softmax = crossover.line(rows, "SDPA", "forward")
    assert [tokens for tokens, _ in softmax] == [64, 128, 256, 512]  # 1024 tokens would take 1049 ms
    assert [tokens for tokens, _ in crossover.line(rows, "affinear torch", "forward")][-1] == 2048
    assert crossover.line(rows, "SDPA", "forward + backward") == softmax


def test_a_line_ends_where_a_call_fails_but_not_where_one_is_wrong(make_row: Callable[..., Row]):
    one = Contender("one", lambda q, k, v: v)
    assert crossover._goes_on(one, None, 64, 1.0)
    assert crossover._goes_on(one, make_row(status="wrong"), 64, 1.0)
    assert not crossover._goes_on(one, make_row(status="failed"), 64, 1.0)


def test_where_lines_cross():
    assert meeting_point([(64, 1.0), (128, 1.0)], [(64, 0.5), (128, 2.0)]) == pytest.approx(64 * 2**0.5)
    assert meeting_point([(64, 1.0), (128, 1.0)], [(64, 2.0), (128, 3.0)]) is None
    assert meeting_point([], []) is None


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG\r\n\x1a\n"), ("svg", b"<?xml")])
def test_the_chart_is_drawn(rows: list[Row], make_report: Callable[..., Report], suffix: str, start: bytes):
    figure = crossover_figure(make_report(*rows))
    panel = figure.axes[0]
    assert panel.get_xscale() == panel.get_yscale() == "log"
    legend = panel.get_legend()
    assert legend is not None
    shown = [text.get_text() for text in legend.get_texts()]
    assert {"affinear torch, forward", "SDPA, forward + backward"} <= {*shown}
    softmax = panel.get_lines()[shown.index("SDPA, forward")]
    assert colors.to_hex(softmax.get_color()) == NEGATIVE
    assert np.asarray(softmax.get_xdata()).tolist() == [64, 128, 256, 512]
    assert render(figure, suffix).startswith(start)
    assert render(crossover_figure(make_report(*rows)), suffix) == render(figure, suffix)


def test_one_point_is_enough_for_a_chart(make_row: Callable[..., Row], make_report: Callable[..., Report]):
    row = make_row(1.0, table="crossover", shape=Shape(1, 1, 2**20, 64))
    panel = crossover_figure(make_report(row)).axes[0]
    assert [text.get_text() for text in panel.get_xticklabels()] == ["1M"]
