"""The papers' claims, where they hold and where they fail. Letters and numbers are those of the claims' inequalities.

MALA: C1 sum to one, C2 sharpening, C3 signs, C4 blindness of linear attention, C5 boundedness, C6 low precision.
InLine: K1 to K3 injectivity, K5 signs, K6 boundedness, K7 sharpness.
NaLaFormer: N1 and N2 entropy, N3 and N4 the norm channel, N5 to N10 its arithmetic.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import affinear as af
from affinear.ops import rotary_1d, rotary_2d
from affinear.ops.mechanisms import elu_plus_one, nala_cosine_key, nala_cosine_query, nala_key, nala_query

Randn = Callable[..., Tensor]
Error = Callable[[Tensor, Tensor], float]


def with_map(name: str, feature_map: Callable[[Tensor], Tensor]) -> af.Mechanism:
    """A built-in rule with another feature map."""
    rule = af.mechanisms()[name]
    return dataclasses.replace(rule, name=f"{name} of another map", query_map=feature_map, key_map=feature_map)


def as_it_is(x: Tensor) -> Tensor:
    """The feature map of tokens that are features already."""
    return 1.0 * x


def one_head(x: Tensor) -> Tensor:
    """(N, D) as a batch of one with one head."""
    return x[None, :, None]


def rows_of(query: Tensor, key: Tensor, mechanism: str | af.Mechanism, scale: float | None = None) -> Tensor:
    """Weights (N, M) of queries (N, D) and keys (M, D)."""
    return af.weights(one_head(query), one_head(key), mechanism, scale=scale)[0, 0]


def entropy(rows: Tensor) -> Tensor:
    return -torch.special.xlogy(rows, rows).sum(-1)


def scores_of(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Scores a of elu + 1 features and their row means z."""
    scores = query.shape[-1] ** -0.5 * elu_plus_one(query) @ elu_plus_one(key).mT
    return scores, scores.mean(-1, keepdim=True)


# C1: MALA's rows sum to one, unless ...


def test_c1_the_released_epsilon_takes_its_share_of_the_row(randn: Randn):
    query, key = randn(50, 64), randn(196, 64)
    _, z = scores_of(query, key)
    sums = rows_of(query, key, "mala_released").sum(-1, keepdim=True)
    torch.testing.assert_close(sums, z / (z + 1e-6), rtol=0, atol=1e-12)
    assert (sums < 1 - 1e-8).all()
    torch.testing.assert_close(rows_of(query, key, "mala").sum(-1), torch.ones(50).double(), rtol=0, atol=1e-12)


def test_c1_released_rows_with_rotary_sum_to_less_than_nothing(randn: Randn):
    query, key = 0.2 * randn(1, 196, 1, 64), 0.2 * randn(1, 196, 1, 64)
    rotary = rotary_2d(14, 14, 64)
    released = af.weights(query, key, "mala_released", rotary=rotary)[0, 0]
    centred = af.weights(query, key, "mala", rotary=rotary)[0, 0]
    assert (released.sum(-1) < 0).all()
    assert -1.2 < released.sum(-1).mean() < -0.6
    assert (released < 0).double().mean() > 0.8
    torch.testing.assert_close(centred.sum(-1), torch.ones(196).double(), rtol=0, atol=1e-12)


def test_c1_a_query_whose_features_vanish_has_a_released_row_of_zeros_and_a_uniform_one_here(randn: Randn):
    query, key = -randn(3, 8).abs(), randn(20, 8)
    assert (rows_of(query, key, with_map("mala_released", F.relu)) == 0).all()
    for mechanism in (with_map("mala", F.relu), "relu"):
        torch.testing.assert_close(rows_of(query, key, mechanism), torch.full((3, 20), 1 / 20).double())


# C2: the ratio of two of MALA's weights is a Moebius function of the query's loudness.


def mala_ratios(better: float, worse: float, loudness: Tensor) -> tuple[Tensor, Tensor]:
    """Ratio of the weights of two keys of such relative scores among three, by `weights` and by the closed form."""
    key = torch.tensor([[better], [worse], [3 - better - worse]], dtype=torch.float64)
    rows = rows_of(loudness[:, None], key, with_map("mala", as_it_is), scale=1.0)
    closed = ((1 + loudness) * better - loudness) / ((1 + loudness) * worse - loudness)
    return rows[:, 0] / rows[:, 1], closed


