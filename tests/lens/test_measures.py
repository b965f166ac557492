"""The numbers of an attention, against brute force in float64 and against the papers' closed forms."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

import affinear as af
from affinear import lens
from affinear.lens import Scene
from affinear.lens import scene as scenes
from affinear.ops import rotary_2d

GRID, WIDTH = (4, 5), 8
EVERY = sorted(af.mechanisms())


def make(mechanism: str = "mala", *, prefix: int = 0, rotary: bool = False, heads: int = 2, groups: int = 2) -> Scene:
    tokens = prefix + GRID[0] * GRID[1]
    query = torch.randn(2, tokens, heads, WIDTH, dtype=torch.float64)
    key = torch.randn(2, tokens, groups, WIDTH, dtype=torch.float64)
    tables = rotary_2d(*GRID, WIDTH) if rotary else None
    return Scene(query, key, mechanism, rotary=tables, grid=GRID, prefix_tokens=prefix)


@pytest.fixture(params=[1, 7, 2**22])
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows come one by one, a few at a time, all at once."""
    monkeypatch.setattr(scenes, "MOST_WEIGHTS", request.param * 2 * 2 * GRID[0] * GRID[1])


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("mechanism", EVERY)
def test_rows_are_rows_of_all_weights(mechanism: str, rotary: bool):
    scene = make(mechanism, rotary=rotary, heads=4)
    whole = af.weights(scene.query, scene.key, mechanism, rotary=scene.rotary)
    assert torch.equal(scene.weights(), whole)
    torch.testing.assert_close(scene.only([3, 0, 11]).weights(), whole[:, :, [3, 0, 11]])
    assert scene.only(range(4)).weights().shape == (2, 4, 4, 20)


def test_rows_that_are_not_there_are_refused():
    scene = make()
    with pytest.raises(ValueError, match="rows: expected numbers from 0 to 19, as there are 20 queries, got 0 to 20"):
        scene.only([0, 20]).weights()
    with pytest.raises(ValueError, match=r"rows: expected numbers of queries, \(R,\) in int64, got torch.float32"):
        scene.only(torch.tensor([0.5])).weights()


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("mechanism", ["softmax", "mala", "inline"])
def test_row_numbers_are_those_of_the_whole_matrix(mechanism: str):
    scene = make(mechanism)
    weights = scene.weights()
    numbers, sign, spike = lens.row_numbers(scene), lens.signs(scene), lens.spikiness(scene)
    torch.testing.assert_close(numbers.entropy, lens.entropy(weights))
    torch.testing.assert_close(spike.effective_keys, lens.entropy(weights).exp())
    torch.testing.assert_close(spike.largest, weights.amax(-1))
    torch.testing.assert_close(sign.negative_share, (weights < 0).double().mean(-1))
    torch.testing.assert_close(sign.negative_mass, -weights.clamp(max=0).sum(-1))
    torch.testing.assert_close(sign.absolute_mass, weights.abs().sum(-1))
    assert lens.row_sum_error(scene).max() < 1e-9


def test_released_rows_do_not_sum_to_one_where_features_turn():
    assert lens.row_sum_error(make("mala_released", rotary=True)).max() > 0.1
    assert lens.row_sum_error(make("mala", rotary=True)).max() < 1e-9


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("prefix", [0, 2])
def test_neighbourhood_and_distance_are_those_of_a_loop_over_places(prefix: int):
    scene = make("mala", prefix=prefix)
    weights = scene.weights()
    near, distance = lens.neighbourhood(scene), lens.attention_distance(scene)
    places = list(itertools.product(range(GRID[0]), range(GRID[1])))
    for i, (y, x) in enumerate(places):
        row = weights[1, 0, prefix + i, prefix:]
        inside = torch.tensor([max(abs(y - v), abs(x - u)) <= 1 for v, u in places])
        way = torch.tensor([math.hypot(y - v, x - u) for v, u in places], dtype=torch.float64)
        whole = weights[1, 0, prefix + i].abs().sum()
        torch.testing.assert_close(near.weight[1, 0, i], row[inside].sum())
        torch.testing.assert_close(near.share[1, 0, i], row[inside].abs().sum() / whole)
        assert near.uniform[i].item() == pytest.approx(inside.sum().item() / (prefix + len(places)))
        torch.testing.assert_close(distance[1, 0, i], (row.abs() * way).sum() / row.abs().sum())
    assert near.weight.shape == distance.shape == (2, 2, len(places))


