"""The papers' figures: their numbers against closed forms, brute force and what is published, and their files."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

import affinear as af
from affinear.lens import papers, plots
from affinear.lens.figures import render
from affinear.lens.papers import Drawn

NAMES = list(papers.figures())
DRAW = {
    "norms": plots.norms_figure,
    "ratios": plots.ratios_figure,
    "confusion": plots.confusion_figure,
    "locality": plots.locality_figure,
    "signs": plots.signs_figure,
    "distributions": plots.distributions_figure,
    "ranks": plots.ranks_figure,
}
DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def drawn() -> Mapping[str, Drawn]:
    return {name: draw() for name, draw in papers.figures().items()}


def plain_rows(query: Tensor, key: Tensor, mechanism: str) -> Tensor:
    """Rows (N, M) of queries (N, D) and keys (M, D), from the formulas of the papers."""
    scale = query.shape[-1] ** -0.5
    if mechanism == "softmax":
        return (scale * query @ key.T).softmax(-1)
    if mechanism == "inline":
        scores = scale * query @ key.T
        return (1 + scores - scores.mean(-1, keepdim=True)) / len(key)
    query, key = (torch.nn.functional.elu(x) + 1 for x in (query, key))
    scores = scale * query @ key.T
    linear, z = scores / scores.sum(-1, keepdim=True), scores.mean(-1, keepdim=True)
    return linear if mechanism == "linear" else (1 + z) * linear - z / len(key)


def plain_entropy(rows: Tensor) -> Tensor:
    shares = rows.abs() / rows.abs().sum(-1, keepdim=True)
    return -(shares * shares.log()).sum(-1)


def rank_correlation(first: Tensor, second: Tensor) -> float:
    """Spearman's, of numbers of which no two are equal."""
    count = len(first)
    gaps = first.argsort().argsort() - second.argsort().argsort()
    return 1 - 6 * (gaps**2).sum().item() / (count * (count**2 - 1))


def close(found: tuple[float, ...], expected: Tensor) -> None:
    torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), expected, rtol=1e-7, atol=1e-9)


def test_norms_and_entropies_are_those_of_plain_formulas(drawn):
    numbers: papers.Norms = drawn["norms"].numbers
    generator = papers._seed(0)
    query, key = (papers._cloud(generator, 300, 64)[0, :, 0] for _ in range(2))
    close(numbers.query_norm, query.norm(dim=-1))
    assert 0.2 <= min(numbers.key_norm) < 0.25
    assert 15 < max(numbers.key_norm) <= 16
    for panel in numbers.panels:
        if panel.mechanism == "nala":
            continue
        rows = plain_rows(query, key, panel.mechanism)
        close(panel.row_entropy, plain_entropy(rows))
        close(panel.column_entropy, plain_entropy(rows.T))


def test_norm_correlations_are_spearmans_and_as_the_diagnosis_says(drawn):
    numbers: papers.Norms = drawn["norms"].numbers
    query_norm, key_norm = torch.tensor(numbers.query_norm), torch.tensor(numbers.key_norm)
    found = {panel.mechanism: panel for panel in numbers.panels}
    for panel in numbers.panels:
        row, column = (torch.tensor(x, dtype=torch.float64) for x in (panel.row_entropy, panel.column_entropy))
        # Where rows barely differ, two queries' entropies may agree to the last digit or nearly: no exact order.
        assert panel.query_correlation == pytest.approx(rank_correlation(row, query_norm), abs=1e-3)
        assert panel.key_correlation == pytest.approx(rank_correlation(column, key_norm), abs=1e-3)
    assert found["softmax"].query_correlation < -0.97
    assert -0.7 < found["nala"].query_correlation < -0.1
    assert found["linear"].span < 0.005 < 1 < found["softmax"].span