def test_c2_below_the_pole_a_louder_query_prefers_the_better_key_by_a_larger_factor():
    loudness = torch.linspace(0.01, 8.99, 500, dtype=torch.float64)
    ratio, closed = mala_ratios(2.0, 0.9, loudness)
    torch.testing.assert_close(ratio, closed, rtol=1e-9, atol=0)
    assert (ratio.diff() > 0).all()
    assert ratio[0] > 2 / 0.9


def test_c2_the_ratio_grows_at_the_rate_of_its_closed_form():
    loudness = torch.linspace(0.1, 8, 20, dtype=torch.float64).requires_grad_()
    ratio, _ = mala_ratios(2.0, 0.9, loudness)
    (slope,) = torch.autograd.grad(ratio.sum(), loudness)
    denominator = ((1 + loudness) * 0.9 - loudness) / 3
    torch.testing.assert_close(slope, (2.0 - 0.9) / 3 / (3 * denominator**2))


def test_c2_beyond_the_pole_the_better_key_is_no_longer_preferred_by_any_factor():
    ratio, _ = mala_ratios(2.0, 0.9, torch.tensor([8.9, 9.1, 20.0, 1e6], dtype=torch.float64))
    assert ratio[0] == pytest.approx(1090, rel=1e-9)
    assert ratio[1] == pytest.approx(-1110, rel=1e-9)
    assert (ratio[1:] < 0).all()


def test_c2_two_keys_above_the_mean_have_a_bounded_ratio():
    ratio, _ = mala_ratios(1.6, 1.2, torch.logspace(-2, 6, 100, dtype=torch.float64))
    assert (ratio.diff() > 0).all()
    assert (ratio < (1.6 - 1) / (1.2 - 1)).all()
    assert ratio[-1] == pytest.approx(3, rel=1e-5)


def test_c2_softmax_raises_the_ratio_to_a_power_without_bound_or_pole(randn: Randn):
    query, key = randn(1, 8), randn(20, 8)
    one = rows_of(query, key, "softmax")[0]
    for factor in (0.5, 2.0, 8.0):
        louder = rows_of(factor * query, key, "softmax")[0]
        torch.testing.assert_close((louder / louder[0]).log(), factor * (one / one[0]).log())


# C3: which of MALA's weights are negative.


@pytest.mark.parametrize("spread", [0.2, 0.5, 1.0, 2.0])
def test_c3_a_weight_is_negative_exactly_if_its_score_lies_far_enough_below_the_mean(spread: float, randn: Randn):
    query, key = spread * randn(100, 64), spread * randn(300, 64)
    scores, z = scores_of(query, key)
    rows = rows_of(query, key, "mala")
    assert torch.equal(rows < 0, scores / z < z / (1 + z))
    assert torch.equal(rows < 0, scores < z**2 / (1 + z))
    free = (scores / z).amin(-1, keepdim=True) >= 1 - 1 / (1 + z)
    assert torch.equal((rows >= 0).all(-1, keepdim=True), free)


def test_c3_mala_s_weights_are_not_negative_at_initialisation_but_soon_are(randn: Randn):
    def negative_share(spread: float) -> float:
        return (rows_of(spread * randn(100, 64), spread * randn(300, 64), "mala") < 0).double().mean().item()

    assert negative_share(0.1) == 0
    assert negative_share(1.0) > 0.1
    assert negative_share(2.0) > 0.3


def test_c3_the_floor_of_elu_plus_one_makes_keys_a_ninth_below_the_mean_negative(randn: Randn):
    _, z = scores_of(0.05 * randn(100, 64), 0.05 * randn(300, 64))
    torch.testing.assert_close(z, torch.full_like(z, 8.0), rtol=0.05, atol=0)
    relative = torch.tensor([[1.22], [0.90], [0.88]], dtype=torch.float64)  # of which only the last is below 1 - 1 / 9
    row = rows_of(torch.tensor([[8.0]]).double(), relative, with_map("mala", as_it_is), scale=1.0)[0]
    assert (row < 0).tolist() == [False, False, True]


def test_c3_the_paper_s_literal_scale_is_negative_on_inline_s_own_figure():
    key = torch.tensor([(0.61, 1.85), (1.02, 1.0), (1.92, 0.65), (1.82, 0.31)], dtype=torch.float64)
    query = torch.tensor([(0.40, 0.71)], dtype=torch.float64)
    literal = rows_of(query, key, with_map("mala", as_it_is), scale=4.0)
    assert literal.min().item() == pytest.approx(-0.07, abs=5e-3)
    assert (rows_of(query, key, with_map("mala", as_it_is)) > 0).all()