def test_only_a_grid_has_neighbours():
    scene = make()
    with pytest.raises(ValueError, match="scene: expected one with a grid, got none"):
        lens.neighbourhood(Scene(scene.query, scene.key))
    with pytest.raises(ValueError, match="grid: expected rows x columns = 20, the number of keys but class tokens"):
        lens.attention_distance(Scene(scene.query, scene.key, grid=(3, 5)))


def test_rank_correlation_knows_order_alone_and_shares_ranks():
    x = torch.randn(5, 30, dtype=torch.float64)
    torch.testing.assert_close(lens.spearman(x, x.exp()), torch.ones(5, dtype=torch.float64))
    torch.testing.assert_close(lens.spearman(x, -(x**3)), -torch.ones(5, dtype=torch.float64))
    assert lens.spearman(x, torch.ones_like(x)).abs().max() == 0
    tied = lens.spearman(torch.tensor([1.0, 1.0, 2.0, 3.0]), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert tied.item() == pytest.approx(3 / math.sqrt(10), abs=1e-12)  # ranks 0.5, 0.5, 2, 3


@pytest.mark.usefixtures("pieces")
def test_louder_queries_are_sharper_under_softmax_and_not_under_relu():
    direction = torch.randn(1, 1, 1, WIDTH, dtype=torch.float64)
    query = direction * torch.linspace(0.2, 6, 40, dtype=torch.float64)[:, None, None]
    key = torch.randn(1, 60, 1, WIDTH, dtype=torch.float64)
    assert lens.norm_correlation(Scene(query, key, "softmax")).query.item() == pytest.approx(-1)
    relu = lens.row_numbers(Scene(query, key, "relu")).entropy
    assert (relu - relu[..., :1]).abs().max() < 1e-9


def test_the_entropy_of_softmax_falls_by_the_variance_of_its_scores():
    """NaLaFormer's theorem: dH / dτ = -τ Var(x) under softmax(τ x)."""
    query, key = torch.randn(1, 1, 1, WIDTH).double(), torch.randn(1, 50, 1, WIDTH).double()
    loudness = torch.tensor(1.7, dtype=torch.float64, requires_grad=True)
    rows = af.weights(loudness * query, key, "softmax")
    found = torch.special.entr(rows).sum()
    (slope,) = torch.autograd.grad(found, loudness)
    scores = (query * key).sum(-1).flatten() * WIDTH**-0.5
    mean = (rows.flatten() * scores).sum()
    variance = (rows.flatten() * (scores - mean) ** 2).sum()
    torch.testing.assert_close(slope, -loudness.detach() * variance.detach())
    torch.testing.assert_close(lens.row_numbers(Scene(1.7 * query, key, "softmax")).entropy.squeeze(), found.detach())


def test_column_entropy_is_that_of_the_whole_matrix():
    scene = make("inline", groups=1)
    sizes = scene.weights().abs()
    columns = lens.entropy(sizes.transpose(-2, -1))
    norms = scene.key.norm(dim=-1).transpose(1, 2).expand(-1, 2, -1)
    torch.testing.assert_close(lens.norm_correlation(scene).key, lens.spearman(columns, norms))


FACTORS = torch.linspace(0.1, 12, 60, dtype=torch.float64).tolist()


def shares(scene: Scene, row: int) -> tuple[Tensor, Tensor]:
    """N times the row of plain linear attention over elu + 1, and z, each for the first batch entry and head."""
    linear = af.weights(scene.query, scene.key, "linear")[0, 0, row]
    features = [torch.nn.functional.elu(x) + 1 for x in (scene.query[0, row, 0], scene.key[0, :, 0])]
    return linear * linear.numel(), WIDTH**-0.5 * (features[0] * features[1].mean(0)).sum()


def test_the_ratio_of_mala_is_a_moebius_function_with_a_pole():
    """p(u) = ((1 + u) L_m - u / N) / ((1 + u) L_n - u / N), u the factor times z; the pole is at N L / (1 - N L)."""
    scene = make("mala")
    share, z = shares(scene, 3)
    first, second = int(share.argmax()), int(share.argmin())
    found = lens.score_ratio(scene, 3, (first, second), FACTORS)
    u = found.factors * z
    expected = ((1 + u) * share[first] - u) / ((1 + u) * share[second] - u)
    torch.testing.assert_close(found.ratio[:, 0, 0], expected, rtol=1e-7, atol=1e-7)
    pole = share[second] / (1 - share[second]) / z
    torch.testing.assert_close(found.pole[0, 0], pole)
    before = found.ratio[found.factors < pole, 0, 0]
    assert (before.diff() > 0).all()
    assert (found.ratio[found.factors > pole, 0, 0] < 0).all()
    above = lens.score_ratio(scene, 3, (second, first), FACTORS)
    assert above.pole[0, 0] == torch.inf


def test_the_ratio_of_softmax_is_a_power_and_that_of_linear_attention_stays():
    for mechanism in ("softmax", "linear", "nala", "relu"):
        scene = make(mechanism)
        first, second = scene.weights()[0, 0, 1].topk(2).indices.tolist()  # some weights are zero, and have no ratio
        found = lens.score_ratio(scene, 1, (first, second), FACTORS)
        base = lens.score_ratio(scene, 1, (first, second), [1.0]).ratio[0, 0, 0]
        expected = base.pow(found.factors) if mechanism == "softmax" else base.expand_as(found.factors)
        torch.testing.assert_close(found.ratio[:, 0, 0], expected, rtol=1e-6, atol=1e-9)
        assert found.pole.isinf().all()


def test_inline_weights_vanish_at_the_pole():
    scene = make("inline")
    for key in range(5):
        pole = lens.score_ratio(scene, 0, (0, key), [1.0]).pole[0, 0].item()
        if math.isfinite(pole):
            grown = af.weights(pole * scene.query, scene.key, "inline")
            assert grown[0, 0, 0, key].abs() < 1e-9


def test_ratios_of_rotated_scores_have_no_closed_form():
    with pytest.raises(ValueError, match="scene: expected one without rotary positions"):
        lens.score_ratio(make(rotary=True), 0, (0, 1), [1.0])


def test_collisions_of_linear_attention_and_none_of_inline():
    """Queries on one ray get one row from relu features, and different rows from InLine."""
    direction = torch.rand(1, 1, 1, WIDTH, dtype=torch.float64) + 0.1
    query = direction * torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=torch.float64)[:, None, None]
    key = torch.randn(1, 30, 1, WIDTH, dtype=torch.float64)
    assert lens.collisions(Scene(query, key, "relu")).pairs.item() == 6
    assert lens.collisions(Scene(query, key, "relu")).share.item() == 1
    for mechanism in ("inline", "mala", "softmax"):
        found = lens.collisions(Scene(query, key, mechanism))
        assert found.pairs.item() == 0
        assert found.nearest.item() > 1e-3
    twice = torch.cat((query, query), dim=1)
    assert lens.collisions(Scene(twice, key, "inline")).pairs.item() == 0  # the same query is no collision


def test_inline_collides_where_keys_are_fewer_than_channels():
    """Injectivity needs N >= d + 1: along the null space of the centred keys nothing is heard, by softmax neither."""
    key = torch.randn(1, WIDTH, 1, WIDTH, dtype=torch.float64)
    centred = key[0, :, 0] - key[0, :, 0].mean(0)
    null = torch.linalg.svd(centred).Vh[-1]
    query = torch.randn(WIDTH, dtype=torch.float64)
    query = torch.stack((query, query + 5 * null))[None, :, None]
    for mechanism in ("inline", "softmax"):
        assert lens.collisions(Scene(query, key, mechanism)).pairs.item() == 1


def test_ranks():
    scene = make("inline")
    assert lens.effective_rank(torch.ones(6, 7)).item() == pytest.approx(1, abs=1e-3)
    assert lens.effective_rank(torch.eye(6).double()).item() == pytest.approx(6)
    rank = lens.weight_rank(scene)
    assert rank.shape == (2, 2)
    assert (rank <= WIDTH + 1).all()
    value = torch.randn_like(scene.key)
    covariance = af.summarize(scene.key, value, "inline").covariance
    torch.testing.assert_close(lens.covariance_rank(scene, value), lens.effective_rank(covariance))