def test_ratios_are_a_power_a_constant_and_two_moebius_functions(drawn):
    numbers: papers.Ratios = drawn["ratios"].numbers
    generator = papers._seed(8)
    query, key = papers._normal(generator, 1, 8), papers._normal(generator, 16, 8)
    factor = torch.tensor(numbers.factors, dtype=torch.float64)
    curves = {curve.mechanism: curve for curve in numbers.curves}
    close(curves["softmax"].ratio, curves["softmax"].start ** factor)
    close(curves["linear"].ratio, torch.full_like(factor, curves["linear"].start))

    share = 16 * plain_rows(query, key, "linear")[0, [0, 3]]
    z = 8**-0.5 * ((torch.nn.functional.elu(query) + 1) * (torch.nn.functional.elu(key) + 1).mean(0)).sum()
    top, bottom = ((1 + factor * z) * x - factor * z for x in share)
    close(curves["mala"].ratio, top / bottom)
    assert curves["mala"].pole == pytest.approx((share[1] / (1 - share[1]) / z).item())

    pushed = 16 * plain_rows(query, key, "inline")[0, [0, 3]] - 1
    close(curves["inline"].ratio, (1 + factor * pushed[0]) / (1 + factor * pushed[1]))
    assert curves["inline"].pole == pytest.approx((-1 / pushed[1]).item())
    for curve in (curves["mala"], curves["inline"]):
        assert all((ratio > 0) == (at < curve.pole) for at, ratio in zip(numbers.factors, curve.ratio, strict=True))


def test_rows_of_inlines_figure_1_are_the_printed_ones(drawn):
    numbers: papers.Confusion = drawn["confusion"].numbers
    for example in numbers.examples:
        for found, printed in zip(
            (example.rows[0], example.rows[-1]), papers.PRINTED_ROWS[example.mechanism], strict=True
        ):
            assert found == pytest.approx(printed, abs=0.02)
    key = torch.tensor(papers.PRINTED_KEYS, dtype=torch.float64)
    query = torch.tensor(numbers.queries, dtype=torch.float64)
    for example in (numbers.examples[0], numbers.examples[2]):
        close(sum(example.rows, ()), plain_rows(query, key, example.mechanism).flatten())


def test_collisions_are_those_of_all_pairs(drawn):
    numbers: papers.Confusion = drawn["confusion"].numbers
    generator = papers._seed(2)
    direction, key = papers._normal(generator, 32, 1, 64), papers._normal(generator, 1, 196, 1, 64)
    query = torch.tensor([2.0, 4.0, 8.0, 16.0]).double()[:, None] * direction / direction.norm(dim=-1, keepdim=True)
    pairs = torch.triu_indices(128, 128, 1)
    assert (numbers.pairs, numbers.on_one_ray) == (pairs.shape[1], 32 * 6)
    for count in numbers.counts:
        rows = 196 * af.weights(query.reshape(1, 128, 1, 64), key, count.mechanism)[0, 0]
        apart = (rows[pairs[0]] - rows[pairs[1]]).abs().amax(-1)
        assert count.pairs == tuple(int((apart <= step).sum()) for step in numbers.tolerances)
    found = {count.mechanism: count.pairs for count in numbers.counts}
    assert set(found["relu"]) == {numbers.on_one_ray}
    assert not any(found["softmax"] + found["inline"] + found["mala"])


