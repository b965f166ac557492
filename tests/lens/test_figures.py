"""Figures are complete, the same every time, and honest about signs."""

from typing import cast

import numpy as np
import pytest
import torch
from matplotlib.collections import PolyCollection

from affinear.lens import demo, figures


@pytest.fixture(scope="module")
def curves():
    found = {curve.mechanism: curve for curve in demo.collect(demo.example())}
    return [found["softmax"], found["inline"]]


def test_there_is_one_panel_per_mechanism_and_factor(curves):
    figure = figures.loudness_figure(curves)
    assert len(figure.axes) == 2 * len(demo.FACTORS)
    words = [text.get_text() for text in figure.texts]
    assert {"softmax", "inline"} <= set(words)


def test_bars_have_the_sorted_weights_as_heights_and_are_blue_below_zero(curves):
    panel = figures.loudness_figure(curves).axes[-1]
    bars = cast(PolyCollection, panel.collections[0])
    heights = np.array([np.asarray(path.vertices)[1, 1] for path in bars.get_paths()])
    expected = 64 * curves[1].weights[-1].flatten().sort(descending=True).values
    torch.testing.assert_close(torch.from_numpy(heights), expected)
    red, _, blue, _ = np.asarray(bars.get_facecolor()).T
    assert (blue > red)[heights < -0.1].all()
    assert (red > blue)[heights > 0.1].all()


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG\r\n\x1a\n"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_the_same_figure_gives_the_same_bytes(curves, suffix: str, start: bytes):
    first, second = (figures.render(figures.loudness_figure(curves[:1]), suffix) for _ in range(2))
    assert first.startswith(start)
    assert first == second