# C4: linear attention does not hear the query's magnitude.


@pytest.mark.parametrize("mechanism", ["relu", "focused"])
def test_c4_a_homogeneous_map_is_exactly_blind_to_the_query_s_magnitude(mechanism: str, randn: Randn):
    query, key = randn(20, 64), randn(196, 64)
    for factor in (0.01, 0.5, 3.0, 100.0):
        torch.testing.assert_close(
            rows_of(factor * query, key, mechanism), rows_of(query, key, mechanism), rtol=0, atol=1e-14
        )


def test_c4_elu_plus_one_hears_a_little_and_softmax_everything(randn: Randn):
    direction, key = F.normalize(randn(20, 64), dim=-1), randn(196, 64)

    def change(mechanism: str) -> Tensor:
        """Entropy lost between the norms 0.1 and 64."""
        return entropy(rows_of(0.1 * direction, key, mechanism)) - entropy(rows_of(64 * direction, key, mechanism))

    assert (change("linear").abs() > 1e-6).all()
    assert (change("linear").abs() < 0.1).all()
    assert (change("softmax") > 1).all()


def test_c4_a_quiet_query_cannot_make_mala_any_quieter(randn: Randn):
    direction, key = F.normalize(randn(1, 64), dim=-1), randn(196, 64)
    loudness = [scores_of(norm * direction, key)[1].item() for norm in (0.0, 0.1, 64.0)]
    assert loudness[1] == pytest.approx(loudness[0], rel=0.05)
    assert loudness[2] > 2 * loudness[0]


# C5: MALA's answers are no convex combinations.


@pytest.mark.parametrize("spread", [0.2, 1.0, 4.0])
def test_c5_the_absolute_mass_of_a_row_lies_between_its_bounds(spread: float, randn: Randn):
    query, key = spread * randn(100, 64), spread * randn(300, 64)
    _, z = scores_of(query, key)
    mass = rows_of(query, key, "mala").abs().sum(-1)
    distance = (rows_of(query, key, "linear") - 1 / 300).abs().sum(-1) / 2
    assert (mass <= 1 + 2 * z[:, 0]).all()
    assert (mass >= 2 * (1 + z[:, 0]) * distance - 1).all()
    assert (mass >= 2 * z[:, 0] * distance - 1).all()


def test_c5_the_answer_moves_away_from_the_mean_in_proportion_to_the_loudness(randn: Randn, relative_error: Error):
    query, key, value = randn(1, 9, 1, 8).abs(), randn(1, 30, 1, 8).abs(), randn(1, 30, 1, 5)
    mean = value.mean(1, keepdim=True)
    plain = af.attention(query, key, value, with_map("linear", as_it_is)) - mean
    z = 8**-0.5 * (query * key.mean(1, keepdim=True)).sum(-1, keepdim=True)
    for factor in (1.0, 10.0, 1000.0):
        moved = af.attention(factor * query, key, value, with_map("mala", as_it_is)) - mean
        assert relative_error(moved, (1 + factor * z) * plain) <= 1e-11


@pytest.mark.parametrize("mechanism", ["softmax", "linear", "relu", "focused", "nala", "nala_cosine"])
def test_c5_divided_rows_stay_within_the_values(mechanism: str, randn: Randn):
    query, key, value = 4 * randn(1, 50, 2, 24), 4 * randn(1, 60, 2, 24), randn(1, 60, 2, 5)
    rows = af.weights(query, key, mechanism)
    assert (rows >= -1e-15).all()
    assert (rows <= 1 + 1e-15).all()
    out = af.attention(query, key, value, mechanism)
    assert (out <= value.amax(1, keepdim=True) + 1e-12).all()
    assert (out >= value.amin(1, keepdim=True) - 1e-12).all()


# C6: elu(x) + 1 in half precision.


