"""Pages of reports: numbers beside a chart fit into their room."""

from __future__ import annotations

import random
import re

from affinear.train.page import Line, chart


def test_numbers_beside_a_chart_are_short_enough_to_be_seen():
    for exponent in range(-9, 6):
        high = random.uniform(1, 10) * 10.0**exponent
        drawn = chart([Line("rate", [(1, high), (2, high / 2), (3, high / 9)])], "rate", "epoch", 3)
        told = re.findall(r'x="39"[^>]*>([^<]+)<', drawn)
        assert len(told) >= 2
        assert all(len(text) <= 6 for text in told)
        assert all(abs(float(text)) <= 2 * high for text in told)


def test_a_single_number_is_a_dot():
    height = random.uniform(1, 10)
    assert "h0" in chart([Line("score", [(1, height)])], "score", "epoch", 1)
    assert "h0" not in chart([Line("score", [(1, height), (2, height)])], "score", "epoch", 2)