def test_mass_in_the_window_is_that_of_a_loop_over_places(drawn):
    numbers: papers.Locality = drawn["locality"].numbers
    assert numbers.uniform == pytest.approx((3 * 14 - 2) ** 2 / 14**4)
    tokens = papers._smooth_tokens()[0, :, 0]
    assert tokens.square().mean().item() == pytest.approx(1, abs=0.1)
    inside = torch.tensor(
        [[max(abs(i // 14 - j // 14), abs(i % 14 - j % 14)) <= 1 for j in range(196)] for i in range(196)]
    )
    for place in numbers.places:
        if place.mechanism == "nala":
            continue
        rows = plain_rows(tokens, tokens, place.mechanism)
        assert place.plain == pytest.approx(rows[inside].sum().item() / 196)
        share = (rows.abs() * inside).sum(-1) / rows.abs().sum(-1)
        assert place.plain_share == pytest.approx(share.mean().item())
    found = {place.mechanism: place for place in numbers.places}
    assert found["softmax"].plain > found["inline"].plain > found["mala"].plain > found["linear"].plain
    assert found["mala"].rotary > found["mala"].plain


# Measured apart from this library, other random numbers: size of the features, share of negative weights, Σ|w|, and, as
# released with rotary positions, share of negative weights and mean row sum.
SIGNS = [
    (0.05, 0.0, 1.00, 0.993, -2.11),
    (0.20, 0.0, 1.00, 0.990, -2.16),
    (0.50, 0.031, 1.01, 0.982, -2.39),
    (1.00, 0.204, 1.26, 0.957, -3.06),
    (2.00, 0.389, 2.57, 0.911, -5.29),
]


@pytest.mark.parametrize(("size", "negative", "mass", "released_negative", "released_sum"), SIGNS)
def test_signs_are_those_of_the_table(drawn, size, negative, mass, released_negative, released_sum):
    numbers: papers.SignsBySize = drawn["signs"].numbers
    at = numbers.sizes.index(size)
    mala, released = numbers.of("mala", rotary=False), numbers.of("mala_released", rotary=True)
    assert mala.negative_share[at] == pytest.approx(negative, abs=0.01)
    assert mala.absolute_mass[at] == pytest.approx(mass, rel=0.03)
    assert released.negative_share[at] == pytest.approx(released_negative, abs=0.01)
    assert released.row_sum[at] == pytest.approx(released_sum, abs=0.12)
    assert released.lowest_sum[at] < released.row_sum[at] < released.highest_sum[at] < 0


def test_only_released_rows_do_not_sum_to_one(drawn):
    numbers: papers.SignsBySize = drawn["signs"].numbers
    for curve in numbers.curves:
        exact = all(abs(total - 1) < 1e-11 for total in curve.lowest_sum + curve.highest_sum)
        assert exact == (curve.mechanism != "mala_released")


def test_mala_lies_between_softmax_and_linear(drawn):
    numbers: papers.Distributions = drawn["distributions"].numbers
    tokens = papers._smooth_tokens()[0, :, 0]
    for score in numbers.scores:
        rows = plain_rows(tokens, tokens, score.mechanism)
        close(score.mean_sorted, 196 * rows.sort(descending=True).values.mean(0))
        assert score.p_max == pytest.approx(rows.amax(-1).mean().item())
        assert sum(score.mean_sorted) == pytest.approx(196)
    softmax, mala, linear = numbers.scores
    assert softmax.largest[0] > mala.p_max
    assert mala.largest[0] > linear.largest[-1]
    assert mala.mean_sorted[-1] < 0 < softmax.mean_sorted[-1]


def test_half_of_a_row():
    assert papers._keys_for_half((1.0, 1.0, 1.0, 1.0)) == 2
    assert papers._keys_for_half((3.9, 0.1, 0.0, 0.0)) == 1


def test_ranks_stop_where_the_features_end(drawn):
    numbers: papers.Ranks = drawn["ranks"].numbers
    width = numbers.width
    bounds = {"softmax": math.inf, "linear": width, "inline": width + 1, "mala": width + 1, "nala": 2 * width}
    for curve in numbers.curves:
        assert curve.exact == tuple(min(length, bounds[curve.mechanism]) for length in numbers.lengths)
        assert all(1 <= low <= high for low, high in zip(curve.effective, curve.exact, strict=True))
    generator = papers._seed(6)
    query, key = (papers._normal(generator, 256, width) for _ in range(2))
    values = torch.linalg.svdvals(plain_rows(query, key, "softmax"))
    assert numbers.curves[0].effective[-1] == pytest.approx(plain_entropy(values).exp().item())


@pytest.mark.parametrize("name", NAMES)
def test_figures_become_the_same_files_every_time(drawn, name: str):
    first, again = drawn[name].figure, DRAW[name](drawn[name].numbers)
    for suffix, start in (("png", b"\x89PNG\r\n\x1a\n"), ("svg", b"<?xml")):
        content = render(first, suffix)
        assert content.startswith(start)
        assert content == render(again, suffix)
        assert len(content) < 200_000


def test_numbers_are_the_same_every_time_and_cannot_be_changed(drawn):
    for name in ("ratios", "locality", "ranks"):
        assert papers.figures()[name]().numbers == drawn[name].numbers
    with pytest.raises(dataclasses.FrozenInstanceError):
        drawn["ranks"].numbers.width = 3


@pytest.mark.parametrize("name", NAMES)
def test_everything_written_is_inside_the_page(drawn, name: str):
    figure = DRAW[name](drawn[name].numbers)
    box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert 0 < box.x0 < box.x1 < width
    assert 0 < box.y0 < box.y1 < height


def test_readings_hold_the_numbers(drawn):
    expected = {
        "norms": [f"{panel.query_correlation:.2f}" for panel in drawn["norms"].numbers.panels],
        "ratios": [f"{curve.start:.2f}" for curve in drawn["ratios"].numbers.curves],
        "confusion": [f"{rows.moved:.3f}" for rows in drawn["confusion"].numbers.examples],
        "locality": [f"{x.plain / drawn['locality'].numbers.uniform:.1f}" for x in drawn["locality"].numbers.places],
        "signs": [f"{drawn['signs'].numbers.of('mala_released', True).row_sum[1]:.2f}", "1e-12"],
        "distributions": [f"{score.p_max:.4f}" for score in drawn["distributions"].numbers.scores],
        "ranks": [f"{curve.effective[-1]:.1f}" for curve in drawn["ranks"].numbers.curves],
    }
    for name, words in expected.items():
        assert all(word in drawn[name].reading for word in words), name
        assert "\n" not in drawn[name].reading
        assert drawn[name].reading == drawn[name].numbers.reading
    moved = dataclasses.replace(drawn["locality"].numbers, uniform=0.5)
    assert "0.5000" in moved.reading


@pytest.mark.parametrize("name", NAMES)
def test_the_documentation_shows_the_figure_and_its_reading(drawn, name: str):
    page = re.sub(r"\s+", " ", (DOCS / "lens.md").read_text(encoding="utf-8"))
    assert drawn[name].reading in page
    assert f"(figures/{name}.svg)" in page
    assert (DOCS / "figures" / f"{name}.svg").stat().st_size < 200_000


def test_the_documentations_tables_are_those_of_the_figures(drawn):
    page = (DOCS / "lens.md").read_text(encoding="utf-8")
    for panel in drawn["norms"].numbers.panels:
        assert f"| {plots.LABELS[panel.mechanism]} | {panel.query_correlation:.2f} | {panel.span:.3f} |" in page
    for example in drawn["confusion"].numbers.examples:
        printed = zip(example.rows[:: len(example.rows) - 1], papers.PRINTED_ROWS[example.mechanism], strict=True)
        cells = [" ".join(f"{weight:.2f}" for weight in row) for pair in printed for row in pair]
        assert f"| {plots.LABELS[example.mechanism]} | {' | '.join(cells)} |" in page
    signs: papers.SignsBySize = drawn["signs"].numbers
    released = signs.of("mala_released", rotary=True)
    for size, *numbers in zip(signs.sizes, released.negative_share, released.row_sum, strict=True):
        cells = f"| {numbers[0]:.3f} | {numbers[1]:.2f} |"
        assert any(line.startswith(f"| {size:g} |") and line.endswith(cells) for line in page.splitlines())


def test_figures_are_picked_by_name():
    assert list(papers.pick(None)) == NAMES
    assert list(papers.pick("ranks, norms")) == ["norms", "ranks"]
    with pytest.raises(ValueError, match=r"only: expected some of norms, ratios, .*, with commas, got 'rank'"):
        papers.pick("norms,rank")


def test_one_colour_for_each_mechanism():
    assert len(set(plots.MECHANISM_COLOURS.values())) == len(plots.MECHANISM_COLOURS)
    assert plots.MECHANISM_COLOURS.keys() == plots.LABELS.keys()
    assert plots.MECHANISM_COLOURS.keys() <= af.mechanisms().keys()
