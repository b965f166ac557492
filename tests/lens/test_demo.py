"""The demo's words follow from its numbers."""

import io

import pytest
import torch
from rich.console import Console

import affinear
from affinear.lens import Loudness, demo, measure


def curve(name: str, *rows: list[float]) -> Loudness:
    weights = torch.tensor(rows, dtype=torch.float64).reshape(len(rows), 1, 1, 1, -1)
    return Loudness(name, tuple(4.0**step for step in range(len(rows))), weights, measure(weights))


SHARP = curve("sharp", [0.3, 0.4, 0.3], [0.1, 0.8, 0.1])
STILL = curve("still", [0.3, 0.4, 0.3], [0.3, 0.4, 0.3])
SLIGHT = curve("slight", [0.3, 0.4, 0.3], [0.25, 0.5, 0.25])
SIGNED = curve("signed", [0.3, 0.4, 0.3], [-0.5, 2.0, -0.5])


def test_the_reading_sorts_mechanisms_by_what_their_rows_do():
    text = demo.reading([SHARP, STILL, SLIGHT])
    assert "From × 1 to × 4 the largest weight grows most with sharp (2-fold)" in text
    assert "Sitting still: still; moving a little: slight." in text
    assert "Negative" not in text
    assert text.endswith("Rows sum to one.")


def test_the_reading_names_the_price_and_the_loudest_first():
    text = demo.reading([SHARP, SIGNED])
    assert "signed (5-fold) and sharp (2-fold)" in text
    assert text.endswith("Negative weights at × 4 add up to 1.00 in signed; rows sum to one.")


def test_the_reading_admits_that_nothing_sharpens():
    assert demo.reading([STILL, SLIGHT]).startswith("From × 1 to × 4 no mechanism sharpens.")


def test_the_reading_names_rows_that_do_not_sum_to_one():
    off = curve("off", [0.3, 0.4], [0.3, 0.4])
    assert "Rows sum to one, but for off (off by 3e-01)." in demo.reading([off, STILL])


@pytest.mark.parametrize("seed", range(4))
def test_the_query_clearly_prefers_one_key(seed: int):
    tokens = demo.example(seed)
    scores = (tokens.query * tokens.key).sum(-1).flatten().sort(descending=True)
    assert scores.indices[0] == 0
    assert scores.values[0] > 1.3 * scores.values[1]


def test_every_mechanism_is_shown_and_softmax_first():
    names = [found.mechanism for found in demo.collect(demo.example())]
    assert names[0] == "softmax"
    assert sorted(names) == sorted(affinear.mechanisms())


def test_the_table_fits_eighty_columns_and_holds_four_lines_per_mechanism():
    curves = demo.collect(demo.example())
    page = io.StringIO()
    Console(file=page, width=80).print(demo.table(curves))
    lines = page.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert sum("×" in line for line in lines) == 4 * len(curves)
    assert "…" not in page.getvalue()