@pytest.mark.parametrize(("dtype", "threshold"), [(torch.float16, -8.32), (torch.bfloat16, -6.24)])
def test_c6_elu_plus_one_cancels_to_zero_in_half_precision_and_ours_does_not(dtype: torch.dtype, threshold: float):
    below = torch.linspace(-17, threshold - 0.05, 400).to(dtype)
    above = torch.linspace(threshold + 0.05, 0, 400).to(dtype)
    assert (F.elu(below) + 1 == 0).all()
    assert (F.elu(above) + 1 > 0).all()
    assert (elu_plus_one(below) > 0).all()
    assert (elu_plus_one(torch.linspace(-100, 0, 400)) > 0).all()  # float32, in which features are made


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mechanism", ["linear", "mala"])
def test_c6_a_very_negative_query_still_tells_keys_apart(dtype: torch.dtype, mechanism: str, randn: Randn):
    query, key, value = (x.to(dtype) for x in (-12 + randn(1, 9, 2, 8).tanh(), randn(1, 30, 2, 8), randn(1, 30, 2, 5)))
    assert (F.elu(query) + 1 == 0).all()
    out = af.attention(query, key, value, mechanism).double()
    truth = af.attention(query.double(), key.double(), value.double(), mechanism, backend="reference")
    torch.testing.assert_close(out, truth, rtol=torch.finfo(dtype).eps, atol=1e-5)
    mean = value.double().mean(1, keepdim=True)
    assert (truth - mean).abs().amax() > 0.05


def test_c6_a_float16_reciprocal_of_a_small_z_overflows_and_ours_does_not(randn: Randn):
    z = torch.tensor(1e-5, dtype=torch.float16)
    assert (1 / (z + 1e-6)).isinf()
    query, key, value = (x.half() for x in (1e-3 * randn(1, 4, 1, 8), 1e-3 * randn(1, 9, 1, 8), randn(1, 9, 1, 5)))
    assert af.attention(query, key, value, "relu").isfinite().all()


# K1: injectivity needs more keys than channels.


def test_k1_with_enough_keys_an_inline_row_determines_its_query(randn: Randn):
    query, key = randn(5, 16), randn(40, 16)
    centred = key - key.mean(0)
    found = torch.linalg.lstsq(centred, (40 * rows_of(query, key, "inline") - 1).mT / 16**-0.5).solution.mT
    torch.testing.assert_close(found, query, rtol=0, atol=1e-10)


def test_k1_with_enough_keys_a_mala_row_determines_its_query(randn: Randn):
    query, key = randn(5, 16), randn(40, 16)
    features = elu_plus_one(key)
    # The row gives g = gain * phi(q); s g . k_mean is 1 + z; and elu + 1 is one-to-one.
    g = torch.linalg.lstsq(features - features.mean(0), (40 * rows_of(query, key, "mala") - 1).mT * 4).solution.mT
    z = 16**-0.5 * (g @ features.mean(0))[:, None] - 1
    phi = g / (1 + 1 / z)
    torch.testing.assert_close(torch.where(phi > 1, phi - 1, phi.log()), query, rtol=0, atol=1e-9)


@pytest.mark.parametrize("mechanism", ["inline", "softmax"])
def test_k1_in_a_window_of_49_keys_of_width_64_queries_collide(mechanism: str, randn: Randn):
    query, key = randn(1, 64), randn(49, 64)
    centred = key - key.mean(0)
    assert torch.linalg.matrix_rank(centred) == 48
    unseen = torch.linalg.svd(centred).Vh[48:]
    assert unseen.shape == (16, 64)
    other = query + 5 * unseen[:1]
    torch.testing.assert_close(rows_of(query, key, mechanism), rows_of(other, key, mechanism), rtol=0, atol=1e-13)
    assert (query - other).norm() > 4.9


def test_k1_linear_rows_collide_however_many_keys_there_are(randn: Randn):
    query, key = randn(5, 16).abs(), randn(300, 16)
    other = 2 * (query + 1) - 1  # twice the features
    torch.testing.assert_close(elu_plus_one(other), 2 * elu_plus_one(query))
    torch.testing.assert_close(rows_of(query, key, "linear"), rows_of(other, key, "linear"), rtol=0, atol=1e-15)
    assert (rows_of(query, key, "mala") - rows_of(other, key, "mala")).abs().amax() > 1e-3


def test_k1_nala_rows_collide_along_a_curve_of_queries(randn: Randn):
    query, key = randn(1, 16), randn(300, 16)

    def power(norm: Tensor) -> Tensor:
        return 3 * (0.5 + norm.tanh())

    norm = query.norm()
    direction = query.sign() * (query.abs() / norm) ** (power(norm) / power(norm / 8))
    other = norm / 8 * F.normalize(direction, dim=-1)
    torch.testing.assert_close(rows_of(query, key, "nala"), rows_of(other, key, "nala"), rtol=0, atol=1e-13)
    assert (F.normalize(query, dim=-1) - F.normalize(other, dim=-1)).norm() > 1e-3


# K2: injectivity needs a map that is one-to-one.


def test_k2_with_relu_queries_that_differ_in_negative_coordinates_collide(randn: Randn):
    query, key = randn(5, 16), randn(40, 16)
    other = torch.where(query < 0, query * 3 - 1, query)
    rule = with_map("inline", F.relu)
    assert torch.equal(rows_of(query, key, rule), rows_of(other, key, rule))
    assert not torch.allclose(rows_of(query, key, "inline"), rows_of(other, key, "inline"))


def test_k2_with_relu_all_negative_queries_get_the_uniform_row(randn: Randn):
    rows = rows_of(-randn(5, 16).abs(), randn(40, 16), with_map("inline", F.relu))
    torch.testing.assert_close(rows, torch.full((5, 40), 1 / 40).double())


# K3: different rows need not give different answers.


def test_k3_constant_values_give_one_answer_to_all_rows(randn: Randn):
    query, key = randn(1, 5, 1, 16), randn(1, 40, 1, 16)
    value = randn(1, 1, 1, 6).expand(-1, 40, -1, -1)
    for mechanism in ("inline", "mala"):
        rows = af.weights(query, key, mechanism)[0, 0]
        assert (rows[0] - rows[1]).abs().amax() > 1e-3
        torch.testing.assert_close(af.attention(query, key, value, mechanism), value[:, :5], rtol=0, atol=1e-13)


def test_k3_a_covariance_of_low_rank_hides_queries_from_the_answer(randn: Randn, relative_error: Error):
    query, key, value = (
        randn(1, 1, 1, 16),
        randn(1, 40, 1, 16),
        randn(1, 40, 1, 6),
    )  # six values cannot hold 16 channels
    covariance = af.summarize(key, value, "inline").covariance[0, 0]
    hidden = torch.linalg.svd(covariance).U[:, 6:7].mT[None, None]
    assert (covariance.mT @ hidden[0, 0, 0]).norm() < 1e-13
    other = query + 5 * hidden
    assert relative_error(af.attention(other, key, value, "inline"), af.attention(query, key, value, "inline")) < 1e-11
    assert (af.weights(other, key, "inline") - af.weights(query, key, "inline")).abs().amax() > 1e-3


# K5: which of InLine's weights are negative.


@pytest.mark.parametrize("spread", [0.3, 1.0, 2.0])
def test_k5_a_weight_is_negative_exactly_if_its_key_lies_more_than_one_behind_the_mean(spread: float, randn: Randn):
    query, key = spread * randn(100, 64), spread * randn(196, 64)
    scores = 64**-0.5 * query @ key.mT
    z = scores.mean(-1, keepdim=True)
    rows = rows_of(query, key, "inline")
    assert torch.equal(rows < 0, scores < z - 1)
    assert torch.equal(rows < 0, 64**-0.5 * query @ (key.mean(0) - key).mT > 1)


def test_k5_within_the_cauchy_schwarz_region_no_weight_is_negative(randn: Randn):
    direction, key = F.normalize(randn(100, 64), dim=-1), randn(196, 64)
    reach = (key - key.mean(0)).norm(dim=-1).amax()
    safe = direction * 64**0.5 / reach  # s ||q|| max ||k - k_mean|| = 1
    assert (rows_of(0.999999 * safe, key, "inline") >= 0).all()
    # The bound is attained by a query that points straight away from the farthest key.
    farthest = (key - key.mean(0))[(key - key.mean(0)).norm(dim=-1).argmax()]
    worst = -F.normalize(farthest[None], dim=-1) * 64**0.5 / reach
    assert rows_of(1.000001 * worst, key, "inline").min() < 0
    assert rows_of(0.999999 * worst, key, "inline").min() > 0


@pytest.mark.parametrize("mechanism", ["linear", "mala", "inline"])
def test_k5_the_safe_region_holds_for_every_gain(mechanism: str, randn: Randn):
    rule = af.mechanisms()[mechanism]
    query, key = 0.3 * randn(200, 16), 0.3 * randn(50, 16)
    phi_q, phi_k = rule.query_map(query), rule.key_map(key)
    assert rule.gain is not None
    gain = rule.gain(0.25 * phi_q @ phi_k.mean(0))
    reach = (phi_k - phi_k.mean(0)).norm(dim=-1).amax()
    safe = gain * 0.25 * phi_q.norm(dim=-1) * reach <= 1
    assert (rows_of(query, key, rule)[safe] >= 0).all()


# K6 and K7: InLine's growth is linear, in its answers and in its weights.


def test_k6_inline_s_answer_leaves_the_mean_linearly_in_the_query(randn: Randn, relative_error: Error):
    query, key, value = randn(1, 9, 1, 16), randn(1, 40, 1, 16), randn(1, 40, 1, 5)
    mean = value.mean(1, keepdim=True)
    covariance = torch.einsum("md,me->de", key[0, :, 0] - key[0, :, 0].mean(0), value[0, :, 0] - mean[0, :, 0]) / 40
    for factor in (1.0, 10.0, 1000.0):
        moved = af.attention(factor * query, key, value, "inline") - mean
        assert relative_error(moved[0, :, 0], factor * 0.25 * query[0, :, 0] @ covariance) <= 1e-11


def test_k7_inline_s_largest_weight_grows_linearly_while_softmax_s_approaches_one(randn: Randn):
    query, key = randn(20, 16), randn(40, 16)
    excess = rows_of(query, key, "inline").amax(-1) - 1 / 40
    for factor in (2.0, 50.0, 3000.0):
        louder = rows_of(factor * query, key, "inline").amax(-1) - 1 / 40
        torch.testing.assert_close(louder, factor * excess)
    assert (rows_of(3000 * query, key, "inline").amax(-1) > 1).all()
    assert (rows_of(3000 * query, key, "softmax").amax(-1) <= 1).all()


# N1 and N2: entropy.


@pytest.mark.parametrize("tau", [0.1, 1.0, 5.0])
def test_n1_softmax_s_entropy_falls_at_the_rate_tau_times_the_variance(tau: float, randn: Randn):
    direction, key = F.normalize(randn(1, 16), dim=-1), randn(40, 16)
    loudness = torch.tensor(tau, dtype=torch.float64, requires_grad=True)
    row = rows_of(loudness * direction, key, "softmax")[0]
    (slope,) = torch.autograd.grad(entropy(row), loudness)
    scores = 0.25 * (key @ direction[0])
    variance = (row * scores**2).sum() - (row * scores).sum() ** 2
    torch.testing.assert_close(slope, -tau * variance)
    assert slope < 0


def test_n1_a_query_that_cannot_tell_the_keys_apart_keeps_its_entropy(randn: Randn):
    direction, key = randn(1, 16), randn(40, 16)
    key = key - (key @ direction[0])[:, None] * direction / direction.square().sum()
    for norm in (0.1, 1.0, 100.0):
        assert entropy(rows_of(norm * direction, key, "softmax")).item() == pytest.approx(math.log(40), abs=1e-12)


def test_n2_a_power_sharpens_a_positive_sequence(randn: Randn):
    sequence = randn(40).abs()
    power = torch.linspace(0.5, 5, 10, dtype=torch.float64).requires_grad_()
    shares = sequence ** power[:, None]
    shares = shares / shares.sum(-1, keepdim=True)
    (slope,) = torch.autograd.grad(entropy(shares).sum(), power)
    logarithm = sequence.log()
    variance = (shares * logarithm**2).sum(-1) - (shares * logarithm).sum(-1) ** 2
    torch.testing.assert_close(slope, -power * variance)
    assert (slope < 0).all()


def test_n2_a_louder_nala_query_can_have_the_flatter_row():
    direction = torch.tensor([[0.9, 0.436]], dtype=torch.float64)
    key = torch.tensor([(1.0, 0.0)] * 4 + [(1.0, 2.0)] * 4, dtype=torch.float64)
    quiet, loud = (entropy(rows_of(norm * direction, key, "nala")).item() for norm in (0.001, 5.0))
    assert quiet == pytest.approx(1.9045, abs=2e-4)
    assert loud == pytest.approx(2.0706, abs=1e-4)
    assert quiet < loud < math.log(8)
    # Softmax does the opposite, as N1 says.
    quiet, loud = (entropy(rows_of(norm * direction, key, "softmax")).item() for norm in (0.001, 5.0))
    assert loud < quiet


# N3 and N4: the norm channel.


@pytest.mark.parametrize("mechanism", ["nala", "nala_cosine"])
def test_n3_a_query_of_equal_magnitudes_is_norm_blind(mechanism: str, randn: Randn):
    key = randn(40, 16)
    axis = torch.eye(16, dtype=torch.float64)[:3]
    pattern = randn(3, 16).sign()
    for direction in (axis, pattern, pattern * (torch.arange(16) < 5)):
        quiet, loud = (rows_of(norm * F.normalize(direction, dim=-1), key, mechanism) for norm in (0.01, 5.0))
        torch.testing.assert_close(quiet, loud, rtol=0, atol=1e-13)


def test_n3_a_query_of_unequal_magnitudes_is_not(randn: Randn):
    direction, key = F.normalize(randn(5, 16), dim=-1), randn(40, 16)
    quiet, loud = (rows_of(norm * direction, key, "nala") for norm in (0.01, 5.0))
    assert (quiet - loud).abs().amax() > 1e-3


def nala_powers(norms: Tensor) -> Tensor:
    """The power that a query of each norm (N, 1) gets, read off its features."""
    direction = torch.tensor([0.6, 0.8], dtype=torch.float64)
    return nala_query(norms * direction)[:, :1].log() / math.log(0.6)


@pytest.mark.parametrize(("norm", "rate"), [(1e-6, 3.0), (1.0, 1.26), (2.0, 0.21), (3.0, 0.03), (5.0, 5e-4)])
def test_n4_the_norm_channel_saturates(norm: float, rate: float):
    norms = torch.tensor([[norm]], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(nala_powers(norms).sum(), norms)
    assert slope.item() == pytest.approx(3 / math.cosh(norm) ** 2, rel=1e-6)
    assert slope.item() == pytest.approx(rate, rel=0.1)


def test_n4_the_power_never_leaves_its_range():
    powers = nala_powers(torch.tensor([[1e-9], [0.1], [1.0], [4.6], [5.0]], dtype=torch.float64))
    assert (powers > 1.5).all()
    assert (powers < 4.5).all()
    assert (powers.diff(dim=0) > 0).all()
    assert powers[3].item() > 4.499  # the norm of a freshly initialised query of width 64: nothing left to say


def test_n4_above_norm_three_nala_hears_next_to_nothing_and_softmax_as_much_as_ever(randn: Randn):
    direction, key = F.normalize(randn(50, 64), dim=-1), randn(196, 64)
    for mechanism, hears in (("nala", False), ("softmax", True)):
        change = (rows_of(4 * direction, key, mechanism) - rows_of(16 * direction, key, mechanism)).abs().sum(-1)
        assert ((change > 0.05) == hears).all()


# N5 to N10: the arithmetic.


def test_n5_a_zero_query_has_no_direction_and_gets_the_mean(randn: Randn):
    query = torch.zeros(1, 1, 1, 8, dtype=torch.float64, requires_grad=True)
    key, value = randn(1, 20, 1, 8), randn(1, 20, 1, 5)
    assert (query / query.norm(dim=-1, keepdim=True)).isnan().all()
    for mechanism in ("nala", "nala_cosine"):
        out = af.attention(query, key, value, mechanism)
        torch.testing.assert_close(out, value.mean(1, keepdim=True))
        (gradient,) = torch.autograd.grad(out.sum(), query)
        assert gradient.isfinite().all()


def test_n6_the_released_epsilon_takes_a_third_of_the_row_from_small_keys(randn: Randn):
    query = 64**-0.5 * 4.6 * randn(100, 64)
    small, usual = 0.05 * randn(300, 64), 0.577 * randn(300, 64)

    def missing(key: Tensor, mechanism: str) -> float:
        return 1 - rows_of(query, key, mechanism).sum(-1).mean().item()

    assert 0.2 < missing(small, "nala_released") < 0.45
    assert 1e-4 < missing(usual, "nala_released") < 1e-3
    assert missing(small, "nala") == pytest.approx(0, abs=1e-12)
    share = nala_query(query) @ nala_key(small).mean(0)
    expected = share / (share + 1e-6)
    torch.testing.assert_close(rows_of(query, small, "nala_released").sum(-1), expected, rtol=1e-12, atol=0)


def test_n7_keys_whose_cube_overflows_float16_are_no_trouble(randn: Randn):
    key = torch.full((1, 20, 1, 8), 41.0).half() * randn(1, 20, 1, 8).sign().half()
    assert (key**3).isinf().all()
    query, value = randn(1, 5, 1, 8).half(), randn(1, 20, 1, 5).half()
    out = af.attention(query, key, value, "nala").double()
    truth = af.attention(query.double(), key.double(), value.double(), "nala", backend="reference")
    torch.testing.assert_close(out, truth, rtol=1e-3, atol=1e-5)


def test_n8_rotation_makes_nala_s_weights_negative(randn: Randn):
    query, key = 0.577 * randn(1, 196, 1, 32), 0.577 * randn(1, 196, 1, 32)
    rotary = rotary_2d(14, 14, 32)
    for mechanism in ("nala_released", "nala"):
        assert (af.weights(query, key, mechanism) >= 0).all()
        assert (af.weights(query, key, mechanism, rotary=rotary) < 0).double().mean() > 0.01
    sums = af.weights(query, key, "nala_released", rotary=rotary).sum(-1)
    assert 0.4 < sums.mean() < 0.9


def test_n8_two_pixels_are_enough():
    tokens = torch.tensor([1.0, 0.0], dtype=torch.float64).expand(1, 3, 1, 2)
    rows = af.weights(tokens, tokens, "nala_released", rotary=rotary_1d(3, 2))[0, 0]
    assert rows[0, 0] > 0
    assert rows[0, 1] > 0
    assert rows[0, 2] < 0
    torch.testing.assert_close(rows[0] * 3, torch.arange(3).double().cos(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("width", [1, 8])
def test_n9_without_a_common_sign_the_released_answer_is_zero_and_ours_the_mean(
    dtype: torch.dtype, backend: str, width: int, randn: Randn
):
    query, key, value = (randn(1, 20, 1, size, dtype=dtype) for size in (width, width, 5))
    query, key = query.abs(), -key.abs()
    mean = value.mean(1, keepdim=True).expand_as(value)
    assert (af.attention(query, key, value, "nala_released", backend=backend) == 0).all()
    torch.testing.assert_close(af.attention(query, key, value, "nala", backend=backend), mean)


@pytest.mark.parametrize("width", [1, 8])
def test_n9_without_a_common_sign_the_cosine_map_still_knows_its_row(width: int, randn: Randn, relative_error: Error):
    # Every product is a cosine of nearly a right angle, to be had without cancellation.
    query, key = torch.ones(1, 4, 1, width), -randn(1, 20, 1, 1, dtype=torch.float32).abs().expand(-1, -1, -1, width)
    value = randn(1, 20, 1, 5, dtype=torch.float32)
    truth = af.attention(query.double(), key.double(), value.double(), "nala_cosine", backend="reference")
    out = af.attention(query.double(), key.double(), value.double(), "nala_cosine")
    assert relative_error(out, truth) <= 1e-12
    assert relative_error(af.attention(query, key, value, "nala_cosine"), truth) <= 2e-6


def test_n10_products_of_opposite_signs_are_dropped_and_the_others_distorted(randn: Randn):
    query, key = randn(30, 8), randn(40, 8)
    norm = query.norm(dim=-1, keepdim=True)
    sharpened = (query / norm).abs() ** (3 * (0.5 + norm.tanh()))
    same_sign = (query[:, None] * key > 0).double()
    expected = (sharpened[:, None] * key.abs() ** 3 * same_sign).sum(-1)
    torch.testing.assert_close(nala_query(query) @ nala_key(key).mT, expected)


# The cosine map of the NaLaFormer paper and the sign split of its code.


def test_the_sign_split_is_the_limit_of_the_cosine_map(randn: Randn, monkeypatch: pytest.MonkeyPatch):
    query, key = randn(50, 64), randn(60, 64)
    split = nala_query(query) @ nala_key(key).mT

    def distance(slope: float) -> float:
        monkeypatch.setattr(importlib.import_module("affinear.ops.mechanisms"), "NALA_PHASE", slope)
        cosine = nala_cosine_query(query) @ nala_cosine_key(key).mT
        return ((cosine - split).norm() / split.norm()).item()

    distances = [distance(slope) for slope in (5, 20, 200, 1e8)]
    assert distances == sorted(distances, reverse=True)
    assert distances[0] > 1e-2
    assert distances[1] < 2e-2
    assert distances[3] < 1e-12
